"""Registry of the runs on this machine: temporary folders in which `replicax top` finds hubs."""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

from replicax._src.cluster.checks import ClusterError
from replicax._src.workers import sessions

FOLDER, RUN_FILE, TOKEN_FILE = "replicax-launch-", "run.json", "token"
BY_LAUNCHER, BY_HUB = "launched by", "with the hub"


def temporary_folder() -> Path:
    """Return the directory for temporary files.

    Raises:
        ClusterError: If no candidate is writable.
    """
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        tried = ", ".join(dict.fromkeys(tempfile._candidate_tempdir_list()))  # type: ignore[attr-defined]  # noqa: SLF001
        raise ClusterError(
            f"There is no folder for temporary files that can be written: tried {tried}. Set"
            " TMPDIR to one, or free some space."
        ) from error


def note(folder: Path, address: str, program: str, how: str, pid: int) -> None:
    """Register a run, so that `replicax top` finds its hub.

    Args:
        folder: The run's folder.
        address: Where the hub listens.
        program: The name of the program.
        how: The relation of process ``pid`` to the run, worded to precede its number.
        pid: A process that lives as long as the run.
    """
    start_time = sessions.start_time(pid)
    record = {"address": address, "program": program, "how": how, "pid": pid, "birth": start_time}
    # Rename, so that `replicax top` never reads half a file.
    draft = folder / f"{RUN_FILE}.draft"
    draft.write_text(json.dumps(record))
    draft.replace(folder / RUN_FILE)


def sweep() -> None:
    """Remove the folders of hubs that were killed; a launcher's guard removes the launcher's."""
    for folder in temporary_folder().glob(f"{FOLDER}*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads((folder / RUN_FILE).read_text())
            is_ours = folder.lstat().st_uid == os.getuid() and record["how"] == BY_HUB
            if is_ours and sessions.start_time(int(record["pid"])) != record["birth"]:
                shutil.rmtree(folder, ignore_errors=True)


def write_token(token: str, folder: Path) -> None:
    """Write the token to a file that only this user can read; keep an existing one.

    The launcher calls this again for every attempt, as a cleaner of temporary files may have
    removed the folder.

    Raises:
        ClusterError: If the folder belongs to another user or is open to others, or is not
            writable.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
            raise ClusterError(f"{folder} no longer belongs to this launcher. Start it again.")
        with contextlib.suppress(FileExistsError):
            name = os.open(folder / TOKEN_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(name, "w") as file:
                file.write(token)
    except OSError as error:
        raise ClusterError(
            f"{folder} cannot be written: {error.strerror}. Set TMPDIR to a folder that can, or"
            " free some space."
        ) from error
