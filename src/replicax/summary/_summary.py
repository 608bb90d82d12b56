"""Writing summaries: to the writer of now, if they are wanted."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from replicax._errors import ScopeError, TracingError
from replicax.context._current import current
from replicax.data._leaves import Array
from replicax.state._levels import TraceLevel
from replicax.summary._writer import (
    SummaryWriter,
    get_step,
    histogram_value,
    image_value,
    scalar_value,
    settled,
    state,
    text_value,
)
from replicax.values._placement import is_traced


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Write a number.

    Args:
        name: What it is called.
        data: One number.
        step: At which step; that of `as_default` or `set_step` if None.
        description: What TensorBoard says of it, in Markdown.

    Returns:
        Whether it was written: there is a writer, `record_if` allows it, and this is the first
        worker, and the first replica if it is called in one.

    Example:
        >>> rx.summary.scalar("loss", 0.5, step=1)  # there is no writer
        False
    """
    return _written(name, data, step, lambda x: scalar_value(name, x, description))


def histogram(
    name: str,
    data: Any,
    step: Any = None,
    buckets: int | None = None,
    description: str | None = None,
) -> bool:
    """Write how the values of an array are distributed.

    Args:
        name: What it is called.
        data: Numbers, in any shape.
        step: At which step; that of `as_default` or `set_step` if None.
        buckets: How many intervals of the same width; 30 if None.
        description: What TensorBoard says of it, in Markdown.

    Returns:
        Whether it was written.

    Example:
        >>> rx.summary.histogram("weights", np.arange(10.0), step=1)  # there is no writer
        False
    """
    return _written(name, data, step, lambda x: histogram_value(name, x, buckets, description))


def image(
    name: str,
    data: Any,
    step: Any = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Write images.

    Args:
        name: What they are called.
        data: Images of shape [count, height, width, channels]: uint8, or floats from 0 to 1.
        step: At which step; that of `as_default` or `set_step` if None.
        max_outputs: How many of them at most.
        description: What TensorBoard says of them, in Markdown.

    Returns:
        Whether they were written.

    Example:
        >>> rx.summary.image("digits", np.zeros((1, 8, 8, 1)), step=1)  # there is no writer
        False
    """
    return _written(name, data, step, lambda x: image_value(name, x, max_outputs, description))


def text(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Write text.

    Args:
        name: What it is called.
        data: A string, or an array of strings, in Markdown.
        step: At which step; that of `as_default` or `set_step` if None.
        description: What TensorBoard says of it.

    Returns:
        Whether it was written.

    Example:
        >>> rx.summary.text("settings", "batch 64", step=0)  # there is no writer
        False
    """
    objects = np.asarray(data, dtype=object)
    return _written(name, objects, step, lambda x: text_value(name, x, description))


def _written(name: str, data: Any, step: Any, encode: Callable[[Array], bytes]) -> bool:
    is_compiled = isinstance(current().level, TraceLevel)
    if is_compiled or any(is_traced(x) for x in (data, step)):
        raise TracingError(
            f"The summary {name!r} is written in a function that is being compiled, where its value"
            " is not known yet. Return the value from the function, and call"
            " `rx.summary` with what it gives."
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
    return state.get().writer or settled.get("writer")


def should_record_summaries() -> bool:
    """Whether a summary that is written now goes to a file.

    Returns:
        True if there is a writer, `record_if` allows it, and this is the first worker, and the
        first replica if it is called in one.

    Example:
        >>> rx.summary.should_record_summaries()
        False
    """
    writer = _writer()
    if writer is None or not writer.writes or not _is_first():
        return False
    condition = state.get().condition
    return bool(condition() if callable(condition) else condition)


def _is_first() -> bool:
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
        condition: True or False, or a function that is asked for each summary.

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
    """Bring what is written so far to the file.

    Args:
        writer: Whose; the one that summaries go to now if None.
        name: Accepted for TensorFlow's sake.

    Example:
        >>> rx.summary.flush()
    """
    writer = writer or _writer()
    if writer is not None:
        writer.flush()
