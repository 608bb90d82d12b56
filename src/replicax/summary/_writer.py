"""Writers of summaries, which of them is asked now, and at which step."""

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from replicax.data._records._writer import TFRecordWriter
from replicax.summary import _events

_FLUSH_MILLIS, _MAX_QUEUE = 120_000, 10
_numbers = itertools.count()  # of the files of this process


@dataclass(frozen=True)
class State:
    """Where summaries go now, at which step, and under which condition."""

    writer: "SummaryWriter | None" = None
    step: Any = None
    condition: Any = True


state: ContextVar[State] = ContextVar("summary", default=State())  # noqa: B039 - it is frozen
settled: dict[str, Any] = {}  # what set_as_default and set_step say, for all threads


class SummaryWriter:
    """Writes summaries to a file for TensorBoard; `create_file_writer` makes one.

    With several workers the first writes; what the others are told goes nowhere.

    Example:
        >>> writer = rx.summary.create_noop_writer()
        >>> with writer.as_default(step=1):
        ...     rx.summary.scalar("loss", 0.5)
        False
    """

    def __init__(
        self, open_file: Callable[[], TFRecordWriter] | None, queue: int, wait: float
    ) -> None:
        self._open = open_file
        self._queue = queue
        self._wait = wait
        self._records: TFRecordWriter | None = None
        self._waiting = 0
        self._flushed = time.monotonic()
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def writes(self) -> bool:
        """Whether there is a file behind it."""
        return self._open is not None and not self._is_closed

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator["SummaryWriter"]:
        """Make it the one that summaries go to until the block ends.

        Args:
            step: The step of the summaries in the block that name none.

        Example:
            >>> with rx.summary.create_noop_writer().as_default():
            ...     rx.summary.should_record_summaries()
            False
        """
        now = state.get()
        token = state.set(replace(now, writer=self, step=now.step if step is None else step))
        try:
            yield self
        finally:
            self.flush()
            state.reset(token)

    def set_as_default(self, step: Any = None) -> None:
        """Make it the one that summaries go to outside of every `as_default`.

        Args:
            step: The step of summaries that name none.

        Example:
            >>> rx.summary.create_noop_writer().set_as_default()
        """
        settled["writer"] = self
        if step is not None:
            settled["step"] = step

    def init(self) -> None:
        """Does nothing: a writer is ready when it is made.

        Example:
            >>> rx.summary.create_noop_writer().init()
        """

    def write(self, step: int, value: bytes) -> None:
        """Add one value of a summary to the file.

        Args:
            step: At which step.
            value: Its bytes.
        """
        with self._lock:
            if self._records is None:
                assert self._open is not None
                self._records = self._open()
                weakref.finalize(self, self._records.close)  # at the end of the program, too
            self._records.write(_events.event(time.time(), step, value))
            self._waiting += 1
            late = time.monotonic() - self._flushed > self._wait
        if late or self._waiting >= self._queue:
            self.flush()

    def flush(self) -> None:
        """Bring what is written so far to the file.

        Example:
            >>> rx.summary.create_noop_writer().flush()
        """
        with self._lock:
            self._waiting, self._flushed = 0, time.monotonic()
            if self._records is not None and not self._is_closed:
                self._records.flush()

    def close(self) -> None:
        """Finish the file; nothing can be written after it.

        Example:
            >>> rx.summary.create_noop_writer().close()
        """
        with self._lock:
            self._is_closed = True
            if self._records is not None:
                self._records.close()


def create_file_writer(
    logdir: str | os.PathLike[str],
    max_queue: int | None = None,
    flush_millis: int | None = None,
    filename_suffix: str | None = None,
    name: str | None = None,
    experimental_trackable: bool = False,
    experimental_mesh: Any = None,
) -> SummaryWriter:
    """A writer of a new file for TensorBoard.

    The file is made with the first summary, and by the first of several workers only.

    Args:
        logdir: The folder, which is made if it is not there.
        max_queue: After how many summaries they are brought to the file; 10 if None.
        flush_millis: After what time they are; two minutes if None.
        filename_suffix: The end of the file's name; ``".v2"`` if None.
        name: Accepted for TensorFlow's sake, as all that follow.
        experimental_trackable: Accepted.
        experimental_mesh: Accepted.

    Returns:
        The writer.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> writer = rx.summary.create_file_writer(folder)
        >>> with writer.as_default():
        ...     for step in range(3):
        ...         _ = rx.summary.scalar("loss", 1 / (step + 1), step=step)
        >>> len(os.listdir(folder))
        1
    """
    suffix = ".v2" if filename_suffix is None else filename_suffix
    queue = _MAX_QUEUE if max_queue is None else max_queue
    wait = (_FLUSH_MILLIS if flush_millis is None else flush_millis) / 1000
    return SummaryWriter(partial(_open, Path(logdir), suffix), queue, wait)


def _open(folder: Path, suffix: str) -> TFRecordWriter:
    folder.mkdir(parents=True, exist_ok=True)
    now, host = time.time(), socket.gethostname()
    name = f"events.out.tfevents.{int(now)}.{host}.{os.getpid()}.{next(_numbers)}{suffix}"
    records = TFRecordWriter(folder / name)
    records.write(_events.header(now))
    return records


def create_noop_writer() -> SummaryWriter:
    """A writer that writes nothing.

    Example:
        >>> rx.summary.create_noop_writer().writes
        False
    """
    return SummaryWriter(None, _MAX_QUEUE, _FLUSH_MILLIS / 1000)


def get_step() -> Any:
    """The step of summaries that name none.

    Example:
        >>> with rx.summary.create_noop_writer().as_default(step=7):
        ...     rx.summary.experimental.get_step()
        7
    """
    step = state.get().step
    return settled.get("step") if step is None else step


def set_step(step: Any) -> None:
    """Say the step of summaries that name none.

    Args:
        step: A number, or a variable that counts; None for none.

    Example:
        >>> rx.summary.experimental.set_step(5)
        >>> rx.summary.experimental.get_step()
        5
        >>> rx.summary.experimental.set_step(None)
    """
    settled["step"] = step
