"""Removal of replicax's own frames from the tracebacks of errors in a user's program."""

import os
from types import TracebackType

from replicax._src.base.errors import ReplicaxError
from replicax._src.base.origin import is_replicax

_VARIABLE = "REPLICAX_TRACEBACK_FILTERING"


def shorten(error: Exception) -> Exception:
    """Return ``error`` without the frames of replicax in its traceback and those of its causes.

    An error that replicax raised unintentionally keeps all of its frames, as does every error if
    the environment has ``REPLICAX_TRACEBACK_FILTERING=off``.
    """
    if os.environ.get(_VARIABLE) == "off":
        return error
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        if not _is_internal(found):
            found.__traceback__ = _without_own_frames(found.__traceback__)
        found = found.__cause__ or found.__context__
    return error


def _is_internal(error: BaseException) -> bool:
    """Whether replicax itself raised the error, without a message for users."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    is_own = last is not None and is_replicax(last.tb_frame.f_code.co_filename)
    return is_own and not isinstance(error, ReplicaxError | TypeError | ValueError)


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if not is_replicax(traceback.tb_frame.f_code.co_filename):
            entries.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept
