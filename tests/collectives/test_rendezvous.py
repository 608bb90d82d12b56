import contextvars
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.collectives.consistency import Call
from replicax._src.collectives.rendezvous import Rendezvous, inherited_jax_state
from tests.replicas import components, context, mirrored, replica_id

ReplicaError = rx.errors.ReplicaError


@pytest.fixture
def strategy():
    return mirrored(4)


def number():
    """The concrete number of an eager replica."""
    return int(context().replica_id_in_sync_group)


def works(strategy):
    """Whether the strategy still runs collectives."""
    return components(strategy.run(lambda: context().all_reduce("SUM", replica_id()))) == [6.0] * 4


def replica_threads():
    return [t for t in threading.enumerate() if t.name.startswith("replica-")]


def test_a_rendezvous_hands_each_replica_its_part():
    rendezvous = Rendezvous(3)

    def body(replica):
        return rendezvous.meet(
            replica, Call("a test"), replica, lambda all_of_them: all_of_them[::-1]
        )

    assert rendezvous.run(body) == [2, 1, 0]


def test_replicas_run_one_at_a_time_in_order(strategy):
    log = []

    def step():
        log.append(("start", number()))
        context().all_reduce("SUM", replica_id())
        log.append(("end", number()))

    strategy.run(step)

    assert log == [("start", i) for i in range(4)] + [("end", i) for i in range(4)]


def test_an_exception_surfaces_once_with_its_type_and_its_replica(strategy):
    class OwnError(Exception):
        pass

    def step():
        if number() == 2:
            raise OwnError("broken")
        return context().all_reduce("SUM", replica_id())

    with pytest.raises(OwnError, match="broken") as error:
        strategy.run(step)

    assert error.value.__notes__ == ["Raised in replica 2 of 4."]
    assert not replica_threads()
    assert not rx.distribute.has_strategy()
    assert works(strategy)


@pytest.mark.parametrize("failing", [0, 3])
def test_an_exception_after_a_collective_ends_all_replicas(strategy, failing):
    reached = []

    def step():
        context().all_reduce("SUM", replica_id())
        if number() == failing:
            raise ValueError("after")
        context().all_reduce("SUM", replica_id())
        reached.append(number())

    with pytest.raises(ValueError, match="after") as error:
        strategy.run(step)

    assert f"Raised in replica {failing} of 4." in error.value.__notes__
    assert reached == []
    assert not replica_threads()
    assert works(strategy)


def test_an_exception_in_every_replica_surfaces_once(strategy):
    with pytest.raises(ZeroDivisionError) as error:
        strategy.run(lambda: 1 / 0)

    assert error.value.__notes__ == ["Raised in replica 0 of 4."]


def test_the_traceback_leads_to_the_line_of_the_user(strategy):
    def the_line_of_the_user():
        raise KeyError("here")

    with pytest.raises(KeyError) as error:
        strategy.run(the_line_of_the_user)

    assert "the_line_of_the_user" in [entry.name for entry in error.traceback]


def test_an_exception_in_merge_call_surfaces_and_ends_the_replicas(strategy):
    def refuse(_):
        raise LookupError("merged")

    with pytest.raises(LookupError, match="merged"):
        strategy.run(lambda: context().merge_call(refuse))

    assert not replica_threads()
    assert works(strategy)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_inside_a_replica_is_passed_on(strategy, kind):
    def step():
        if number() == 1:
            raise kind
        context().all_reduce("SUM", replica_id())

    with pytest.raises(kind):
        strategy.run(step)

    assert not replica_threads()
    assert works(strategy)


def test_ctrl_c_ends_a_run_whose_replica_is_busy(strategy):
    busy, release = threading.Event(), threading.Event()

    def step():
        if number() == 1:
            busy.set()
            release.wait(20)
        context().all_reduce("SUM", replica_id())

    def interrupt():
        busy.wait(20)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.1)
        release.set()

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        strategy.run(step)
    helper.join()

    assert not replica_threads()
    assert works(strategy)


def test_a_replica_that_ends_early_is_named_and_those_that_wait(strategy):
    def step():
        if number() in (1, 3):
            return None
        return context().all_reduce("SUM", replica_id())

    with pytest.raises(ReplicaError, match="Replicas 1, 3 ended while others wait") as error:
        strategy.run(step)

    message = str(error.value)
    assert all(f"replica {i} in all_reduce(SUM) at {__file__}:" in message for i in (0, 2))
    assert "do not put them under an `if`" in message
    assert isinstance(error.value, RuntimeError)
    assert works(strategy)


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [
                lambda c: c.all_reduce("SUM", jnp.ones(2)),
                lambda c: c.all_gather(jnp.ones(2), axis=0),
            ],
            ["replica 0 in all_reduce(SUM)", "replica 1 in all_gather(axis=0)"],
        ),
        (
            [
                lambda c: c.all_reduce("SUM", jnp.ones(2)),
                lambda c: c.all_reduce("MEAN", jnp.ones(2)),
            ],
            ["replica 0 in all_reduce(SUM)", "replica 1 in all_reduce(MEAN)"],
        ),
        (
            [lambda c: c.merge_call(lambda s: None), lambda c: c.all_reduce("SUM", jnp.ones(2))],
            ["replica 0 in merge_call", "replica 1 in all_reduce(SUM)"],
        ),
    ],
)
def test_replicas_that_wait_for_different_things_are_told_what(calls, words):
    strategy = mirrored(2)

    with pytest.raises(ReplicaError, match="wait for different things") as error:
        strategy.run(lambda: calls[number()](context()))

    assert all(w in str(error.value) for w in words)


def test_a_write_that_one_replica_leaves_out_is_named(strategy):
    with strategy.scope():
        v = rx.Variable(1.0, name="w", aggregation=rx.VariableAggregation.SUM)

    def step():
        if number() == 0:
            v.assign_add(jnp.ones(()))

    with pytest.raises(ReplicaError, match="replica 0 in a write to variable 'w'"):
        strategy.run(step)


def test_unequal_numbers_of_merge_calls_are_refused(strategy):
    def step():
        for _ in range(number() + 1):
            context().merge_call(lambda s: None)

    with pytest.raises(ReplicaError, match="Replica 0 ended while others wait"):
        strategy.run(step)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda i: jnp.ones(i + 1), "replica 0: float32[1]; replica 1: float32[2]"),
        (lambda i: jnp.ones(1, [jnp.float32, jnp.int32][i]), "replica 1: int32[1]"),
    ],
)
def test_an_all_reduce_of_different_arrays_shows_them(make, words):
    strategy = mirrored(2)

    with pytest.raises(ReplicaError, match="same shapes and dtypes on all replicas") as error:
        strategy.run(lambda: context().all_reduce("SUM", make(number())))

    assert words in str(error.value)
    assert "all_gather" in str(error.value)


def test_an_all_reduce_of_different_structures_shows_them():
    strategy = mirrored(2)

    with pytest.raises(
        ReplicaError, match=r"\(\[\*\]\)' on the first.*\(\[\*, \*\]\)' on the second"
    ):
        strategy.run(lambda: context().all_reduce("SUM", [jnp.ones(1)] * (number() + 1)))


def test_a_gather_of_shapes_that_differ_elsewhere_shows_them():
    strategy = mirrored(2)

    with pytest.raises(rx.errors.InvalidArgumentError, match=r"shapes \[\(1, 2\), \(1, 3\)\]"):
        strategy.run(lambda: context().all_gather(jnp.ones((1, 2 + number())), axis=0))


def test_a_late_replica_is_named_after_the_timeout(strategy):
    release = threading.Event()
    options = rx.distribute.experimental.CommunicationOptions(timeout_seconds=0.2)

    def step():
        if number() == 3:
            release.wait(1.0)
        return context().all_reduce("SUM", replica_id(), options)

    began = time.monotonic()
    with pytest.raises(ReplicaError, match="Replica 3 did not arrive within") as error:
        strategy.run(step)

    assert time.monotonic() - began < 5
    assert "timeout_seconds=0.2" in str(error.value)
    assert "replica 0 in all_reduce(SUM)" in str(error.value)
    release.set()
    assert works(strategy)


def test_a_timeout_that_is_kept_changes_nothing(strategy):
    options = rx.distribute.experimental.CommunicationOptions(timeout_seconds=30)

    result = strategy.run(lambda: context().all_reduce("SUM", replica_id(), options))

    assert components(result) == [6.0] * 4


def test_without_a_timeout_a_replica_may_wait_for_its_user(strategy, monkeypatch):
    asked = []

    def slow_input(prompt):
        time.sleep(0.5)
        asked.append(prompt)
        return "go on"

    monkeypatch.setattr("builtins.input", slow_input)

    def step():
        if number() == 2:
            assert input("replica 2> ") == "go on"
        return context().all_reduce("SUM", replica_id())

    assert components(strategy.run(step)) == [6.0] * 4
    assert asked == ["replica 2> "]


def test_replicas_inherit_the_context_variables_of_the_caller(strategy):
    variable = contextvars.ContextVar("variable", default="unset")
    token = variable.set("of the caller")

    def step():
        seen = variable.get()
        variable.set(f"of replica {number()}")
        return seen

    assert strategy.run(step) == "of the caller"
    assert variable.get() == "of the caller"
    variable.reset(token)


def test_two_threads_may_run_on_the_same_devices_at_once(strategy):
    gate = threading.Barrier(2, timeout=20)
    results = {}

    def work(name, factor):
        def step():
            if number() == 0:
                gate.wait()  # both runs are under way
            return context().all_reduce("SUM", replica_id() * factor)

        results[name] = components(strategy.run(step))

    threads = [threading.Thread(target=work, args=x) for x in (("a", 1.0), ("b", 10.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert results == {"a": [6.0] * 4, "b": [60.0] * 4}


def test_threads_are_named_after_their_replicas(strategy):
    names = strategy.run(lambda: threading.current_thread().name)

    assert names.values == tuple(f"replica-{i}" for i in range(4))


@pytest.fixture
def pair():
    return mirrored(2)


def test_replicas_inherit_x64(pair):
    step = lambda: (np.float64(1) * jnp.ones(2, jnp.float64)) + replica_id()  # noqa: E731

    with jax.enable_x64(True):
        wide = pair.run(step)
    narrow = pair.run(lambda: jnp.ones(2) + replica_id())

    assert [v.dtype for v in wide.values] == [jnp.float64] * 2
    assert [v.dtype for v in narrow.values] == [jnp.float32] * 2


def test_collectives_keep_64_bits(pair):
    big = 2**40

    with jax.enable_x64(True):
        total = pair.run(lambda: context().all_reduce("SUM", jnp.int64(big)))
        mean = pair.run(lambda: context().all_reduce("MEAN", jnp.int64(big)))
        staged = pair.run(
            lambda: jax.jit(lambda x: context().all_reduce("MEAN", x))(jnp.int64(big))
        )
        assert components(total) == [2 * big] * 2
        assert components(mean) == components(staged) == [float(big)] * 2
        assert mean.values[0].dtype == staged.values[0].dtype == jnp.float64


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("jax_enable_x64", jax.enable_x64, True),
        ("jax_debug_nans", jax.debug_nans, True),
        ("jax_debug_infs", jax.debug_infs, True),
        ("jax_disable_jit", jax.disable_jit, True),
        ("jax_default_matmul_precision", jax.default_matmul_precision, "float32"),
        ("jax_default_prng_impl", jax.default_prng_impl, "rbg"),
        ("jax_numpy_dtype_promotion", jax.numpy_dtype_promotion, "strict"),
        ("jax_numpy_rank_promotion", jax.numpy_rank_promotion, "raise"),
    ],
)
def test_a_new_thread_gets_the_settings_and_leaves_them(name, setting, value):
    seen = []

    def look():
        with enter():
            seen.append(getattr(jax.config, name))
        seen.append(getattr(jax.config, name))

    with setting(value):
        enter = inherited_jax_state()
        wanted = getattr(jax.config, name)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    assert seen == [wanted, getattr(jax.config, name)]
    assert seen[0] != seen[1]


def test_a_nan_in_a_replica_is_found_when_the_caller_asks_for_it(pair):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        pair.run(lambda: jnp.log(replica_id() - 1))

    assert any("Raised in replica" in note for note in error.value.__notes__)


def test_each_replica_computes_on_its_own_device(pair):
    result = pair.run(lambda: jnp.ones(3))

    assert [v.devices() for v in result.values] == [{d} for d in jax.devices()[:2]]
    assert [v.committed for v in result.values] == [False, False]


def test_without_jit_collectives_still_meet(pair):
    with jax.disable_jit():
        result = pair.run(lambda: context().all_reduce("SUM", jnp.ones(2)))

    assert components(result) == [[2.0, 2.0]] * 2
