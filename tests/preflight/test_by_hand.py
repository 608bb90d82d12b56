"""Each figure of a report against a program that was written and compiled by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.preflight.costs import Costs
from replicax._src.preflight.hlo import Hlo
from replicax._src.preflight.targets import Target
from tests.preflight.by_hand import ROWS, TURNS, WIDTH, figures, limits
from tests.preflight.needs import needs_compiler
from tests.tpu.nets import slice_of

pytestmark = needs_compiler
SLOW = pytest.mark.slow
# Scripts of one replica are the harder case.
SCRIPTS = pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=SLOW)])


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) - 1).mean()


def learn(strategy, weight, x):
    """The gradients of all replicas, added up."""
    value, (gradient,) = rx.value_and_grad(lambda: loss(weight.read_value(), x), [weight])()
    weight.assign_sub(rx.distribute.get_replica_context().all_reduce("SUM", gradient))
    return value


def turn(strategy, weight, x):
    """A loop whose bound is no number of turns."""
    context = rx.distribute.get_replica_context()

    def body(carry):
        i, w, x = carry
        x = jnp.tanh(x @ w)
        return i + 2, w + context.all_reduce("SUM", x.T @ x), x

    start = 0, weight.read_value(), x
    _, w, x = jax.lax.while_loop(lambda c: c[0] < 2 * TURNS, body, start)
    weight.assign(w)
    return x.sum()


def scan(strategy, weight, x):
    """The same turns, by `jax.lax.scan`."""
    context = rx.distribute.get_replica_context()

    def body(carry, _):
        w, x = carry
        x = jnp.tanh(x @ w)
        return (w + context.all_reduce("SUM", x.T @ x), x), None

    (w, x), _ = jax.lax.scan(body, (weight.read_value(), x), length=TURNS)
    weight.assign(w)
    return x.sum()


def choose(strategy, weight, x):
    """A branch of two products, and one of a single one."""
    w = weight.read_value()
    twice = lambda x: jnp.tanh(jnp.tanh(x @ w) @ w)  # noqa: E731
    y = jax.lax.cond(x[0, 0] > 0, twice, lambda x: jnp.tanh(x @ w), x)
    context = rx.distribute.get_replica_context()
    weight.assign_add(jnp.broadcast_to(context.all_reduce("SUM", y.mean()), weight.shape))
    return y.sum()


def hand_on(strategy, weight, x):
    """Every replica gives its rows to the next one, as the stages of a pipeline do."""
    w, n = weight.read_value(), strategy.num_replicas_in_sync
    ring = [(i, (i + 1) % n) for i in range(n)]

    def body(_, x):
        return jax.lax.ppermute(jnp.tanh(x @ w), "replica", ring)

    x = jax.lax.fori_loop(0, TURNS, body, x)
    return x.sum()


def report_of(strategy, replica_fn, **layouts):
    with strategy.scope(), rx.tpu.LayoutMap(layouts).scope():
        weight = rx.Variable(jnp.zeros((WIDTH, WIDTH)), name="weight")

    @rx.function
    def step(x):
        return strategy.run(lambda x: replica_fn(strategy, weight, x), args=(x,))

    rows = np.ones((ROWS, WIDTH), np.float32)
    x = strategy.experimental_distribute_values_from_function(lambda _: rows)
    return rx.tpu.preflight(step, (x,), "v5e:4x4")


def mirrored(count, policy="mirrored"):
    devices = [f"CPU:{i}" for i in range(count)]
    return rx.distribute.MirroredStrategy(devices, variable_policy=policy)


def sent(report):
    return {c.kind: c.bytes for c in report.collectives}


def assert_as_by_hand(report, hand, products):
    m = report.memory
    assert (m.arguments, m.outputs) == (hand["arguments"], hand["outputs"])
    assert m.temporaries == pytest.approx(hand["temporaries"], abs=2**14)
    assert report.flops == products * 2 * ROWS * WIDTH * WIDTH
    # The compiler counts additions and the like too, which are few.
    assert report.flops == pytest.approx(hand["flops"], rel=0.08)
    assert report.notes == ()


@pytest.mark.parametrize("replicas", [1, 2])
def test_data_parallel_whatever_the_script_has(replicas):
    report, hand = report_of(mirrored(replicas), learn), figures()["data_parallel"]

    assert_as_by_hand(report, hand, products=2)
    assert sent(report) == hand["collectives"]
    assert report.bytes_accessed == pytest.approx(hand["traffic"], rel=0.01)


@SCRIPTS
def test_sharded_variables_whatever_the_script_has(replicas):
    report = report_of(mirrored(replicas, "sharded"), learn)
    hand = figures()["sharded"]

    assert_as_by_hand(report, hand, products=2)
    assert sent(report) == hand["collectives"]


@SCRIPTS
def test_logical_devices_whatever_the_script_has(replicas):
    report = report_of(slice_of(cores=4, replicas=replicas), learn, weight=[1, 4])
    hand = figures()["logical"]

    assert (report.memory.arguments, report.memory.outputs) == (hand["arguments"], hand["outputs"])
    assert report.flops == 2 * 2 * ROWS * WIDTH * WIDTH / 4
    assert sent(report)["all-reduce"] == pytest.approx(hand["collectives"]["all-reduce"], abs=64)


@pytest.mark.parametrize("loop", [turn, scan])
def test_a_loop_by_its_turns(loop):
    report, hand = report_of(mirrored(2), loop), figures()["loop"]

    assert hand["loops"] == 0  # written out by hand
    assert report.memory.arguments == hand["arguments"]
    assert report.flops == TURNS * 2 * 2 * ROWS * WIDTH * WIDTH
    assert report.flops == pytest.approx(hand["flops"], rel=0.08)
    assert sent(report) == hand["collectives"]
    # In a loop, what a turn gives to the next goes through memory, which is half as much again.
    assert hand["traffic"] < report.bytes_accessed < 1.7 * hand["traffic"]


def test_the_costliest_branch():
    report, hand = report_of(mirrored(2), choose), figures()["branch"]

    assert report.memory.arguments == hand["arguments"]
    assert report.flops == 2 * 2 * ROWS * WIDTH * WIDTH
    assert report.flops == pytest.approx(hand["flops"], rel=0.08)
    assert report.notes == ("1 x branch taken to be the costliest of its conditional",)


def test_permutes_in_a_loop():
    report, hand = report_of(mirrored(2), hand_on), figures()["permutes"]

    assert report.flops == TURNS * 2 * ROWS * WIDTH * WIDTH
    assert report.flops == pytest.approx(hand["flops"], rel=0.08)
    # The compiler may send what it rounds anyway as bfloat16.
    (permutes,) = report.collectives
    assert (permutes.kind, permutes.count) == ("collective-permute", TURNS)
    assert TURNS * ROWS * WIDTH * 2 <= permutes.bytes <= TURNS * ROWS * WIDTH * 4
    assert hand["collectives"]["collective-permute"] >= TURNS * ROWS * WIDTH * 2


def test_memory_traffic_is_near_what_the_compiler_counts_where_there_are_no_loops():
    for name, hand in figures().items():
        cost = Costs(Hlo(hand["text"])).of_step()
        assert cost.bytes == cost.bytes_once
        # The compiler counts what is copied in the background twice: when begun, and when done.
        assert 0.65 * hand["traffic"] < cost.bytes < 1.02 * hand["traffic"], name


@pytest.mark.parametrize(
    "name",
    ["v4:2x2x1", *(pytest.param(n, marks=SLOW) for n in ("v3:2x2", "v5e:2x2", "tpu7x:2x2x1"))],
)
def test_the_memory_of_a_device_is_what_the_compiler_gives_it(name):
    strategy = mirrored(2)

    report = rx.tpu.preflight(lambda: strategy.run(lambda: jnp.ones(8)), (), name)

    by_hand = limits()[name]
    assert (report.num_devices, report.hbm) == (by_hand["devices"], round(by_hand["bytes"]))
    # What is known without asking it; versions of libtpu reserve different amounts for themselves.
    assert Target.parse(name).hbm == pytest.approx(report.hbm, rel=1e-3)
