"""Flax NNX in strategies: the numbers of NNX alone on one device, by closure and as arguments."""

import copy
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax.values import _cut
from replicax.values._per_replica import is_opaque
from tests.replicas import WAYS, compiled, context, eagerly, mirrored

BATCHES = [8, 8, 5]  # the last one is short


class Net(nnx.Module):
    def __init__(self, norm):
        rngs = nnx.Rngs(0)
        self.inner = nnx.Linear(3, 6, rngs=rngs)
        self.norm = norm(6, rngs=rngs)
        self.outer = nnx.Linear(6, 4, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.tanh(self.norm(self.inner(x))))


def layer_norm(n, rngs):
    return nnx.LayerNorm(n, rngs=rngs)


def synchronized(n, rngs):
    return nnx.BatchNorm(n, axis_name="replica", use_fast_variance=False, rngs=rngs)


def alone(n, rngs):
    return nnx.BatchNorm(n, use_fast_variance=False, rngs=rngs)


class Training:
    """A model with its optimizer and metrics, and one step of them on some rows."""

    def __init__(self, norm):
        self.model = Net(norm)
        self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.5, momentum=0.9), wrt=nnx.Param)
        self.metrics = nnx.MultiMetric(
            accuracy=nnx.metrics.Accuracy(),
            loss=nnx.metrics.Average("rows_loss"),
            spread=nnx.metrics.Welford("rows_loss"),
        )

    @property
    def objects(self):
        return self.model, self.optimizer, self.metrics

    def found(self):
        measured = self.metrics.compute()
        spread = measured.pop("spread")
        measured.update(mean=spread.mean, deviation=spread.standard_deviation)
        state = nnx.state((self.model, self.optimizer), (nnx.Param, nnx.BatchStat, nnx.OptState))
        return jax.tree.map(np.asarray, (nnx.to_pure_dict(state), measured))


def step(model, optimizer, metrics, x, y, total):
    def loss_of(model):
        logits = model(x)
        rows = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return rx.nn.compute_average_loss(rows, global_batch_size=total), (logits, rows)

    (loss, (logits, rows)), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, gradients)
    metrics.update(logits=logits, labels=y, rows_loss=rows)
    return loss


def batches(sizes):
    random = np.random.default_rng(0)
    for size in sizes:
        yield (
            random.normal(size=(size, 3)).astype("float32"),
            random.integers(0, 4, size).astype("int32"),
        )


@functools.cache
def on_one_device(norm, *sizes):
    training = Training(norm)
    one_step = nnx.jit(step, static_argnums=5)
    for x, y in batches(sizes):
        one_step(*training.objects, jnp.asarray(x), jnp.asarray(y), len(x))
    return training.found()


def distributed(strategy, *arrays):
    def own(context):
        cut = np.array_split(np.arange(len(arrays[0])), context.num_replicas_in_sync)
        return tuple(jnp.asarray(a[cut[context.replica_id_in_sync_group]]) for a in arrays)

    return strategy.experimental_distribute_values_from_function(own)


def by_closure(strategy, training):
    @rx.function
    def train(batch, total):
        replica_step = lambda x, y: step(*training.objects, x, y, total)  # noqa: E731
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    return train


def as_arguments(strategy, training):
    @rx.function
    def train(model, optimizer, metrics, batch, total):
        args = (model, optimizer, metrics, *batch, total)
        return strategy.reduce("SUM", strategy.run(step, args=args), axis=None)

    return lambda batch, total: train(*training.objects, batch, total)


def op_by_op(strategy, training):
    return lambda batch, total: strategy.run(step, args=(*training.objects, *batch, total))


class TestTraining:
    @pytest.mark.parametrize(
        ("count", "norm", "how", "sizes"),
        [
            (1, layer_norm, as_arguments, BATCHES),
            (2, layer_norm, by_closure, BATCHES),
            (2, synchronized, as_arguments, BATCHES),
            (4, synchronized, by_closure, BATCHES),
            (2, synchronized, op_by_op, [5]),
            pytest.param(2, layer_norm, op_by_op, [5], marks=pytest.mark.slow),
        ],
    )
    def test_gives_the_numbers_of_one_device(self, count, norm, how, sizes):
        strategy = mirrored(count)
        with strategy.scope():
            training = Training(norm)

        train = how(strategy, training)
        for x, y in batches(sizes):
            train(distributed(strategy, x, y), len(x))

        expected = on_one_device(alone if norm is synchronized else norm, *sizes)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), training.found(), expected
        )
        assert len(training.model.inner.kernel[...].sharding.device_set) == count

    @pytest.mark.parametrize(
        "how", [by_closure, pytest.param(as_arguments, marks=pytest.mark.slow)]
    )
    def test_gives_the_numbers_of_one_device_also_in_parts(self, how, monkeypatch):
        monkeypatch.setattr(_cut, "SMALL_BYTES", 0)
        strategy = mirrored(4, variable_policy="sharded")
        with strategy.scope():
            training = Training(layer_norm)

        train = how(strategy, training)
        for x, y in batches([8, 8]):
            train(distributed(strategy, x, y), len(x))

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
            training.found(),
            on_one_device(layer_norm, 8, 8),
        )

    def test_arguments_are_the_modules_themselves(self, two):
        with two.scope():
            training = Training(layer_norm)
        train = rx.function(lambda model, x: two.run(lambda model, x: model(x), args=(model, x)))

        for _ in range(3):
            train(training.model, jnp.ones((2, 3)))

        assert train.experimental_get_tracing_count() == 1
        assert is_opaque(training.model)
        assert is_opaque(training.model.inner.kernel)
        assert not is_opaque(nnx.Param(jnp.ones(2)))

    @pytest.mark.parametrize("way", WAYS)
    def test_statistics_of_each_replica_are_averaged(self, way, two):
        with two.scope():
            norm = nnx.BatchNorm(1, momentum=0.5, rngs=nnx.Rngs(0))
        x = distributed(two, np.array([[0.0], [2.0], [10.0], [30.0]], "float32"))

        way(two, lambda rows: norm(rows), *x)

        np.testing.assert_allclose(norm.mean[...], [0.5 * (1 + 20) / 2])
        np.testing.assert_allclose(norm.var[...], [0.5 + 0.5 * (1 + 100) / 2])

    def test_an_optimizer_refuses_what_it_cannot_add_up(self, two):
        with two.scope():
            training = Training(layer_norm)

        def replica():
            gradients = nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(training.model)
            training.optimizer.update(training.model, gradients, value=jnp.float32(1))

        with pytest.raises(TypeError, match="was given value"):
            compiled(two, replica)


class TestRandomness:
    @pytest.mark.parametrize("way", WAYS)
    def test_replicas_draw_apart_and_the_first_as_one_device(self, way, two):
        ones = jnp.ones(64)
        one = nnx.Dropout(0.5, rngs=nnx.Rngs(7))
        with two.scope():
            many = nnx.Dropout(0.5, rngs=nnx.Rngs(7))

        masks = [way(two, lambda: many(ones)) for _ in range(2)]

        expected = [np.asarray(one(ones)) for _ in range(2)]
        for mask, alone in zip(masks, expected, strict=True):
            np.testing.assert_array_equal(mask.values[0], alone)
            assert not np.array_equal(mask.values[1], alone)
        assert int(many.rngs.count[...]) == 2


class TestMetrics:
    def test_are_summed_when_read_and_can_be_reset(self, two):
        with two.scope():
            average = nnx.metrics.Average()

        for _ in range(2):
            compiled(two, lambda x: average.update(values=x), *distributed(two, np.arange(4.0)))
        seen = float(average.compute())
        average.reset()
        average.update(values=jnp.float32(7))

        assert seen == 1.5
        assert float(average.compute()) == 7.0

    def test_of_a_share_of_the_loss_count_each_replica(self, two):
        with two.scope():
            average = nnx.metrics.Average("loss")

        compiled(two, lambda: average.update(loss=jnp.float32(3)))

        assert int(average.count[...]) == 2


class TestTape:
    @pytest.mark.parametrize("way", WAYS)
    def test_watches_parameters_by_itself(self, way, two):
        with two.scope():
            linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        x = jnp.arange(6.0).reshape(2, 3)

        def replica():
            with rx.GradientTape() as tape:
                loss = (linear(x) ** 2).mean()
            return tape.gradient(loss, [linear.kernel, linear.bias])

        found = [g.values[1] for g in way(two, replica)]

        kernel, bias = linear.kernel[...], linear.bias[...]
        expected = jax.grad(lambda p: ((x @ p[0] + p[1]) ** 2).mean())([kernel, bias])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, expected)

    def test_watches_those_made_outside_of_every_scope(self):
        linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

        with rx.GradientTape() as tape:
            loss = linear(jnp.ones((1, 2))).sum()

        assert tape.gradient(loss, linear.kernel).tolist() == [[1.0], [1.0]]


class TestBorders:
    def test_nnx_jit_is_refused_inside_and_works_outside(self, two):
        with two.scope():
            linear = nnx.Linear(2, 1, rngs=nnx.Rngs(0))

        @nnx.jit
        def call(model, x):
            return model(x)

        outside = call(linear, jnp.ones((1, 2)))
        for way in (eagerly, compiled):
            with pytest.raises(rx.errors.TracingError, match=r"nnx\.jit"):
                way(two, lambda: call(linear, jnp.ones((1, 2))))

        np.testing.assert_allclose(outside, linear(jnp.ones((1, 2))))

    def test_functional_state_is_data(self):
        graph, state = nnx.split(nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
        add = rx.function(lambda state: jax.tree.map(lambda p: p + 1, state))
        before = np.asarray(state["kernel"][...])

        for _ in range(3):
            state = add(state)

        assert add.experimental_get_tracing_count() == 1
        np.testing.assert_allclose(nnx.merge(graph, state).kernel[...], before + 3, rtol=1e-6)

    def test_a_module_made_outside_joins_the_strategy_that_first_runs_it(self, two):
        counter = nnx.Variable(jnp.float32(1))

        def replica():
            counter[...] = counter[...] + context().all_reduce("SUM", jnp.float32(1))

        compiled(two, replica)

        assert float(counter[...]) == 3.0
        assert len(counter[...].sharding.device_set) == 2

    def test_an_eager_assignment_is_seen_by_the_next_compiled_call(self, two):
        with two.scope():
            v = nnx.Param(jnp.float32(1))
        read = rx.function(lambda: v[...] * 2)

        first = float(read())
        v[...] = jnp.float32(5)

        assert (first, float(read())) == (2.0, 10.0)

    def test_replicas_that_write_different_values_are_refused(self, two):
        with two.scope():
            v = nnx.Param(jnp.float32(1))

        def replica():
            v[...] = context().replica_id_in_sync_group * jnp.float32(1)

        with pytest.raises(rx.errors.DivergenceError, match="Param"):
            compiled(two, replica)

    def test_copies_are_apart(self, two):
        with two.scope():
            v = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        twin, clone = copy.deepcopy(v), nnx.clone(v)
        v.kernel[...] = jnp.zeros((2, 1))

        for other in (twin, clone):
            assert float(jnp.abs(other.kernel[...]).sum()) > 0

    def test_a_module_goes_away_with_its_last_reference(self, two):
        with two.scope():
            module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        compiled(two, lambda m=module: m(jnp.ones((1, 2))))
        gone = weakref.ref(module)
        del module

        gc.collect()

        assert gone() is None


class Scaled(nnx.Module):
    by = 1.0  # a default that a module may have its own value for

    def __init__(self, size):
        self.kernel = nnx.Param(jnp.ones((size,)))
        self.shift = 0.0
        self.shift = 1.0  # changed while it is made

    def __call__(self, x):
        return x * self.kernel * self.by + self.shift


CHANGES = {
    "static": lambda m, k: setattr(m, "shift", (0.0, 2.0, 5.0)[k]),
    "default": lambda m, k: setattr(m, "by", (1.0, 3.0, 4.0)[k]),
    "parameter": lambda m, k: setattr(m, "kernel", nnx.Param(jnp.full((2,), float(k)))),
    "value": lambda m, k: m.kernel.set_value(jnp.full((2,), k + 1.0)),
}


@pytest.mark.parametrize("is_argument", [False, True])
@settings(max_examples=6, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 2)), max_size=6))
def test_a_compiled_function_sees_every_change_of_a_module(is_argument, changes):
    strategy = mirrored(2)
    with strategy.scope():
        module = Scaled(2)

    if is_argument:
        step = rx.function(lambda x: strategy.run(lambda m, x: m(x), args=(module, x)))
    else:
        step = rx.function(lambda x: strategy.run(lambda x: module(x), args=(x,)))
    x = jnp.asarray([1.0, 2.0])
    for name, k in [("static", 0), *changes]:
        CHANGES[name](module, k)
        for piece in strategy.experimental_local_results(step(x)):
            np.testing.assert_array_equal(piece, module(x))


def test_a_model_that_goes_to_and_fro_between_modes_has_two_programs():
    strategy = mirrored(2)
    with strategy.scope():
        model = nnx.Sequential(
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        )

    @rx.function
    def call(model, x):
        return strategy.run(lambda x: model(x), args=(x,))

    for _ in range(3):
        model.train()
        assert (strategy.gather(call(model, jnp.ones(64)), 0) == 0).any()
        model.eval()
        assert (strategy.gather(call(model, jnp.ones(64)), 0) == 1).all()
    Scaled(3)  # what is made concerns no function

    call(model, jnp.ones(64))
    assert call.experimental_get_tracing_count() == 2
