"""After any interruption the variables are those before the step or those after it, never gone.

A signal is sent at every bytecode that replicax runs in a step, one step for each: all moments at
which Python could run its handler in code of ours, not a sample of them. JAX's own are hit by a
storm of signals at random moments.
"""

import random
import signal
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.replicas import mirrored

SIGNAL = signal.SIGUSR1
OURS = ("replicax", "contextlib.py", "threading.py")


class Interrupted(Exception):  # noqa: N818 - a signal, not an error
    """What the handler raises."""


def raising(*_):
    raise Interrupted


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(SIGNAL, raising)
    yield
    assert signal.getsignal(SIGNAL) is raising, "a handler of the user's was not put back"
    signal.signal(SIGNAL, before)


class At:
    """Sends a signal at the ``moment``-th bytecode that our code runs in the block."""

    def __init__(self, moment):
        self._left = moment
        self.where = None

    def __enter__(self):
        sys.settrace(self._begin)
        return self

    def __exit__(self, kind, error, _):
        sys.settrace(None)
        return kind is Interrupted

    def _begin(self, frame, event, arg):
        code = frame.f_code
        if not any(name in code.co_filename for name in OURS) or "test" in code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, arg):
        if event == "opcode" and self.where is None:
            self._left -= 1
            if self._left <= 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(SIGNAL)
        return self._step


class Training:
    """Three weights and a counter, which every step raises by one."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.weights = [rx.Variable(jnp.zeros(3)) for _ in range(3)]
            self.count = rx.Variable(0)
        batches = rx.data.Dataset.range(100_000).batch(2 * strategy.num_replicas_in_sync)
        self.data = strategy.experimental_distribute_dataset(batches)
        self.iterator = iter(self.data)
        self.seen = 0

    def replica(self, batch=None):
        self.weights[0].assign_add(jnp.ones(3))
        self.weights[1].assign_add(jnp.ones(3))
        self.count.assign_add(1)
        self.weights[2].assign_add(jnp.ones(3))
        return batch

    def check(self, where):
        """Either the last step happened, or it did not."""
        count = int(self.count.numpy())
        assert count in (self.seen, self.seen + 1), where
        for weight in self.weights:
            for copy in self.strategy.experimental_local_results(weight):
                np.testing.assert_array_equal(copy, np.full(3, count), where)
        assert not rx.distribute.has_strategy(), where
        happened, self.seen = count - self.seen, count
        return happened

    # Ways to make a step.

    def compiled(self):
        return rx.function(lambda: self.strategy.run(self.replica))

    def pulling(self):
        return rx.function(lambda: self.strategy.run(self.replica, args=(next(self.iterator),)))


WAYS = [Training.compiled, Training.pulling]
STRATEGIES = {"one": lambda: rx.distribute.OneDeviceStrategy("CPU:0"), "two": lambda: mirrored(2)}


def interrupt_everywhere(way, strategy, *, every, first=1):
    """Interrupt a step at each ``every``-th moment; how many steps were interrupted."""
    training = Training(strategy)
    step = way(training)
    for _ in range(3):
        step()
    training.seen = 3
    given = training.iterator.save_state()["steps"]
    moment, interrupted = first, 0
    while True:
        with At(moment) as at:
            step()
        happened = training.check(at.where)
        if way is Training.pulling:
            assert training.iterator.save_state()["steps"] == given + happened, at.where
            given += happened
        if at.where is None:
            training.iterator.close()
            return interrupted
        interrupted += 1
        moment += every


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_a_signal_interrupts_happened_or_did_not(way, strategy):
    assert interrupt_everywhere(way, STRATEGIES[strategy](), every=23) > 10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_may_be_interrupted_at_every_bytecode(way, strategy):
    assert interrupt_everywhere(way, STRATEGIES[strategy](), every=1) > 300


def test_the_iterator_goes_on_where_the_steps_have_got_to():
    training = Training(mirrored(2))
    totals = rx.Variable(0)

    @rx.function
    def step():
        batch = next(training.iterator)
        totals.assign_add(training.strategy.reduce("SUM", batch, axis=0))

    for moment in range(1, 2000, 61):
        with At(moment):
            step()

    steps = training.iterator.save_state()["steps"]
    training.iterator.close()
    assert int(totals.numpy()) == sum(range(4 * steps))


def storm(step, check, *, steps, seed=0):
    """Send signals at random moments, as a timer does, while steps are made."""
    moments = random.Random(seed)
    before = signal.signal(signal.SIGALRM, raising)
    try:
        for _ in range(steps):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 4e-4))
                step()
            except Interrupted:
                pass
            finally:
                _quietly(lambda: signal.setitimer(signal.ITIMER_REAL, 0))
            check("a storm")
    finally:
        signal.signal(signal.SIGALRM, before)


def _quietly(act):
    while True:
        try:
            return act()
        except Interrupted:
            pass


@pytest.mark.parametrize(
    "steps", [300, pytest.param(20_000, marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_storm_of_signals_leaves_every_variable_whole(way, steps):
    training = Training(mirrored(2))
    step = way(training)
    for _ in range(3):
        step()
    training.seen = 3

    storm(step, training.check, steps=steps)

    training.iterator.close()
    assert training.seen > 3


def test_a_first_call_that_is_interrupted_while_it_compiles_loses_nothing():
    training = Training(mirrored(2))
    training.compiled()()
    training.seen = 1

    for moment in range(500, 20_000, 1_931):  # each step is a new function, with weights to consume
        with At(moment) as at:
            training.compiled()()
        training.check(at.where)

    training.iterator.close()


def test_ctrl_c_ends_the_step_and_leaves_the_weights():
    training = Training(mirrored(2))
    step = training.compiled()
    step()
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))
    timer.start()

    with pytest.raises(KeyboardInterrupt):
        _for_ever(step)

    timer.join()
    training.iterator.close()
    training.seen = int(training.count.numpy())
    training.check("Ctrl-C")


def _for_ever(step):
    while True:
        step()


def test_a_handler_that_does_not_raise_is_called_once_for_each_signal_and_ends_nothing():
    training, came = Training(mirrored(2)), []
    step = training.compiled()
    step()
    signal.signal(SIGNAL, lambda *_: came.append(1))

    for moment in range(1, 1500, 53):
        with At(moment) as at:
            step()
        assert len(came) == (at.where is not None)
        came.clear()

    signal.signal(SIGNAL, raising)
    training.iterator.close()
