"""``python -m tests.chaos.peers``: the same faults in replicax, TensorFlow and torch DDP.

Three workers, each started as on a machine of its own, all settings as they are by default. A row
says how long it took until every other worker had ended, whether one of them named the worker that
had the fault, and what stayed behind.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

from replicax._src.workers.wire import free_ports
from tests.multi_process.gang import ROOT, left_behind
from tests.multi_process.hosts import LOOPBACK, can_make_hosts, two_hosts

HERE = Path(__file__).parent
SYSTEMS = ("replicax", "tensorflow", "torch")
NAMES = {"replicax": "replicax", "tensorflow": "TensorFlow", "torch": "torch DDP, torchrun"}
FAULTS = {
    "kill": "killed (SIGKILL)",
    "stop": "stopped (SIGSTOP)",
    "exception": "raises an error",
    "exit": "ends early, with code 0",
    "late": "comes 15 s late",
    "never": "never comes",
    "twin": "has another's index",
    "cable": "network cable pulled",
}
SIZE, VICTIM, LATE = 3, 1, 15.0
ABSENT = {"late": VICTIM, "never": VICTIM, "twin": 2}  # who is not there at first
NAMED = r"(?i)\b(worker|rank|task|peer)s?\b[\s:=/#\[(]*[{0}]\b"


@dataclass
class Trial:
    """One fault in one system."""

    system: str
    fault: str
    seconds: float | None = None
    outcome: str = ""
    is_named: bool | None = None
    left: list[str] = field(default_factory=list)
    last_words: str = ""


class Workers:
    """The processes of one trial, each as on a machine of its own."""

    def __init__(self, system, fault, folder, pythons, hosts):
        self.system, self.fault, self.folder = system, fault, Path(folder)
        self.python = pythons[system]
        self.hosts = hosts
        ports = free_ports(SIZE + 1)
        self.port = ports.pop()
        pairs = zip(hosts, ports, strict=True)
        self.addresses = [f"{host.address}:{port}" for host, port in pairs]
        self.mark = f"PEER_TRIAL={uuid.uuid4()}"
        self.processes = {}
        self.ended = {}

    def start(self, name, index):
        """Start a worker; ``name`` differs from ``index`` if it has another's."""
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "TF_CONFIG")}
        key, mark = self.mark.split("=")
        env |= {key: mark, "PEER_FAULT": self.fault, "JAX_PLATFORMS": "cpu"}
        env["OMP_NUM_THREADS"] = "1"
        env["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{HERE}"
        program = str(HERE / f"with_{self.system}.py")
        command = [self.python, program]
        if self.system == "torch":
            rendezvous = [f"--nnodes={SIZE}", f"--node-rank={index}", "--nproc-per-node=1"]
            rendezvous += [f"--master-addr={self.hosts[0].address}", f"--master-port={self.port}"]
            command = [self.python, "-m", "torch.distributed.run", *rendezvous, program]
            if self.hosts[index].link:
                env["GLOO_SOCKET_IFNAME"] = self.hosts[index].link
        else:
            task = {"type": "worker", "index": index}
            env["TF_CONFIG"] = json.dumps({"cluster": {"worker": self.addresses}, "task": task})
        with self.output(name).open("w") as output:
            self.processes[name] = subprocess.Popen(
                [*self.hosts[index].enter, *command],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self, name):
        return self.folder / f"{name}.txt"

    def moments(self, word):
        """When and in which process a worker said ``word``, for those that did."""
        found = {}
        for name in self.processes:
            text = self.output(name).read_text(errors="replace")
            if said := re.search(rf"^{word} ([\d.]+) (\d+)$", text, re.MULTILINE):
                found[name] = float(said[1]), int(said[2])
        return found

    def wait(self, names, until):
        """Wait for the ends of these workers; those that have not ended."""
        while True:
            for name in names:
                if name not in self.ended and self.processes[name].poll() is not None:
                    self.ended[name] = time.time()
            still = [name for name in names if name not in self.ended]
            if not still or time.time() > until:
                return still
            time.sleep(0.02)

    def end(self):
        for pid, _ in left_behind(self.mark, seconds=0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()


def run(system, fault, pythons, limit):
    """One trial."""
    trial = Trial(system, fault)
    network = two_hosts() if fault == "cable" else contextlib.nullcontext([LOOPBACK] * 2)
    with tempfile.TemporaryDirectory() as folder, network as pair:
        workers = Workers(system, fault, folder, pythons, [pair[0], pair[1], pair[1]])
        try:
            began = _strike(workers, fault, pair)
            if began is None:
                trial.outcome = "did not start"
            elif fault == "late":
                trial.seconds = max(t for t, _ in workers.moments("TRAINS").values()) - began
                trial.outcome = "trains"
            else:
                _watch(workers, trial, began, limit)
        finally:
            trial.last_words = _tails(workers)
            workers.end()
    return trial


def _strike(workers, fault, pair):
    """Start the workers and do what is to be done; when it happened, None if it did not."""
    absent = ABSENT.get(fault)
    for index in range(SIZE):
        if index != absent:
            workers.start(index, index)
    if absent is not None:
        return _complete(workers, fault)
    if not _all_train(workers):
        return None
    if fault in ("exception", "exit"):
        while VICTIM not in (said := workers.moments("FAULT")):
            time.sleep(0.02)
        return said[VICTIM][0]
    if fault == "cable":
        pair[1].cut()
    else:
        sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault]
        os.kill(workers.moments("TRAINS")[VICTIM][1], sent)
    return time.time()


def _complete(workers, fault):
    """The rest of a cluster in which a worker is missing at first."""
    began = time.time()
    if fault != "never":
        time.sleep(LATE)
        began = time.time()
        workers.start("twin" if fault == "twin" else VICTIM, VICTIM)
    return None if fault == "late" and not _all_train(workers) else began


def _all_train(workers, patience=120.0):
    until = time.time() + patience
    while len(workers.moments("TRAINS")) < SIZE:
        if time.time() > until:
            return False
        time.sleep(0.02)
    return True


def _watch(workers, trial, began, limit):
    everyone = trial.fault in ("cable", "never", "twin")
    others = [name for name in workers.processes if everyone or name != VICTIM]
    before = {name: len(workers.output(name).read_text(errors="replace")) for name in others}
    if trial.fault in ("never", "twin"):
        before = dict.fromkeys(others, 0)
    still = workers.wait(others, began + limit)
    trial.seconds = None if still else max(workers.ended[name] for name in others) - began
    trial.outcome = f"{len(still)} of {len(others)} wait" if still else "all have ended"
    said = [workers.output(n).read_text(errors="replace")[before[n] :] for n in others]
    who = NAMED.format("12" if trial.fault == "cable" else VICTIM)  # those beyond the cable
    trial.is_named = any(re.search(who, text) for text in said)
    if not still:
        stopped = [] if trial.fault != "stop" else _family(workers.processes[VICTIM].pid)
        trial.left = [c for p, c in left_behind(workers.mark, seconds=30) if p not in stopped]


def _family(root):
    """A process, and those it started."""
    children = Path(f"/proc/{root}/task/{root}/children")
    below = [int(p) for p in children.read_text().split()] if children.exists() else []
    return [root, *(p for child in below for p in _family(child))]


def _tails(workers):
    parts = []
    for name in workers.processes:
        text = workers.output(name).read_text(errors="replace")
        parts.append(f"--- {name}, code {workers.processes[name].poll()}\n{text[-1500:]}")
    return "\n".join(parts)


def table(trials, limit):
    """A row for each fault, a column for each system."""
    found = {(t.system, t.fault): t for t in trials}
    systems = [s for s in SYSTEMS if any(t.system == s for t in trials)]
    rows = ["| worker 1 of 3 | " + " | ".join(NAMES[s] for s in systems) + " |"]
    rows += ["|---" * (len(systems) + 1) + "|"]
    for fault, words in FAULTS.items():
        cells = [_cell(found.get((system, fault)), limit) for system in systems]
        rows.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _cell(trial, limit):
    if trial is None:
        return "not tried"
    if trial.outcome in ("trains", "did not start"):
        return trial.outcome if trial.seconds is None else f"trains after {trial.seconds:.1f} s"
    time_ = f"**waits** ({trial.outcome[:6]}, {limit:.0f} s)"
    parts = [time_ if trial.seconds is None else f"{trial.seconds:.1f} s"]
    parts.append("named" if trial.is_named else "not named")
    if trial.left:
        parts.append(f"**{len(trial.left)} left**")
    return ", ".join(parts)


def main():
    parser = argparse.ArgumentParser(prog="peers", description=__doc__)
    parser.add_argument("--tensorflow", help="a Python with TensorFlow")
    parser.add_argument("--torch", help="a Python with torch")
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for the end")
    parser.add_argument("--out", type=Path, default=Path("peers.jsonl"))
    options = parser.parse_args()
    pythons = {"replicax": sys.executable}
    pythons |= {s: p for s in SYSTEMS[1:] if (p := getattr(options, s))}
    trials = []
    with options.out.open("w") as out:
        for fault in options.fault or FAULTS:
            if fault == "cable" and not can_make_hosts():
                continue
            for system in pythons:
                trial = run(system, fault, pythons, options.limit)
                trials.append(trial)
                out.write(json.dumps(asdict(trial)) + "\n")
                out.flush()
                _say(f"{fault}, {system}: {_cell(trial, options.limit)}")
    _say(table(trials, options.limit))


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
