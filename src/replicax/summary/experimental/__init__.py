"""The default step of summaries.

Example:
    >>> rx.summary.experimental.get_step() is None
    True
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.summary.writer import get_step, set_step

__all__ = ["get_step", "set_step"]

__dir__ = __all__.copy

_ABSENT = {
    "summary_scope": "Names are written out: `rx.summary.scalar(f'{scope}/loss', loss, step)`.",
    "write_raw_pb": "Write `rx.summary.scalar`, `histogram`, `image` or `text`.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
