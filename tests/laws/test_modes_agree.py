"""The law of modes: a step gives the same on a short batch, eager, compiled and on one device.

A step is a list of moves, drawn at random: collectives, statistics over all replicas, writes to
variables of every kind. One device is the oracle: it holds all replicas' rows, in a list, and knows
no strategy; what the replicas tell each other is a sum over that list.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from tests.replicas import context, mirrored, per_replica

SUM, MEAN = rx.VariableAggregation.SUM, rx.VariableAggregation.MEAN
ON_READ = rx.VariableSynchronization.ON_READ
WIDTH = 3


class OneDevice:
    """All replicas' values in lists."""

    def __init__(self):
        self.written = {}

    def total(self, values):
        return [sum(values)] * len(values)

    def average(self, values):
        return [sum(values) / len(values)] * len(values)

    def joined(self, values):
        return [jnp.concatenate(values)] * len(values)

    merged = total
    merged_mean = average

    def write(self, name, values):
        new = sum(values) / (len(values) if name == "mean" else 1)
        self.written[name] = self.written.get(name, 0.0) + new

    def averaged(self, values, rows):
        self.written["stat"] = sum(v for v, n in zip(values, rows, strict=True) if n) / sum(
            1 for n in rows if n
        )

    def scan(self, turn, values):
        for k in (1.0, 2.0):
            values = turn(values, k)
        return values

    def kept(self, fn, values):
        return fn(values)


class Replica:
    """This replica's value, in a list of one."""

    def __init__(self, variables):
        self.variables = variables

    def total(self, values):
        return [context().all_reduce("SUM", values[0])]

    def average(self, values):
        return [context().all_reduce("MEAN", values[0])]

    def joined(self, values):
        return [context().all_gather(values[0], axis=0)]

    def merged(self, values):
        return [context().merge_call(lambda s, v: s.reduce("SUM", v, axis=None), (values[0],))]

    def merged_mean(self, values):
        return [context().merge_call(lambda s, v: s.reduce("MEAN", v, axis=None), (values[0],))]

    def write(self, name, values):
        self.variables[name].assign_add(values[0])

    def averaged(self, values, rows):
        self.variables["stat"].assign(values[0])

    def scan(self, turn, values):
        return [
            jax.lax.scan(lambda v, k: (turn([v], k)[0], None), values[0], jnp.array([1.0, 2.0]))[0]
        ]

    def kept(self, fn, values):
        return [jax.jit(lambda v: fn([v])[0])(values[0])]


def each(fn, *lists):
    return [fn(*row) for row in zip(*lists, strict=True)]


def moments(all_, hs, xs):
    """Normalised over the rows of all replicas, as synchronized batch normalization does."""
    count = all_.total([jnp.float32(len(x)) for x in xs])
    mean = each(jnp.divide, all_.total(each(lambda h: h.sum(0), hs)), count)
    square = all_.total(each(lambda h, m: ((h - m) ** 2).sum(0), hs, mean))
    return each(lambda h, m, s, n: (h - m) / jnp.sqrt(s / n + 1), hs, mean, square, count)


def added(verb, all_, hs, xs):
    """A number of all replicas, of each one's sum, added to every row."""
    told = getattr(all_, verb)(each(lambda h: (h * h).sum() / 10, hs))
    return each(lambda h, t: h + t / 10, hs, told)


def counted(all_, hs, xs):
    return each(lambda h, n: h / n, hs, all_.total([jnp.float32(len(x)) for x in xs]))


def gathered(all_, hs, xs):
    return each(lambda h, rows: h + jnp.sin(rows).sum() / 10, hs, all_.joined(hs))


def wrote(name, all_, hs, xs):
    all_.write(name, each(lambda h: h.sum(), hs))
    return hs


def statistics(all_, hs, xs):
    all_.averaged(each(lambda h: h.mean(0), hs), [len(x) for x in xs])
    return hs


def in_scan(all_, hs, xs):
    def turn(values, k):
        told = all_.total(each(lambda v: jnp.tanh(v * k), values))
        return each(lambda v, t, u: v + t * u / 10, values, told, all_.average(values))

    told = all_.scan(turn, each(lambda h: h.sum() / 10, hs))
    return each(lambda h, t: h + t / 10, hs, told)


def in_jit(all_, hs, xs):
    def two(values):
        return each(jnp.subtract, all_.total(each(jnp.sin, values)), all_.average(values))

    told = all_.kept(two, each(lambda h: h.sum() / 10, hs))
    return each(lambda h, t: h + t / 10, hs, told)


MOVES = {
    "sum": partial(added, "total"),
    "mean": partial(added, "average"),
    "merge_call": partial(added, "merged"),
    "mean in merge_call": partial(added, "merged_mean"),
    "count": counted,
    "all_gather": gathered,
    "moments": moments,
    "scan": in_scan,
    "jit": in_jit,
    "write SUM": partial(wrote, "total"),
    "write MEAN": partial(wrote, "mean"),
    "write ON_READ": partial(wrote, "metric"),
    "write plain": partial(wrote, "plain"),
    "statistics": statistics,
}


def losses(moves, all_, ws, xs):
    hs = each(jnp.multiply, xs, ws)
    for move in moves:
        hs = MOVES[move](all_, hs, xs)
    return each(lambda h: (h * h).sum(), hs)


def on_one_device(moves, w, xs):
    """Losses, gradients and what was written."""

    def total(ws):
        all_ = OneDevice()
        found = losses(moves, all_, ws, xs)
        return sum(found), (found, all_.written)

    ws = [jnp.asarray(w)] * len(xs)
    gradients, (found, written) = jax.grad(total, has_aux=True)(ws)
    new = w - 0.1 * np.sum(gradients, axis=0)
    return found, gradients, {**written, "w": new}


def by_replicas(moves, w, xs, *, compiled):
    strategy = mirrored(len(xs))
    plain = rx.Variable(0.0)
    with strategy.scope():
        weights = rx.Variable(w)
        variables = {
            "total": rx.Variable(0.0, aggregation=SUM),
            "mean": rx.Variable(0.0, aggregation=MEAN),
            "metric": rx.Variable(0.0, synchronization=ON_READ, aggregation=SUM),
            "plain": plain,
            "stat": rx.Variable(jnp.zeros(WIDTH)),
        }
    variables["stat"].cell.averages = True

    def step(x):
        loss, gradient = rx.value_and_grad(
            lambda: losses(moves, Replica(variables), [weights.value()], [x])[0], weights
        )()
        weights.assign_sub(0.1 * context().all_reduce("SUM", gradient))
        return loss, gradient

    def run(batch):
        return strategy.run(step, args=(batch,))

    batch = per_replica(strategy, xs)
    run = rx.function(run) if compiled else run
    found, gradients = jax.tree.map(
        strategy.experimental_local_results, run(batch), is_leaf=rx_value
    )
    mirrored_ones = [v for n, v in variables.items() if n not in ("plain", "metric")]
    rx.debug.check_in_sync([weights, *mirrored_ones])
    written = {name: v.numpy() for name, v in variables.items()}
    return found, gradients, {**written, "w": weights.numpy()}


def rx_value(x):
    return isinstance(x, rx.distribute.DistributedValues)


def check(moves, rows, *, compiled):
    random = np.random.default_rng(len(moves) + 10 * sum(rows))
    xs = [np.float32(random.normal(size=(n, WIDTH))) for n in rows]
    w = np.float32(random.normal(size=WIDTH))

    expected = on_one_device(moves, w, xs)
    found = by_replicas(moves, w, xs, compiled=compiled)

    close = partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
    for theirs, mine in zip(expected[:2], found[:2], strict=True):
        jax.tree.map(close, list(mine), list(theirs))
    for name, value in expected[2].items():
        close(found[2][name], value, err_msg=name)


programs = st.lists(st.sampled_from(sorted(MOVES)), max_size=6)
row_counts = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)


@pytest.mark.parametrize("rows", [(1, 0), (2, 2)], ids=str)
def test_an_eager_step_with_every_move_equals_one_device(rows):
    check(sorted(MOVES), rows, compiled=False)


@pytest.mark.parametrize("rows", [(1, 0), (0, 2), (2, 2), (3, 3, 1, 0)], ids=str)
def test_a_compiled_step_with_every_move_equals_one_device(rows):
    check(sorted(MOVES), rows, compiled=True)


@settings(max_examples=10, deadline=None)
@given(programs, row_counts)
def test_a_compiled_step_equals_one_device(moves, rows):
    check(moves, rows, compiled=True)


@settings(max_examples=3, deadline=None)
@given(programs, row_counts)
def test_an_eager_step_equals_one_device(moves, rows):
    check(moves, rows, compiled=False)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(programs, row_counts, st.booleans())
def test_any_step_equals_one_device(moves, rows, compiled):
    check(moves, rows, compiled=compiled)
