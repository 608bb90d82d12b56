"""The functions that write summaries to the current writer."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from replicax._src.base.errors import ScopeError, TracingError
from replicax._src.context.current import current
from replicax._src.data.leaves import Array
from replicax._src.state.levels import TraceLevel
from replicax._src.summary.writer import (
    SummaryWriter,
    defaults,
    get_step,
    histogram_value,
    image_value,
    keras_model_value,
    scalar_value,
    state,
    text_value,
)
from replicax._src.values.placement import is_traced


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Write a scalar summary.

    Args:
        name: The name of the summary.
        data: One number.
        step: The step; the one passed to `as_default` or `set_step` if None.
        description: A description for TensorBoard, in Markdown.

    Returns:
        Whether it was written. That requires a writer, a true `record_if` condition, and that this
        is the first worker and, if called in a replica, the first replica.

    Example:
        >>> rx.summary.scalar("loss", 0.5, step=1)  # there is no writer
        False
    """
    return _write(name, data, step, lambda x: scalar_value(name, x, description))


def histogram(
    name: str,
    data: Any,
    step: Any = None,
    buckets: int | None = None,
    description: str | None = None,
) -> bool:
    """Write a histogram of the values of an array.

    Args:
        name: The name of the summary.
        data: Numbers, in any shape.
        step: The step; the one passed to `as_default` or `set_step` if None.
        buckets: The number of buckets, of equal width; 30 if None.
        description: A description for TensorBoard, in Markdown.

    Returns:
        Whether it was written.

    Example:
        >>> rx.summary.histogram("weights", np.arange(10.0), step=1)  # there is no writer
        False
    """
    return _write(name, data, step, lambda x: histogram_value(name, x, buckets, description))


def image(
    name: str,
    data: Any,
    step: Any = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Write images.

    Args:
        name: The name of the summary.
        data: Images of shape [count, height, width, channels]: uint8, or floats from 0 to 1.
        step: The step; the one passed to `as_default` or `set_step` if None.
        max_outputs: The maximum number of images to write.
        description: A description for TensorBoard, in Markdown.

    Returns:
        Whether they were written.

    Example:
        >>> rx.summary.image("digits", np.zeros((1, 8, 8, 1)), step=1)  # there is no writer
        False
    """
    return _write(name, data, step, lambda x: image_value(name, x, max_outputs, description))


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Write text.

    Args:
        name: The name of the summary.
        data: A string, or an array of strings, in Markdown.
        step: The step; the one passed to `as_default` or `set_step` if None.
        description: A description for TensorBoard.

    Returns:
        Whether it was written.

    Example:
        >>> rx.summary.text("settings", "batch 64", step=0)  # there is no writer
        False
    """
    objects = np.asarray(data, dtype=object)
    return _write(name, objects, step, lambda x: text_value(name, x, description))


def keras_model(name: str, json: str, step: Any = None) -> bool:
    """Write the configuration of a Keras model, from which TensorBoard draws its layers."""
    return _write(name, json, step, lambda x: keras_model_value(name, x, None))


def _write(name: str, data: Any, step: Any, encode: Callable[[Array], bytes]) -> bool:
    """Encode `data` and write it if summaries are recorded; return whether it was written."""
    is_compiled = isinstance(current().level, TraceLevel)
    if is_compiled or any(is_traced(x) for x in (data, step)):
        raise TracingError(
            f"The summary {name!r} is written in a function that is being compiled, where its value"
            " is not known yet. Return the value from the function, and call"
            " `rx.summary` with the result."
        )
    if not should_record_summaries():
        return False
    step = get_step() if step is None else step
    if step is None:
        raise ScopeError(
            f"The summary {name!r} has no step. Write `step=...`, `writer.as_default(step=...)`, or"
            " `rx.summary.experimental.set_step(step)` before."
        )
    writer = _writer()
    assert writer is not None
    writer.write(int(np.asarray(step)), encode(np.asarray(data)))
    return True


def _writer() -> SummaryWriter | None:
    return state.get().writer or defaults.get("writer")


def should_record_summaries() -> bool:
    """Whether a summary written now would be recorded.

    Returns:
        True if there is a writer, the condition of `record_if` holds, and this is the first worker
        and, if called in a replica, the first replica.

    Example:
        >>> rx.summary.should_record_summaries()
        False
    """
    writer = _writer()
    if writer is None or not writer.writes or not is_first():
        return False
    condition = state.get().condition
    return bool(condition() if callable(condition) else condition)


def is_first() -> bool:
    """Whether this is the first worker and, in a replica, the first replica."""
    replica = current().replica
    if replica is not None and int(replica.replica_id_in_sync_group) != 0:
        return False
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def record_if(  # TensorFlow's signature
    condition: bool | Callable[[], Any],  # noqa: FBT001
) -> Iterator[None]:
    """Write summaries in the block only if a condition holds.

    Args:
        condition: A bool, or a function that is called for each summary.

    Example:
        >>> with rx.summary.record_if(lambda: step % 100 == 0):
        ...     pass
    """
    token = state.set(replace(state.get(), condition=condition))
    try:
        yield
    finally:
        state.reset(token)


def flush(writer: SummaryWriter | None = None, name: str | None = None) -> None:
    """Write buffered summaries to the file.

    Args:
        writer: The writer to flush; the current one if None.
        name: Accepted for compatibility with TensorFlow and ignored.

    Example:
        >>> rx.summary.flush()
    """
    writer = writer or _writer()
    if writer is not None:
        writer.flush()
