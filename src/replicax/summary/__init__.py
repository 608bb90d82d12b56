"""Summaries for TensorBoard, under TensorFlow's names; requires neither of the two.

Example:
    >>> import tempfile
    >>> writer = rx.summary.create_file_writer(tempfile.mkdtemp())
    >>> with writer.as_default():
    ...     rx.summary.scalar("loss", 0.5, step=1)
    True
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.summary.summary import (
    flush,
    histogram,
    image,
    record_if,
    scalar,
    should_record_summaries,
    text,
)
from replicax._src.summary.writer import SummaryWriter, create_file_writer, create_noop_writer
from replicax.summary import experimental

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "create_noop_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]

__dir__ = __all__.copy

_ABSENT = {
    "audio": "Use `add_audio` of `torch.utils.tensorboard`, or write sound files separately.",
    "graph": "There is no graph of operations; `rx.preflight` shows the compiled step.",
    **dict.fromkeys(
        ("trace_export", "trace_off", "trace_on"),
        "Write `with jax.profiler.trace(logdir):`, which TensorBoard's profiler reads.",
    ),
    "write": "Write `rx.summary.scalar`, `histogram`, `image` or `text`, as the plugins do.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
