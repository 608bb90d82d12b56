"""After any interruption the variables are those before the step or those after it, never gone.

A signal is sent at every moment at which Python could run its handler in code of ours, in one step
for each: at the start of a function, after a call and at the end of a loop's turn. JAX's own code
is hit by a storm of signals at random moments.
"""

import contextlib
import dis
import functools
import random
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.context.current import Frame, current
from replicax._src.data.optional import is_plain
from tests.fresh_process import run_fresh
from tests.replicas import mirrored, per_replica

# Python drops what a handler raises inside a finalizer, and says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SIGNAL = signal.SIGUSR1
PACKAGE = Path(rx.__file__).parent
# The standard library's part in what our code does: a lock or a context that is left half-way.
OURS = {Path(module.__file__) for module in (contextlib, threading)}
LOOKS_FOR_SIGNALS = ("RESUME", "CALL", "JUMP_BACKWARD")


class Interrupted(Exception):  # noqa: N818 - a signal, not an error
    """What the handler raises."""


def raising(*_):
    raise Interrupted


@pytest.fixture(autouse=True)
def _handler():
    before = signal.signal(SIGNAL, raising)
    # JAX edits tracebacks, which has to fail for those that a tracing function of Python's makes.
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", filtering)
    assert signal.getsignal(SIGNAL) is raising, "a handler of the user's was not put back"
    signal.signal(SIGNAL, before)


@pytest.fixture(autouse=True)
def _depth():
    """Give back what Python lost: some calls that a tracing function ends count as going on."""
    before = _depth_left()
    yield
    sys.setrecursionlimit(sys.getrecursionlimit() + before - _depth_left())


def _depth_left():
    try:
        return 1 + _depth_left()
    except RecursionError:
        return 0


def _may_raise_between(code, last, now):
    """Whether Python looks for signals at the end of the last bytecode, and we can act as it does.

    It raises at that bytecode, we at the next one: where a block ends between the two, such as
    after the last call in a `with`, an exception of ours would escape a handler that sees Python's.
    """
    looks = dis.opname[code.co_code[last]].startswith(LOOKS_FOR_SIGNALS)
    return looks and _handler_at(code, last) == _handler_at(code, now)


@functools.cache
def _handler_at(code, offset):
    entries = dis._parse_exception_table(code)
    return next((e.target for e in entries if e.start <= offset < e.end), None)


@functools.cache
def is_ours(code):
    file = Path(code.co_filename)
    return file.is_relative_to(PACKAGE) or file in OURS


@functools.cache
def leaves_block(code):
    """Whether it is the end of a block of `contextlib`, in which JAX changes its settings too."""
    return (code.co_filename, code.co_name) == (contextlib.__file__, "__exit__")


class At:
    """Sends a signal at the ``moment``-th moment in code of ours, or of others, in the block."""

    def __init__(self, moment, hits=is_ours):
        self._left, self._hits = moment, hits
        self._last = {}
        self.where = self.error = None

    def __enter__(self):
        # Python 3.12 sends events of bytecodes only if a frame asked for them before `settrace`.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._begin)
        return self

    def __exit__(self, kind, error, _):
        sys.settrace(None)
        self.error = error  # as a notebook keeps it, with the frames and all that they hold
        return kind is Interrupted

    def _begin(self, frame, event, arg):
        code = frame.f_code
        if not self._hits(code):
            return None
        if code.co_name in ("_end", "__del__"):  # Python drops what a finalizer raises
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame, event, arg):
        if event == "opcode" and self.where is None:
            last = self._last.get(frame, 0)
            self._last[frame] = frame.f_lasti
            self._left -= _may_raise_between(frame.f_code, last, frame.f_lasti)
            if self._left <= 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                signal.raise_signal(SIGNAL)
        return self._step


def is_at_rest():
    """Whether nothing is left of a step in what the code after it sees, JAX's settings included."""
    return current() == Frame() and is_plain() and not isinstance(jnp.add(1, 1), jax.core.Tracer)


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
        self.one_batch = strategy.experimental_distribute_dataset(batches.take(1))
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
        assert is_at_rest(), where
        happened, self.seen = count - self.seen, count
        return happened

    # Ways to make a step.

    def compiled(self):
        return rx.function(lambda: self.strategy.run(self.replica))

    def pulling(self):
        return rx.function(lambda: self.strategy.run(self.replica, args=(next(self.iterator),)))

    def eager(self):
        return lambda: self.strategy.run(self.replica)

    def hosted(self):
        @rx.function
        def step():
            for batch in self.one_batch:
                self.strategy.run(self.replica, args=(batch,))

        return step

    def ragged(self):
        rows = [jnp.ones(i + 1) for i in range(self.strategy.num_replicas_in_sync)]
        batch = per_replica(self.strategy, rows)
        step = rx.function(lambda x: self.strategy.run(self.summing, args=(x,)))
        return lambda: step(batch)

    def summing(self, batch):
        rx.distribute.get_replica_context().all_reduce("SUM", batch.sum())
        return self.replica(batch)


WAYS = [
    Training.compiled,
    Training.pulling,
    Training.eager,
    Training.hosted,
    Training.ragged,
]
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
    assert interrupt_everywhere(way, STRATEGIES[strategy](), every=23) > 5


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_may_be_interrupted_at_every_moment(way, strategy):
    assert interrupt_everywhere(way, STRATEGIES[strategy](), every=1) > 100


def test_the_iterator_continues_where_the_steps_have_got_to():
    training = Training(mirrored(2))
    totals = rx.Variable(0)

    @rx.function
    def step():
        batch = next(training.iterator)
        totals.assign_add(training.strategy.reduce("SUM", batch, axis=0))

    for moment in range(1, 600, 17):
        with At(moment):
            step()

    steps = training.iterator.save_state()["steps"]
    training.iterator.close()
    assert int(totals.numpy()) == sum(range(4 * steps))


def storm(step, check, *, steps, seed=0):
    """Send signals at random moments, as a timer does, while steps are made.

    Code of JAX's that is interrupted may catch what the handler raised, and raise an error of its
    own in the place.
    """
    moments, began = random.Random(seed), time.perf_counter()
    step()
    check("before")
    longest = 2 * (time.perf_counter() - began)
    armed = []

    def once(*_):
        if armed:
            armed.clear()
            raise Interrupted

    before = signal.signal(signal.SIGALRM, once)
    try:
        for _ in range(steps):
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, longest))
                step()
            except Exception:
                if armed:  # no signal came
                    raise
            finally:
                armed.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
            check("a storm")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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

    quick = way in (Training.compiled, Training.pulling)
    storm(step, training.check, steps=steps if quick else steps // 10)

    training.iterator.close()
    assert training.seen > 3


def test_a_first_call_that_is_interrupted_while_it_compiles_loses_nothing():
    training = Training(mirrored(2))
    training.compiled()()
    training.seen = 1

    for moment in range(100, 5_000, 431):  # each step is a new function, with weights to consume
        with At(moment) as at:
            training.compiled()()
        training.check(at.where)

    training.iterator.close()


def new_function(training):
    """Return a function that no call has compiled yet, with all that a program may hold."""

    def replica(x):
        total = rx.distribute.get_replica_context().all_reduce("SUM", jax.jit(jnp.sin)(x))
        training.weights[0].assign_add(jnp.ones(3))
        turn = lambda c, _: (c + jax.random.normal(jax.random.key(0)), None)  # noqa: E731
        return rx.scan(turn, total, length=2)[0]

    return rx.function(lambda x: training.strategy.run(replica, args=(x,)))


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_a_first_call_can_be_made_again_after_an_interruption_at_the_end_of_a_block(stride):
    # As in a notebook: Ctrl-C in a slow first call, and the cell once more.
    training = Training(mirrored(2))
    x = jnp.float32(0.5)
    wanted = float(new_function(training)(x).values[0])
    count, moment, interrupted = 1, 1, 0

    while True:
        step = new_function(training)
        with contextlib.suppress(Exception), At(moment, leaves_block) as at:
            rx.Variable(lambda: jnp.ones(2)).assign_add(training.weights[1][:2])
            step(x)
        done = float(training.weights[0].numpy()[0]) - count
        assert done in (0, 1), at.where
        assert is_at_rest(), at.where
        assert float(step(x).values[0]) == wanted, at.where
        count += done + 1
        if at.where is None:
            break
        interrupted += 1
        moment += stride

    training.iterator.close()
    assert interrupted > 5


@functools.cache
def enters_equation(code):
    """Whether the function sets JAX's settings of a thread to those of one equation."""
    return code.co_qualname == "JaxprEqnContextManager.__enter__"


def is_overridden(name):
    """Whether this thread has a value of its own for a setting of JAX, true by default."""
    jax.config.update(name, False)
    try:
        return getattr(jax.config, name)
    finally:
        jax.config.update(name, True)


def test_settings_of_an_equation_do_not_outlive_an_interruption():
    training = Training(mirrored(2))
    where = set()
    for moment in range(1, 12):
        with contextlib.suppress(Exception), At(moment, enters_equation) as at:
            new_function(training)(jnp.float32(0.5))
        where.add(at.where)
        assert not is_overridden("jax_threefry_partitionable"), at.where
        assert jax.sharding.get_abstract_mesh().empty, at.where
        assert is_at_rest(), at.where

    training.iterator.close()
    assert len(where - {None}) > 2  # several lines of JAX's function


@pytest.mark.parametrize(
    "functions", [20, pytest.param(500, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_storm_while_functions_are_traced_and_compiled_loses_nothing(functions):
    training = Training(mirrored(2))
    training.compiled()()
    training.seen = 1

    storm(lambda: training.compiled()(), training.check, steps=functions)

    training.iterator.close()


def test_ctrl_c_ends_the_step_and_leaves_the_weights():
    training = Training(mirrored(2))
    step = training.compiled()
    step()
    timer = threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT))

    with pytest.raises(KeyboardInterrupt):
        _for_ever(step, timer)

    timer.join()
    training.iterator.close()
    training.seen = int(training.count.numpy())
    training.check("Ctrl-C")


def _for_ever(step, timer):
    timer.start()
    while True:
        step()


def test_a_handler_that_does_not_raise_is_called_once_for_each_signal_and_ends_nothing():
    training, came = Training(mirrored(2)), []
    step = training.compiled()
    step()
    signal.signal(SIGNAL, lambda *_: came.append(1))

    for moment in range(1, 400, 13):
        with At(moment) as at:
            step()
        assert len(came) == (at.where is not None)
        came.clear()

    signal.signal(SIGNAL, raising)
    training.iterator.close()


def test_a_process_ends_well_while_an_iterator_is_open():
    script = """
        import replicax as rx
        strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        batches = rx.data.Dataset.range(99).batch(4)
        iterator = iter(strategy.experimental_distribute_dataset(batches))
        next(iterator)
    """

    ended = run_fresh(script, REPLICAX_CPU_DEVICES="2")

    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("count", [1, 2])
def test_an_eager_run_that_raises_has_changed_no_variable(count):
    strategy = mirrored(count)
    with strategy.scope():
        weight = rx.Variable(1.0)
        own = rx.Variable(
            2.0,
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    def step():
        weight.assign(5.0)
        own.assign(5.0)
        raise Interrupted

    with pytest.raises(Interrupted):
        strategy.run(step)

    assert float(weight.numpy()) == 1.0
    assert [float(c.numpy()) for c in own.components] == [2.0] * count


def test_a_replica_that_outlives_its_run_writes_nothing():
    strategy, go_on, ended = mirrored(2), threading.Event(), threading.Event()
    with strategy.scope():
        own = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ)
    join = threading.Thread.join

    def step():
        if threading.current_thread().name == "replica-0":
            timer.start()
            go_on.wait(60)
            try:
                own.assign(7.0)
            finally:
                ended.set()

    timer = threading.Timer(0.1, lambda: signal.pthread_kill(threading.main_thread().ident, SIGNAL))
    threading.Thread.join = lambda self, timeout=None: join(self, 0.01)  # no patience
    try:
        with pytest.raises(Interrupted):
            strategy.run(step)
    finally:
        threading.Thread.join = join
    go_on.set()
    assert ended.wait(10)

    assert [float(c.numpy()) for c in own.components] == [0.0, 0.0]
