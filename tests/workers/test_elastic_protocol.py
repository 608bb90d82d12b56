"""Law of elastic runs: workers that are lost and join at any time take each step once, together.

The coordinator and the workers' side of the protocol are real; a worker is a thread, and the
devices are a barrier that some workers may pass when others are cut off in it. So thousands of
interleavings can be tried in the time of a few real runs.
"""

import contextlib
import itertools
import random
import threading
import time
from collections import defaultdict

import pytest

from replicax._src.cluster.checks import WorkerLostError
from replicax._src.cluster.spec import ClusterFacts
from replicax._src.workers import group as _group
from replicax._src.workers import wire as _wire
from replicax._src.workers.group import Group
from replicax._src.workers.hub import Hub
from replicax._src.workers.join import prove
from replicax._src.workers.settings import NOT_NEEDED
from replicax._src.workers.wire import Acceptor, Wire
from tests.workers.test_hub import TOKEN, facts, heard, options, stranger

EVERY = 3  # steps between two boundaries at which workers may join; the others save


class Killed(BaseException):
    """The process of this worker is gone."""


class NoKeeper:
    """A coordination service that is not needed: nothing connects to it."""

    address, fault = "nowhere:1", ""

    def __init__(self, size):
        pass

    def why_lost(self, patience):
        return ""

    def watch(self, members):
        pass

    def stand_in(self, rank):
        pass

    def retire(self):
        pass

    def is_reaped(self):
        return True


class Fabric:
    """The connections between the devices of all workers."""

    def __init__(self, chance):
        self._chance = chance
        self._changed = threading.Condition()
        self._there = defaultdict(set)

    def barrier(self, worker, key):
        """Wait for all members; when one was lost, some of those that wait may still pass."""
        slow = time.monotonic() + self._chance.choice([0.0, 0.0, 0.01, 0.06])
        with self._changed:
            self._there[key].add(worker.index)
            self._changed.notify_all()
            while True:
                worker.check_alive()
                is_whole = len(self._there[key]) == worker.group.facts.num_workers
                is_cut = worker.group.may_resize
                may_pass = is_whole and time.monotonic() >= slow
                if may_pass and (not is_cut or self._chance.random() < 0.3):
                    return
                if is_cut:
                    raise RuntimeError("gloo: the connection was closed")
                self._changed.wait(0.002)


class Worker(threading.Thread):
    """A worker, which takes steps until it is killed or the run has taken enough."""

    def __init__(self, world, index, *, joins=False):
        super().__init__(daemon=True)
        self.world, self.index, self.joins = world, index, joins
        self.is_dead, self.is_late, self.error = False, False, None
        self.step = self.position = self.calls_then = 0
        self.group = self.wire = None

    def check_alive(self):
        if self.is_dead:
            raise Killed

    def kill(self):
        self.is_dead = True
        with contextlib.suppress(OSError):
            if self.wire is not None:
                self.wire.close()

    def run(self):
        try:
            with stranger(self.world.address) as sock:
                self.wire = Wire(sock)
                prove(self.wire, TOKEN, self.world.address)
                size = self.world.size
                self.wire.send({"join": facts(self.index, size, joins=self.joins)})
                self._train(heard(self.wire, "go"))
        except Killed:
            pass
        except BaseException as error:
            if self.joins and self.group is None:  # the run was over
                self.is_dead = True
            if not self.is_dead:
                self.error = error
        finally:
            if self.group is not None:
                self.group._is_leaving = True  # its threads end

    def _train(self, go):
        addresses = tuple(f"a:{i}" for i in range(self.world.size))
        known = ClusterFacts.of_processes(self.index, addresses, coordinator="a:0", source="test")
        if self.joins:
            known = ClusterFacts.of_processes(0, addresses[:1], coordinator="a:0", source="test")
        self.group = Group(known, self.wire, go)
        self.group.number = self.index
        for thread in self.group._threads:
            thread.start()
        if self.joins:
            place = self.group.wait_for_state()
            self.check_alive()
            self.step, self.position = self.world.states[place]
            self._move(self.group.take_part())
        else:
            with self.group.collective("the start"):
                self.world.fabric.barrier(self, (0, "start"))
            self.group.finish_start()
        while self.step < self.world.steps:
            self.check_alive()
            self._take_step()
            self._between()
        self.group.leave()

    def _take_step(self):
        # The batch is taken with the workers of now, or those with which others have taken it.
        workers = self.group.next_workers or self.group.facts.num_workers
        with self.group.call():
            while True:
                before, has_new = self.group.completed, False
                try:
                    with self.group.collective("a step"):
                        key = (self.group.generation, self.step, "compute")
                        self.world.fabric.barrier(self, key)
                        has_new = True
                        self.world.fabric.barrier(self, (*key[:2], "barrier"))
                    self._commit(workers)
                    break
                except WorkerLostError:
                    self.check_alive()
                    if not self.group.may_resize:
                        raise
                go = self.group.reform(has_new=has_new, completed=before)
                if go["is_committed"]:
                    self._commit(workers)
                self._move(go)
                if go["is_committed"]:
                    break

    def _commit(self, workers):
        self.step += 1
        batch = (self.position, self.position + workers)
        self.position += workers
        self.world.ledger[self.step].append((self.index, batch))

    def _between(self):
        """Run the code between two steps: a save, or let workers join that wait for it."""
        if self.step % EVERY and not self.group.is_behind:
            with self._losses_given_up():
                self.group.agree("a save", None)
        elif self.step % EVERY:
            self.world.counts["behind"] += 1
        # A resize makes workers forget that they agreed to stop here, as some have passed it.
        if self.step % EVERY or self.group.calls <= self.calls_then:
            return
        completed, state = self.group.completed, ""
        with self._losses_given_up():
            self.group.agree("who joins", None)
            place = f"state {self.step} {self.group.generation}"
            self.world.states[place] = self.step, self.position
            self.group.agree("the state", None)
            state = place
        planned = "A worker joins."
        self._move(
            self.group.reform(has_new=False, completed=completed, planned=planned, state=state)
        )

    @contextlib.contextmanager
    def _losses_given_up(self):
        try:
            yield
        except WorkerLostError:
            self.check_alive()
            if not self.group.may_resize:
                raise

    def _move(self, go):
        while True:
            self.check_alive()
            group = self.group
            group.enter(go)
            self.calls_then = 0 if group.has_joined else go["calls"]
            try:
                if group.facts.num_workers > 1:
                    with group.collective("the start"):
                        self.world.fabric.barrier(self, (group.generation, "start"))
                    group.agree("devices", 1)
                group.finish_start()
                break
            except WorkerLostError:
                self.check_alive()
                if not group.may_resize:
                    raise
            go = group.reform(has_new=False)
        group.resume()
        self.world.counts["resizes"] += 1
        self.world.counts["apart"] += group.are_apart


class World:
    """One run."""

    def __init__(self, seed, size):
        self.chance = random.Random(seed)
        self.size, self.steps = size, 10**6
        self.fabric = Fabric(self.chance)
        self.ledger, self.states = defaultdict(list), {}
        self.counts, self.seconds = defaultdict(int), 60.0
        told = options(size, least_workers=1, wait=0.0, step_timeout=20.0)
        self.address = told.address
        door = Acceptor(_wire.listen(told.address), TOKEN)
        self._reasons = []
        self.hub = Hub(told, door, None, None, NoKeeper)
        self._thread = threading.Thread(
            target=self.hub.serve, args=(lambda: self._reasons[0] if self._reasons else "",)
        )
        self._thread.start()
        self.workers = [Worker(self, i) for i in range(size)]
        self.all = list(self.workers)
        for worker in self.workers:
            worker.start()

    def end_process(self, why, code=1):
        """End the worker of which the calling thread is a part."""
        for worker in self.all:
            group = worker.group
            if group is not None and threading.current_thread() in group._threads:
                worker.is_dead, group._dismissal = True, why
                worker.is_late = code == NOT_NEEDED
                self.counts["too late"] += worker.is_late

    def run(self, faults):
        """Kill workers and start others; then let those that are left take some more steps."""
        until = time.monotonic() + self.seconds
        while any(w.step == 0 and w.error is None for w in self.workers):  # a loss before is final
            time.sleep(0.01)
        while faults and time.monotonic() < until:
            time.sleep(self.chance.expovariate(1 / 0.02))
            self.check()
            faults -= self._kill_one()
            dead = [w for w in self.workers if w.is_dead]
            if dead and self.chance.random() < 0.5:
                old = self.chance.choice(dead)
                new = Worker(self, old.index, joins=True)
                self.workers[self.workers.index(old)] = new
                self.all.append(new)
                new.start()
        self.steps = max(w.step for w in self.workers) + 30
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))
        self.ends = [w.step for w in self.workers if not w.is_dead]
        for worker in self.all:
            worker.kill()
        self._reasons.append("the test is over")
        self._thread.join(30)

    def _kill_one(self):
        """Kill a worker, most of the time; return how many."""
        living = [w for w in self.workers if not w.is_dead and w.group is not None]
        members = [w for w in living if not w.group.is_joining]
        if len(members) < 2 or self.chance.random() < 0.4:
            return 0
        until = time.monotonic() + self.chance.choice([0.0, 0.1, 0.1])
        while time.monotonic() < until and len({w.step for w in members}) == 1:
            time.sleep(0.001)  # some have not finished the step that others have
        self.chance.choice(living if len(members) > 2 else members[1:]).kill()
        time.sleep(self.chance.choice([0.0] * 5 + [2.5]))  # enough to find that workers differ
        return 1

    def check(self):
        """Raise what a worker raised that was not killed."""
        for worker in self.all:
            if worker.error is not None:
                raise worker.error


@pytest.mark.parametrize("seed", range(3))
def test_each_step_is_taken_once_by_all_with_the_same_batch(monkeypatch, seed):
    world = World(seed, size=4)
    monkeypatch.setattr(_group, "end_process", world.end_process)
    world.run(faults=20)
    world.check()
    assert set(world.ends) == {world.steps}
    found = [{batch for _, batch in world.ledger[k]} for k in range(1, world.steps + 1)]
    assert all(len(batches) == 1 for batches in found)
    pairs = itertools.pairwise([(0, 0), *(batch for (batch,) in found)])
    assert all(before[1] == after[0] < after[1] for before, after in pairs)
    for lines in world.ledger.values():
        assert len({index for index, _ in lines}) == len(lines)
    assert world.counts["resizes"] > 20
