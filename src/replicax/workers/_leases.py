"""Leases: how long a worker that saves its last checkpoint may outlive the launcher's grace period.

The launcher gives its workers a folder. A worker that was told to end writes a file there, named
after its session; the launcher, or its guard, waits for it until the lease ends, and no longer.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "REPLICAX_LEASES"


@dataclass(frozen=True)
class Lease:
    """A worker's request for time to finish.

    Attributes:
        until: When it must have ended, by the monotonic clock, which all processes share.
        what: The reason, in words.
    """

    until: float
    what: str

    @property
    def left(self) -> float:
        """The seconds that are left; negative if it is over."""
        return self.until - time.monotonic()


def take(seconds: float, what: str) -> None:
    """Ask the launcher of this worker, if it has one, for so many seconds from now."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    path = _path(Path(folder), os.getsid(0))
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # then the launcher's own grace period holds
        draft.write_text(json.dumps(asdict(Lease(time.monotonic() + seconds, what))))
        draft.replace(path)


def find(folder: Path | None, session: int) -> Lease | None:
    """Return the lease of a worker, also one that is over; None if it has asked for none."""
    if folder is None:
        return None
    try:
        told = json.loads(_path(folder, session).read_text())
        return Lease(float(told["until"]), str(told["what"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(folder: Path, session: int) -> Path:
    return folder / f"lease-{session}.json"
