"""``replicax timeline train.py``: record a program's training steps as one HTML page."""

import _thread
import argparse
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console

from replicax._src.debug.timeline import Timeline, start_recording, stop_recording
from replicax._src.files.paths import local_file, local_path
from replicax._src.preflight.script import ScriptError, run_script
from replicax._src.workers.watchdog import load

_POLL = 0.002
OK, NOTHING, SCRIPT_FAILED = 0, 1, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand."""
    add = parser.add_argument
    add(
        "source",
        type=local_path,
        help="the training program, with its own arguments after --; or a folder with a trace that"
        " `jax.profiler` wrote",
    )
    add("-o", "--output", type=local_file, default="timeline.html", metavar="FILE", help="the page")
    add("--skip", type=int, default=10, metavar="N", help="warm-up steps to skip")
    add(
        "--steps",
        type=int,
        default=20,
        metavar="N",
        help="how many steps to record; the program ends after them",
    )


def run(options: argparse.Namespace) -> int:
    """Record the program or read its trace, write the page, and print the averages."""
    if Path(options.source).is_dir():
        return _deliver(Timeline.from_trace(options.source), options.output)
    if not Path(options.source).is_file():
        raise FileNotFoundError(f"There is no script or folder {options.source!r}.")
    with tempfile.TemporaryDirectory(prefix="replicax-timeline-") as folder:
        recorder = _Recorder(folder, options.skip, options.steps)
        try:
            with recorder:
                run_script(options.source, options.rest)
        except KeyboardInterrupt:
            if not recorder.is_done:
                raise
        except ScriptError as error:
            sys.stderr.write(f"{error}\n")
            return SCRIPT_FAILED
        if not recorder.has_begun:
            sys.stderr.write(
                f"replicax timeline: the program took {load.batches} elements from distributed"
                f" datasets, and recording begins after {options.skip} (--skip). For a program that"
                " takes none, open `with rx.debug.timeline(path):` around its steps.\n"
            )
            return NOTHING
        found = Timeline.from_trace(folder)
        found.steps = found.steps[-options.steps :]  # the first may include time in the queue
        return _deliver(found, options.output)


def _deliver(found: Timeline, output: Path) -> int:
    output.write_text(found.html())
    Console().print(found.sheet())
    sys.stdout.write(f"wrote {output}\n")
    return OK if found.steps else NOTHING


class _Recorder:
    """Records a program between two elements of its datasets, then interrupts it."""

    def __init__(self, folder: str, skip: int, steps: int) -> None:
        self._folder = folder
        self._first = load.batches + skip
        self._last = self._first + steps + 1  # one more: the first step is recorded only in part
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._record, name="replicax-timeline", daemon=True)
        self.has_begun = self.is_done = False

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_over.set()
        self._thread.join()

    def _record(self) -> None:
        if not self._reaches(self._first):
            return
        self.has_begun = True
        start_recording(self._folder)
        self._reaches(self._last)
        stop_recording()
        with self._lock:
            self.is_done = True
            if not self._is_over.is_set():
                _thread.interrupt_main()

    def _reaches(self, count: int) -> bool:
        while load.batches < count:
            if self._is_over.wait(_POLL):
                return load.batches >= count
        return True
