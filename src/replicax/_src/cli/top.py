"""``replicax top``: a live table of a run's workers, from the status of its hub."""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from replicax._src.base.rendering import Sheet, short, show_bytes
from replicax._src.cluster.checks import ClusterError
from replicax._src.files.paths import local_file
from replicax._src.workers import sessions
from replicax._src.workers.join import statuses
from replicax._src.workers.membership import describe
from replicax._src.workers.run_registry import FOLDER, RUN_FILE, TOKEN_FILE
from replicax._src.workers.settings import TOKEN_FILE_VARIABLE, read_token
from replicax._src.workers.wire import Message

_RETRY = 0.5
_PATIENCE = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "run",
        nargs="?",
        help="the process id of its launcher or of worker 0, or HOST:PORT of worker 0; not needed"
        " if there is only one run on this machine",
    )
    add("--token-file", type=local_file, metavar="F", help="the token of the run, with HOST:PORT")
    add("--once", action="store_true", help="print the table once")
    add("--json", action="store_true", help="print the status once, as JSON")


@dataclass(frozen=True)
class LaunchedRun:
    """A run that can be observed.

    Attributes:
        name: Its name in this command's output.
        address: The address of its hub.
        token: The run's token, for authentication.
        folder: The folder that registers it; its address may change with a restart.
    """

    name: str
    address: str
    token: str
    folder: Path | None = None

    def refreshed(self) -> "LaunchedRun":
        """Return the same run with its current address."""
        return self if self.folder is None else _read_run(self.folder) or self


def run(options: argparse.Namespace) -> int:
    """Show the run's status until it ends, or once."""
    chosen = _choose_run(options)
    if options.once or options.json:
        status = _first_status(chosen)
        if options.json:
            sys.stdout.write(json.dumps(status, indent=2) + "\n")
        else:
            Console().print(table(status, chosen.name))
        return 0
    return _watch(chosen)


def _first_status(chosen: LaunchedRun) -> Message:
    """Return the current status; wait for it while the launcher (re)starts the run."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        for status in _statuses(chosen.refreshed()):
            return status
        is_launched = chosen.folder is not None and chosen.folder.exists()
        if not is_launched or time.monotonic() > deadline:
            raise ClusterError(f"Nothing answers at {chosen.address}: the run {_OVER}.")
        time.sleep(_RETRY)


_OVER = "has ended, has not begun, or has only one worker, which reports to no hub"


def _watch(chosen: LaunchedRun) -> int:
    last: Sheet | None = None
    with contextlib.suppress(KeyboardInterrupt), Live(screen=False, auto_refresh=False) as live:
        while True:
            for status in _statuses(chosen.refreshed()):
                last = table(status, chosen.name)
                live.update(last, refresh=True)
            if chosen.folder is None or not chosen.folder.exists():
                break
            time.sleep(_RETRY)  # the launcher may be restarting the workers
    if last is None:
        raise ClusterError(f"Nothing answers at {chosen.address}: the run {_OVER}.")
    return 0


def _statuses(chosen: LaunchedRun) -> Iterator[Message]:
    with contextlib.suppress(OSError):
        yield from statuses(chosen.address, chosen.token)


def table(status: Message, name: str) -> Sheet:
    """Return a table of the run's status."""
    workers = [w for w in status["workers"] if isinstance(w, dict)]
    rows = tuple(_row(w) for w in workers)
    missing = int(status["size"]) - len(workers)
    come = "" if not missing else f", {missing} not here yet"
    facts = (
        ("workers", f"{status['size']}{come}"),
        ("since", f"{float(status['seconds']):.0f} s"),
        *_shares(workers),
        *((("membership", describe(status["membership"])),) if status.get("most") else ()),
    )
    columns = (
        *("worker", "~pid, host", ">step", ">steps/s", ">input wait", ">memory", ">silent"),
        "~doing",
    )
    notes = (*status["news"], *status.get("slow", ()))
    return Sheet(name, facts, columns, rows, tuple(str(text) for text in notes))


def _shares(workers: list[Message]) -> tuple[tuple[str, str], ...]:
    """Return the mean goodput of the workers, and their MFU if a worker knows its flops."""
    facts = []
    for title, key in (("goodput", "goodput"), ("MFU", "mfu")):
        values = [float(w[key]) for w in workers if w.get(key)]
        if values:
            facts.append((title, f"{100 * sum(values) / len(values):.1f} %"))
    return tuple(facts)


def _row(w: Message) -> tuple[str, ...]:
    memory = float(w.get("memory", 0))
    devices = float(w.get("device_memory", 0))
    memories = [show_bytes(memory)] if memory else ["-"]
    memories += [f"{show_bytes(devices)} on devices"] if devices else []
    return (
        str(w["index"]),
        f"{w['pid']}, {w['host'] or w['address']}",
        f"{w.get('steps', 0):.0f}",
        f"{w.get('rate', 0):.2f}",
        f"{100 * w.get('waits', 0):.0f} %",
        ", ".join(memories),
        f"{w['silent']:.1f} s",
        short(w["doing"], 100) if w["state"] == "here" else str(w["state"]),
    )


def _choose_run(options: argparse.Namespace) -> LaunchedRun:
    if options.run and ":" in options.run:
        return LaunchedRun(f"Run at {options.run}", options.run, _token(options))
    runs = launched()
    if options.run:
        runs = [r for r in runs if r.name.endswith(f"pid {options.run}")]
    if len(runs) == 1:
        return runs[0]
    if not runs:
        raise ClusterError(
            "There is no run of several workers on this machine"
            + (f" with the process number {options.run}" if options.run else "")
            + ". For a run elsewhere, give the address of its worker 0 and the token:"
            " `replicax top HOST:PORT --token-file F`, or set REPLICAX_TOKEN."
        )
    names = "\n".join(f"  replicax top {r.name.rpartition(' ')[2]}   {r.name}" for r in runs)
    raise ClusterError(f"There are {len(runs)} runs on this machine. Choose one:\n{names}")


def find_run(pid: str) -> LaunchedRun:
    """Return the run that the process ``pid`` has launched.

    Raises:
        ClusterError: If there is none.
    """
    runs = {run.name.rpartition(" ")[2]: run for run in launched()}
    if pid in runs:
        return runs[pid]
    names = "; ".join(run.name for run in runs.values()) or "none"
    raise ClusterError(
        f"No run of this machine was launched by process {pid}. The runs that there are: {names}."
    )


def current_status(chosen: LaunchedRun) -> Message:
    """Return the status of a run.

    Raises:
        ClusterError: If its hub does not answer.
    """
    return _first_status(chosen)


def _token(options: argparse.Namespace) -> str:
    environment: Any = os.environ
    if options.token_file:
        environment = {TOKEN_FILE_VARIABLE: str(options.token_file)}
    token = read_token(environment)
    if token is None:
        raise ClusterError(
            f"To look at the run at {options.run}, its token is needed: `--token-file F`, or"
            " REPLICAX_TOKEN as its workers have it."
        )
    return token


def launched() -> list[LaunchedRun]:
    """Return this user's runs whose launcher, or worker 0, is a process of this machine."""
    folders = sorted(Path(tempfile.gettempdir()).glob(f"{FOLDER}*"))
    return [found for folder in folders if (found := _read_run(folder))]


def _read_run(folder: Path) -> LaunchedRun | None:
    """Return the run that a folder registers; None if it is another user's, or has ended."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return None
        record = json.loads((folder / RUN_FILE).read_text())
        if sessions.start_time(int(record["pid"])) != record["birth"]:
            return None  # its process was killed before it could remove the folder
        name = f"{record['program']}, {record['how']} pid {int(record['pid'])}"
        token = (folder / TOKEN_FILE).read_text().strip()
        return LaunchedRun(name, str(record["address"]), token, folder)
    except (OSError, ValueError, KeyError, TypeError):
        return None
