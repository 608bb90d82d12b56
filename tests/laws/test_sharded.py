"""variable_policy="sharded": parts in memory, whole in code, the numbers of mirrored variables."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.values import sharded as _cut
from tests.replicas import WAYS, compiled, context, mirrored, per_replica, replica_id

SHAPES = [(256, 64), (67, 101), (3, 50, 50)]  # by rows; flat and filled up; flat, to the last one
COLLECTIVE = re.compile(r" (all-reduce|reduce-scatter|all-gather)(?:-start)?\(")


def sharded(count):
    return mirrored(count, variable_policy="sharded")


@pytest.fixture
def cut_all(monkeypatch):
    """Variables of all sizes are held in parts."""
    monkeypatch.setattr(_cut, "SMALL_BYTES", 0)


class Trained:
    """A model of one variable with an optimizer written by hand."""

    def __init__(self, strategy, shape, optimizer):
        self.strategy, self.shape = strategy, shape
        start = np.random.default_rng(0).normal(size=shape).astype("f4")
        with strategy.scope():
            self.w = rx.Variable(start, name="w")
            self.slots = [rx.Variable(np.zeros(shape, "f4")) for _ in range(2)]
            self.steps = rx.Variable(0)
        self.update = {"momentum": self.momentum, "adam": self.adam}[optimizer]
        self.call = rx.function(lambda x: strategy.run(self.step, (x,)))

    def step(self, x):
        loss = lambda: jnp.mean(jnp.sin(self.w) * x) + jnp.mean(jnp.square(self.w))  # noqa: E731
        value, gradient = rx.value_and_grad(loss, self.w)()
        self.steps.assign_add(1)
        self.update(context().all_reduce("SUM", gradient))
        return value

    def momentum(self, gradient):
        velocity, _ = self.slots
        velocity.assign(0.9 * velocity - 0.5 * gradient)
        self.w.assign_add(velocity)

    def adam(self, gradient):
        first, second = self.slots
        t = self.steps.read_value().astype(jnp.float32)
        first.assign_add(0.1 * (gradient - first))
        second.assign_add(0.001 * (jnp.square(gradient) - second))
        rate = 0.01 * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        moved = self.w - rate * first / (jnp.sqrt(second) + 1e-7)
        self.w.assign(jnp.where(jnp.isfinite(moved), moved, self.w))

    def batch(self, step):
        rng, count = np.random.default_rng(step), self.strategy.num_replicas_in_sync
        return per_replica(self.strategy, rng.normal(size=(count, *self.shape)).astype("f4"))

    def train(self, steps=3):
        losses = [self.call(self.batch(i)) for i in range(steps)]
        return [float(self.strategy.reduce("MEAN", x, axis=None)) for x in losses]

    @property
    def state(self):
        return [self.w, *self.slots]

    def collectives(self):
        return COLLECTIVE.findall(self.call.get_concrete_function(self.batch(0)).as_text())


def held_bytes(variables):
    """How much each device holds of some variables."""
    held = {}
    for v in variables:
        for shard in v.cell.array().addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_numbers_are_those_of_mirrored_variables(count, shape, optimizer):
    parts = Trained(sharded(count), shape, optimizer)
    copies = Trained(mirrored(count), shape, optimizer)

    assert parts.train() == pytest.approx(copies.train(), rel=1e-5)

    for a, b in zip(parts.state, copies.state, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_gradient_is_scattered_and_only_the_parameter_is_gathered(shape, optimizer):
    model = Trained(sharded(4), shape, optimizer)

    assert sorted(model.collectives()) == ["all-gather", "reduce-scatter"]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_device_holds_its_share_of_the_state_before_and_after_steps(shape):
    model = Trained(sharded(4), shape, "adam")
    share = 3 * -(-int(np.prod(shape)) // 4) * 4  # three variables, of four bytes for each number

    for _ in range(2):
        assert list(held_bytes(model.state).values()) == [share] * 4
        model.train()


def test_small_variables_stay_on_every_device():
    with sharded(2).scope():
        small, large = rx.Variable(jnp.zeros(4096)), rx.Variable(jnp.zeros(4097))

    assert [s.data.shape for s in small.cell.array().addressable_shards] == [(4096,)] * 2
    assert [s.data.shape for s in large.cell.array().addressable_shards] == [(2049,)] * 2


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    count=st.sampled_from([2, 3, 4]),
    dtype=st.sampled_from(["float32", "bfloat16", "int32", "bool"]),
)
def test_any_shape_is_held_read_and_written(cut_all, shape, count, dtype):
    start = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("f4")
    strategy = sharded(count)
    with strategy.scope():
        v = rx.Variable(jnp.asarray(start, dtype))
    expected = np.asarray(jnp.asarray(start, dtype))
    assert v.cell.shard_layout is not None
    np.testing.assert_array_equal(v.numpy(), expected)

    def step():
        v.assign(v.read_value()[::-1])
        return v.read_value()

    seen = compiled(strategy, step)

    flipped = expected[::-1]
    for own in strategy.experimental_local_results(seen):
        np.testing.assert_array_equal(own, flipped)
    np.testing.assert_array_equal(v.numpy(), flipped)
    v.assign(jnp.asarray(start, dtype))
    np.testing.assert_array_equal(v.numpy(), expected)


@pytest.mark.parametrize("way", WAYS)
def test_replicas_read_the_whole_value_and_write_it_together(way, cut_all):
    strategy = sharded(4)
    with strategy.scope():
        v = rx.Variable(jnp.arange(6.0), aggregation=rx.VariableAggregation.SUM)

    def step():
        v.assign_add(jnp.ones(6) * replica_id())
        return v.read_value()

    seen = way(strategy, step)

    for own in strategy.experimental_local_results(seen):
        assert own.tolist() == [6, 7, 8, 9, 10, 11]
    assert v.numpy().tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("way", WAYS)
def test_a_write_that_differs_is_refused_and_nothing_is_assigned(way, cut_all):
    strategy = sharded(2)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(5), name="w")

    with pytest.raises(rx.errors.DivergenceError, match="'w'"):
        way(strategy, lambda: v.assign(jnp.ones(5) * replica_id()))
    assert v.numpy().tolist() == [0] * 5

    way(strategy, lambda: v.assign(jnp.ones(5) * replica_id() * 0 + 2))
    assert v.numpy().tolist() == [2] * 5


@pytest.mark.parametrize("shape", [(8, 3), (7,)])
def test_cross_replica_code_reads_writes_and_loops(shape, cut_all):
    strategy = sharded(4)
    with strategy.scope():
        v, total = rx.Variable(jnp.ones(shape)), rx.Variable(jnp.zeros(shape))

    @rx.function
    def steps(count):
        def turn(carry, _):
            strategy.run(lambda: total.assign_add(context().all_reduce("SUM", v.read_value())))
            v.assign(v * 2)
            return carry, jnp.sum(v.read_value())

        return rx.scan(turn, 0, None, length=count)[1]

    sums = steps(3)

    size = np.prod(shape)
    assert np.asarray(sums).tolist() == [2 * size, 4 * size, 8 * size]
    np.testing.assert_array_equal(total.numpy(), np.full(shape, 4 * 7.0))
    assert {s.data.size for s in v.cell.array().addressable_shards} == {-(-size // 4)}


def test_gradients_through_a_run_are_the_same(cut_all):
    def gradient(strategy):
        with strategy.scope():
            v = rx.Variable(jnp.arange(7.0))
        x = per_replica(strategy, np.arange(14, dtype="f4").reshape(2, 7))

        @rx.function
        def whole(x):
            loss = lambda: strategy.reduce(  # noqa: E731
                "SUM", strategy.run(lambda x: jnp.sum(v * v * x), (x,)), axis=None
            )
            return rx.grad(loss, v)()

        return np.asarray(whole(x))

    np.testing.assert_array_equal(gradient(sharded(2)), gradient(mirrored(2)))


def test_a_step_under_jit_and_a_norm_of_the_gradient_give_the_same_numbers():
    def train(strategy):
        model = Trained(strategy, (67, 101), "adam")

        @jax.jit
        def clipped(gradient):
            return gradient / jnp.maximum(1.0, 100 * jnp.sqrt(jnp.sum(gradient**2))), gradient

        model.update = lambda gradient: model.adam(clipped(gradient)[0])
        return model.train(), model.w.numpy()

    (losses, w), (expected, copy) = train(sharded(4)), train(mirrored(4))

    assert losses == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(w, copy, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_function_that_is_called_is_taken_apart_also_if_a_result_is_left(dropped):
    @jax.jit
    def half_and_quarter(x):
        half = x / 2
        return (half, half * 0.5) if dropped == 0 else (half * 0.5, half)

    def train(strategy):
        model = Trained(strategy, (67, 101), "momentum")
        chosen = 1 - dropped
        model.update = lambda gradient: model.momentum(half_and_quarter(gradient)[chosen])
        return model.train(), model.collectives()

    (losses, collectives), (expected, _) = train(sharded(4)), train(mirrored(4))

    assert losses == pytest.approx(expected, rel=1e-5)
    assert sorted(collectives) == ["all-gather", "reduce-scatter"]


OPERATIONS = {
    "add": lambda a, b: a + b,
    "scaled": lambda a, b: a * 0.5 - b / 3,
    "where": lambda a, b: jnp.where(a > b, a, 0.25),
    "root": lambda a, b: jnp.sqrt(jnp.abs(a)) + jnp.square(b),
    "clipped": lambda a, b: jnp.clip(a, -0.5, 0.5) * jnp.sign(b),
    "narrow": lambda a, b: (a.astype(jnp.bfloat16) + 1).astype(jnp.float32) + b,
    "norm": lambda a, b: a / (1 + jnp.linalg.norm(b)),
    "rows": lambda a, b: a - b.mean(axis=0),
    "running": lambda a, b: jnp.cumsum(a, axis=0) * 0.1 + b,
    "turned": lambda a, b: a[::-1] + b,
    "branch": lambda a, b: jax.lax.cond(jnp.sum(a) > 0, lambda: a, lambda: b),
    "called": lambda a, b: jax.jit(lambda x, y: (x * y, x - y))(a, b)[1],
    "number": lambda a, b: a + jnp.arange(a.size).reshape(a.shape) / a.size,
    "summed": lambda a, b: context().all_reduce("MEAN", a) + b,
    "gathered": lambda a, b: a + context().all_gather(b[:1], axis=0).mean(),
}


@pytest.mark.parametrize("rows", [7, 8])
def test_each_operation_gives_the_numbers_of_mirrored_variables(rows, cut_all):
    def updated(strategy):
        rng = np.random.default_rng(0)
        with strategy.scope():
            written = {
                name: rx.Variable(rng.normal(size=(rows, 3)).astype("f4")) for name in OPERATIONS
            }
        x = per_replica(strategy, rng.normal(size=(4, rows, 3)).astype("f4"))

        def step(x):
            total = context().all_reduce("SUM", x)
            for name, v in written.items():
                v.assign(OPERATIONS[name](v.read_value(), total) * 2)

        compiled(strategy, step, x)
        return {name: v.numpy() for name, v in written.items()}

    parts, copies = updated(sharded(4)), updated(mirrored(4))

    for name in OPERATIONS:
        np.testing.assert_allclose(parts[name], copies[name], rtol=1e-4, atol=1e-5, err_msg=name)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=1, max_size=5),
    places=st.lists(st.integers(0, 7), min_size=10, max_size=10),
    rows=st.sampled_from([7, 8]),
)
def test_any_update_gives_the_numbers_of_mirrored_variables(cut_all, names, places, rows):
    def updated(strategy):
        rng = np.random.default_rng(0)
        with strategy.scope():
            v, w = (rx.Variable(rng.normal(size=(rows, 3)).astype("f4")) for _ in range(2))
        x = per_replica(strategy, rng.normal(size=(4, rows, 3)).astype("f4"))

        def step(x):
            known = [v.read_value(), w.read_value(), context().all_reduce("SUM", x)]
            for i, name in enumerate(names):
                a, b = (known[p % len(known)] for p in places[2 * i : 2 * i + 2])
                known.append(OPERATIONS[name](a, b))
            v.assign(known[-1])
            w.assign(known[-2] + w)
            return known[len(known) // 2].sum()

        seen = compiled(strategy, step, x)
        return v.numpy(), w.numpy(), np.asarray(strategy.experimental_local_results(seen))

    for a, b in zip(updated(sharded(4)), updated(mirrored(4)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Program:
    """Statements of a step that read and write two variables, in and out of control flow."""

    def __init__(self, strategy, rows):
        rng = np.random.default_rng(0)
        with strategy.scope():
            self.v, self.w = (
                rx.Variable(rng.normal(size=(rows, 3)).astype("f4"), name=n) for n in "vw"
            )

    def clip(self, total):
        """Gradients of both, clipped by the norm of all, as one update."""
        loss = lambda: jnp.mean(jnp.sin(self.v * self.w) * total)  # noqa: E731
        gradients = rx.value_and_grad(loss, [self.v, self.w])()[1]
        reduced = context().all_reduce("SUM", gradients)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in reduced))
        scale = jnp.minimum(1.0, 0.1 / norm)
        for x, gradient in zip((self.v, self.w), reduced, strict=True):
            x.assign_sub(gradient * scale)

    def choose(self, total):
        """One branch writes the one, the other reads it and writes the other."""
        rx.cond(
            jnp.sum(self.v) > 0,
            lambda t: self.v.assign_sub(0.1 * t).read_value(),
            lambda t: self.w.assign(self.w * 0.5 + self.v).read_value(),
            total,
        )

    def choose_value(self, total):
        """No branch writes."""
        taken = jax.lax.cond(jnp.sum(self.w) > 0, lambda: self.v * 2, lambda: self.w * 3)
        self.v.assign(0.5 * taken + 0.01 * total)

    def loop(self, total):
        """Each turn goes on from what the turn before it wrote."""

        def turn(carry, x):
            self.v.assign(0.9 * self.v + 0.1 * carry)
            self.w.assign_add(0.1 * x * self.v)
            return carry + jnp.mean(self.w), jnp.sum(self.v)

        _, seen = rx.scan(turn, total, jnp.arange(3.0))
        self.v.assign_add(0.01 * jnp.broadcast_to(seen.sum(), self.v.shape))

    def choose_in_a_loop(self, total):
        """A choice in a loop."""

        def turn(carry, x):
            rx.cond(x > 1, lambda: self.v.assign_add(carry), lambda: self.w.assign_sub(0.1 * carry))
            return 0.5 * carry, None

        rx.scan(turn, total, jnp.arange(3.0))

    def times(self, total):
        """JAX's own loops, which read: of a length that is known at run time only, and a scan."""
        count = 2 + (jnp.sum(self.v) > 0).astype(jnp.int32)
        add = lambda _, x: x + 0.1 * self.w.read_value()  # noqa: E731
        self.v.assign(jax.lax.fori_loop(0, count, add, self.v.read_value()))
        scanned = jax.lax.scan(lambda c, x: (c * self.v, jnp.sum(c) * x), total, jnp.ones(2))
        self.w.assign_add(0.01 * scanned[0] + scanned[1].mean())


STATEMENTS = sorted(name for name in vars(Program) if not name.startswith("_"))


def numbers_of(strategy, names, rows):
    program = Program(strategy, rows)
    x = np.random.default_rng(1).normal(size=(4, rows, 3)).astype("f4")

    def step(x):
        total = context().all_reduce("SUM", x)
        for name in names:
            getattr(program, name)(total)

    compiled(strategy, step, per_replica(strategy, x))
    return program.v.numpy(), program.w.numpy()


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4),
    rows=st.sampled_from([7, 8]),
)
def test_clipping_choices_and_loops_give_the_numbers_of_mirrored_variables(cut_all, names, rows):
    found, expected = (numbers_of(way(4), names, rows) for way in (sharded, mirrored))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_gives_the_numbers_of_mirrored_variables(cut_all, name):
    found, expected = (numbers_of(way(4), [name], 7) for way in (sharded, mirrored))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_short_batches_train_as_with_mirrored_variables():
    def train(strategy):
        rng = np.random.default_rng(0)
        with strategy.scope():
            w = rx.Variable(rng.normal(size=(67, 101)).astype("f4"))
        data = rx.data.Dataset.from_tensor_slices(rng.normal(size=(11, 67)).astype("f4")).batch(4)

        def step(x):
            loss = lambda: jnp.sum(jnp.square(x @ w)) / 400  # noqa: E731
            value, gradient = rx.value_and_grad(loss, w)()
            w.assign_sub(0.1 * context().all_reduce("SUM", gradient))
            return value

        run = rx.function(lambda x: strategy.run(step, (x,)))
        losses = [
            float(strategy.reduce("SUM", run(x), axis=None))
            for x in strategy.experimental_distribute_dataset(data)
        ]
        return losses, w.numpy()

    (losses, w), (expected, copy) = train(sharded(2)), train(mirrored(2))

    assert losses == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(w, copy, rtol=1e-4, atol=1e-6)


def test_updates_of_single_copies_must_agree(cut_all):
    strategy = sharded(2)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(5), name="w")

    strategy.extended.update(v, lambda copy, x: copy.assign_add(x), args=(jnp.ones(5),))
    assert v.numpy().tolist() == [1] * 5
    assert compiled(strategy, lambda: v + 0.0).values[1].tolist() == [1] * 5

    v.components[1].assign(jnp.zeros(5))
    with pytest.raises(rx.errors.DivergenceError, match="sharded"):
        compiled(strategy, lambda: v + 0.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
def test_a_variable_is_read_by_another_strategy(count, way, cut_all):
    first, second = sharded(2), mirrored(count)
    with first.scope():
        v = rx.Variable(jnp.arange(5.0))

    seen = way(second, lambda: v * 2)

    for own in second.experimental_local_results(seen):
        assert own.tolist() == [0, 2, 4, 6, 8]


def test_a_model_that_would_not_fit_a_device_trains():
    budget, width = 3_000_000, 512  # three variables of 1 MiB do not fit; their quarters do
    others = {id(x) for x in jax.live_arrays()}  # of other tests in this process
    model = Trained(sharded(4), (width, width), "adam")
    assert 3 * 4 * width * width > budget

    losses = model.train(6)

    assert losses[-1] < losses[0]
    live = {}
    for x in (x for x in jax.live_arrays() if id(x) not in others):
        for shard in x.addressable_shards:
            live[shard.device] = live.get(shard.device, 0) + shard.data.nbytes
    assert max(held_bytes(model.state).values()) == 3 * width * width
    assert max(live.values()) < budget


def test_what_is_printed_names_the_parts():
    with sharded(2).scope():
        v = rx.Variable(jnp.zeros((256, 64)), name="w")

    assert repr(v) == "<rx.Variable 'w:0' shape=(256, 64) dtype=float32, in 2 parts>"
    assert v.distribute_strategy.variable_policy == "sharded"


@pytest.mark.parametrize("policy", ["shard", "", None, 1])
def test_other_policies_are_refused(policy):
    with pytest.raises(ValueError, match=r"no variable_policy.*'mirrored'.*'sharded'"):
        mirrored(2, variable_policy=policy)


@pytest.mark.parametrize("shape", [(5,), (8, 3)])
def test_a_saved_function_is_loaded_without_a_trace_of_the_parts(shape, cut_all, tmp_path):
    class Counted:
        """Something with a variable and a function that reads and writes it."""

    with sharded(4).scope():
        v = rx.Variable(jnp.ones(shape), name="v")
    counted = Counted()
    counted.v = v
    counted.add = rx.function(
        lambda x: v.assign_add(jnp.full(shape, x)).read_value(),
        input_signature=[rx.TensorSpec([], "float32")],
    )
    rx.saved_model.save(counted, tmp_path / "saved")

    for strategy in (mirrored(2), sharded(2)):
        with strategy.scope():
            loaded = rx.saved_model.load(tmp_path / "saved")
        np.testing.assert_array_equal(loaded.add(jnp.float32(2)), np.full(shape, 3.0))
        np.testing.assert_array_equal(loaded.add(jnp.float32(2)), np.full(shape, 5.0))


@pytest.mark.parametrize("ways", [(mirrored, sharded), (sharded, mirrored), (sharded, sharded)])
def test_checkpoints_are_restored_whatever_the_policy(ways, tmp_path):
    source, target = (way(n) for way, n in zip(ways, (4, 2), strict=True))
    saved = Trained(source, (67, 101), "adam")
    saved.train()
    path = rx.train.Checkpoint(w=saved.w, slots=saved.slots, steps=saved.steps).save(tmp_path / "c")

    fresh = Trained(target, (67, 101), "adam")
    objects = rx.train.Checkpoint(w=fresh.w, slots=fresh.slots, steps=fresh.steps)
    objects.restore(path).assert_consumed()

    for a, b in zip([*saved.state, saved.steps], [*fresh.state, fresh.steps], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    fresh.train(1)
