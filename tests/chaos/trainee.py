"""A program that trains restartably, meets the faults of a plan, and keeps a ledger of each step.

Usage: trainee FOLDER STEPS. The folder holds ``plan.json``, a list with one entry for each attempt,
``commits`` and one ledger for each worker; ``CHAOS_COMMITS`` may name another place for commits.
"""

import ctypes
import hashlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax._src.base import fault_points
from replicax._src.train import checkpoint_files, object_store
from replicax._src.workers import group as _group
from replicax._src.workers import join, sockets
from replicax._src.workers.watchdog import disk

EVERY = 3  # steps between two commits
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))


class Trainee:
    """One worker in one attempt."""

    def __init__(self, folder, steps):
        self.folder = Path(folder)
        self.steps = steps
        self.index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        self.attempt = int(os.environ["CHAOS_BASE"]) + int(os.environ["REPLICAX_RESTART"])
        plan = json.loads((self.folder / "plan.json").read_text())
        self.plan = plan[self.attempt] if self.attempt < len(plan) else {}
        self.commits = os.environ.get("CHAOS_COMMITS") or str(self.folder / "commits")
        self.is_victim = self.index == self.plan.get("worker") or self.plan.get("both", False)

    def note(self, kind, **what):
        """Add a line to this worker's ledger; it is on the disk when this returns."""
        line = {"kind": kind, "attempt": self.attempt, "time": time.time(), **what}
        with (self.folder / f"ledger-{self.index}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def prepare(self):
        """What happens before the workers meet; the faults of the library are armed."""
        if self.index == 0:  # for whoever makes the faults of a store
            now = {"attempt": self.attempt, "pid": os.getpid()}
            (self.folder / "now.part").write_text(json.dumps(now))
            (self.folder / "now.part").replace(self.folder / "now.json")
        if self.index == 0 and self.plan.get("damage"):
            self._damage(self.plan["damage"])
        if self.index == 0 and self.plan.get("clock"):  # who dates the checkpoints
            now, wrong = time.time_ns, self.plan["clock"] * 10**9
            time.time_ns = lambda: now() + wrong
        if self.is_victim:
            time.sleep(self.plan.get("late", 0))
            if self.plan.get("helpers"):
                self._start_helpers()
            if self.plan.get("start", "other program") != "other program":
                self.note("blow", blow=self.plan["start"])
                if self.plan["start"] == "never":
                    sys.exit(3)
                self._start_wrongly(self.plan["start"])
            os.environ[fault_points.LOG_VARIABLE] = str(self.folder / f"fault-{self.attempt}.log")
            fault_points.arm(self.plan.get("fault", ""))

    def _start_wrongly(self, how):
        """Come to the other workers as somebody comes who was started with a mistake."""
        if how == "broken program":
            raise ImportError("no module named nope")
        cluster = json.loads(os.environ["TF_CONFIG"])
        match how:
            case "twin":
                cluster["task"]["index"] = 1 - self.index
            case "other size":
                cluster["cluster"]["worker"].append("127.0.0.1:9")
            case "other token":
                os.environ.pop("REPLICAX_TOKEN_FILE", None)
                os.environ["REPLICAX_TOKEN"] = "of-another-run-0123456789"
            case "other version" | "other jax":
                package = {"other version": "replicax", "other jax": "jax"}[how]
                version = join._version
                join._version = lambda name: {package: "0.0.1"}.get(name) or version(name)
            case "other devices":
                os.environ["REPLICAX_CPU_DEVICES"] = "2"
            case "other address":
                os.environ |= {"REPLICAX_HUB": "127.0.0.1:9", "REPLICAX_JOIN_TIMEOUT": "5"}
        os.environ["TF_CONFIG"] = json.dumps(cluster)

    def _start_helpers(self):
        """Processes such as those that load data, which do not end by themselves."""
        for group in (None, 0):
            subprocess.Popen(["sleep", "900"], process_group=group)

    def _damage(self, how):
        """Do something to the newest checkpoint, as a bad disk or a careless hand does."""
        found = sorted((self.folder / "commits").glob("*/checkpoint.json"), key=os.path.getmtime)
        if not found:
            return
        files = [p for p in found[-1].parent.rglob("*") if p.is_file()]
        largest = max(files, key=lambda p: p.stat().st_size)
        victim = found[-1] if how.endswith("manifest") else largest
        data = bytearray(victim.read_bytes())
        match how.split()[0]:
            case "flip":
                data[random.Random(self.attempt).randrange(len(data))] ^= 0x40
                victim.write_bytes(data)
            case "cut":
                victim.write_bytes(data[: len(data) // 2])
            case "lose":
                victim.unlink()
            case "link":
                copy = self.folder / f"copy-{self.attempt}"
                victim.rename(copy)
                victim.symlink_to(copy)
            case "litter":  # what others leave in such a folder
                (self.folder / "commits" / f"ckpt-{10**6 + self.attempt}").write_bytes(b"")
                (self.folder / "commits" / f"lost+found-{self.attempt}").mkdir()
                (victim.parent / "core").write_bytes(b"x")
        self.note("damaged", how=how, file=str(victim.relative_to(self.folder)))

    def _strike(self, blow):
        """A fault of another process than this one."""
        self.note("blow", blow=blow)
        who, name = blow.split(":")
        if who == "net":
            self._break_net(name)
            return
        if who == "self":
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        hub = _group.required()._hub_pid
        pid = {
            "launcher": os.getppid,
            "hub": lambda: hub,
            "keeper": lambda: int(Path(f"/proc/{hub}/task/{hub}/children").read_text().split()[0]),
        }[who]()
        os.kill(pid, getattr(signal, f"SIG{name}"))

    def _break_net(self, name):
        """Reset the connection to the coordinator, or lose all that comes by any connection."""
        if name == "reset":
            wire = _group.required()._wire.socket
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            wire.shutdown(socket.SHUT_RDWR)
            return
        self._filter(_ATTACH_FILTER)
        if name != "down":
            threading.Timer(float(name), self._filter, [_DETACH_FILTER]).start()

    def _filter(self, option):
        program = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
        for s in sockets._own_sockets():
            if not sockets._listens(s):
                s.setsockopt(socket.SOL_SOCKET, option, program)

    def _read_commits(self):
        """Read all of every checkpoint that is committed in a store, where nobody damages one."""
        if self.index or "://" not in self.commits:
            return
        with disk.at("reading every commit"):  # as a restoration is watched
            for name in object_store.names_in(self.commits):
                path = f"{self.commits}/{name}"
                try:
                    if not checkpoint_files.is_stored(path):
                        continue
                    reader = rx.train.load_checkpoint(path)
                    for key in reader.get_variable_to_shape_map():
                        reader.get_tensor(key)
                except (OSError, rx.errors.DataLossError) as error:
                    self.note("unreadable", path=path, error=str(error)[:300])

    def train(self):
        strategy = rx.distribute.MultiWorkerMirroredStrategy()
        rx.random.set_seed(1)
        dataset = rx.data.Dataset.range(37).shuffle(37).repeat().batch(6)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        with strategy.scope():
            w = rx.Variable(jnp.linspace(0.0, 1.0, 5))
            moment = rx.Variable(jnp.zeros(5))
            key = rx.Variable(jax.random.key(5))
            seen = rx.Variable(jnp.zeros(37, jnp.int32), aggregation=rx.VariableAggregation.SUM)
            step = rx.Variable(0)

        @rx.function
        def train_step(batch):
            mask = jax.random.bernoulli(key.read_value(), 0.5, (5,))
            key.assign(jax.random.split(key.read_value(), 1)[0])

            def replica(x):
                context = rx.distribute.get_replica_context()
                rows = jnp.sin(x[:, None] * w)
                gradient = context.all_reduce("SUM", rows.sum(0) * mask)
                moment.assign(0.9 * moment + gradient)
                w.assign_sub(0.01 * moment)
                seen.assign_add(jnp.zeros(37, jnp.int32).at[x].add(1))
                return rows.sum()

            loss = strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None)
            step.assign_add(1)
            return loss

        def digest():
            values = [np.asarray(v.read_value()) for v in (w, moment)]
            return hashlib.sha256(b"".join(v.tobytes() for v in values)).hexdigest()[:16]

        state = {"w": w, "moment": moment, "key": key, "seen": seen, "step": step, "data": iterator}
        with rx.train.Resumable(self.commits, every=EVERY, **state) as run:
            first = int(step)
            self.note("begin", restored=first)
            self._read_commits()
            while int(step) < self.steps:
                batch = next(iterator)
                (ids,) = strategy.experimental_local_results(batch)
                loss = int(np.asarray(train_step(batch)).view(np.uint32))
                ids = np.asarray(ids).tolist()
                self.note("step", step=int(step), ids=ids, loss=loss, state=digest())
                if self.is_victim and self.plan.get("start") == "other program":
                    self.note("blow", blow="another program")
                    strategy.reduce("SUM", strategy.run(lambda: jnp.ones(3)), axis=None)
                if self.is_victim and int(step) == first + self.plan.get("after", -1):
                    self._strike(self.plan["blow"])
                run.step()
        iterator.close()
        self._read_commits()
        self.note("end", seen=seen.numpy().tolist(), step=int(step), state=digest())


def main():
    trainee = Trainee(sys.argv[1], int(sys.argv[2]))
    try:
        trainee.prepare()
        trainee.train()
    except BaseException as error:
        trainee.note("noticed", error=f"{type(error).__name__}: {error}"[:300])
        raise


if __name__ == "__main__":
    main()
