"""Leases: extra time past the launcher's grace period for a worker that is saving a checkpoint.

The launcher passes its workers the name of a folder. A worker that was asked to stop writes a file
there, named after its session id; the launcher, or its guard, waits until the lease expires.
Another file notes that the worker has looked for its cluster.
"""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "REPLICAX_LEASES"
_ENDING = "ending"  # the file by which the launcher announces that it ends all workers


@dataclass(frozen=True)
class Lease:
    """A worker's request to run beyond the launcher's grace period.

    Attributes:
        until: When it expires, by the monotonic clock, which all processes of a machine share.
        what: The reason, for messages.
    """

    until: float
    what: str

    @property
    def left(self) -> float:
        """Return the remaining seconds; negative once it has expired."""
        return self.until - time.monotonic()


def take(seconds: float, what: str) -> None:
    """Ask this worker's launcher, if any, for ``seconds`` from now; ``what`` is the reason."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    path = _path(Path(folder), os.getsid(0))
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # without a lease, the launcher's grace period applies
        # Rename, so that the launcher never reads half a file.
        draft.write_text(json.dumps(asdict(Lease(time.monotonic() + seconds, what))))
        draft.replace(path)


def note_cluster() -> None:
    """Note for this worker's launcher, if any, that the program has looked for its cluster."""
    if folder := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            _mark(Path(folder), os.getsid(0)).touch()


def has_looked(folder: Path, session: int) -> bool:
    """Whether a program in a worker's session has looked for its cluster."""
    return _mark(folder, session).exists()


def announce_end(folder: Path | None) -> None:
    """Announce to the workers that the launcher is about to end all of them, not one."""
    if folder is not None:
        with contextlib.suppress(OSError):
            (folder / _ENDING).touch()


def are_all_ending() -> bool:
    """Whether this worker's launcher ends all workers."""
    folder = os.environ.get(VARIABLE)
    return bool(folder) and (Path(str(folder)) / _ENDING).exists()


def find(folder: Path | None, session: int) -> Lease | None:
    """Return the lease of a worker's session, even if expired; None if it requested none."""
    if folder is None:
        return None
    try:
        fields = json.loads(_path(folder, session).read_text())
        return Lease(float(fields["until"]), str(fields["what"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(folder: Path, session: int) -> Path:
    return folder / f"lease-{session}.json"


def _mark(folder: Path, session: int) -> Path:
    return folder / f"cluster-{session}"
