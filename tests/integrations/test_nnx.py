"""Flax NNX in strategies: the numbers of NNX alone on one device, by closure and as arguments."""

import copy
import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.values import sharded
from replicax._src.values.per_replica import is_opaque
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
        monkeypatch.setattr(sharded, "SMALL_BYTES", 0)
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

        x = jnp.ones((1, 2))
        bound = nnx.jit_partial(lambda model, x: model(x), linear, graph_updates=False)
        calls = [lambda: call(linear, x), lambda: bound(x)]

        for function in calls:
            np.testing.assert_allclose(function(), linear(x))
            for way in (eagerly, compiled):
                with pytest.raises(rx.errors.TracingError, match=r"nnx\.jit"):
                    way(two, function)

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


class Block(nnx.Module):
    def __init__(self, size, rate, rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)
        self.norm = nnx.LayerNorm(size, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(nnx.gelu(self.norm(self.linear(x))))


class NormBlock(nnx.Module):
    """A block that also writes statistics where `nnx.scan` applies it."""

    def __init__(self, size, rate, rngs):
        self.linear = nnx.Linear(size, size, rngs=rngs)
        self.norm = nnx.BatchNorm(size, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.gelu(self.norm(self.linear(x))))


class Stack(nnx.Module):
    """Layers that `nnx.vmap` makes and `nnx.scan` applies, with a key each."""

    def __init__(self, depth, rate, kind=Block):
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return kind(3, rate, rngs)

        self.layers = make(nnx.Rngs(0, dropout=1))

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, layer):
            return layer(x)

        return apply(x, self.layers)


class SharedStream(nnx.Module):
    """Layers whose keys are split from one stream in each call, and put back after it."""

    def __init__(self, depth, rate):
        self.depth = depth
        self.rngs = nnx.Rngs(dropout=1)
        self.layers = Stack(depth, 0.0).layers
        self.rate = rate

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def apply(x, layer, rngs):
            keep = jax.random.bernoulli(rngs.dropout(), 1 - self.rate, x.shape)
            return layer(x) * keep

        with nnx.split_rngs(self.rngs, splits=self.depth):
            return apply(x, self.layers, self.rngs)


def numbers(module):
    """Everything that a module's variables hold, as NumPy's arrays."""

    def plain(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(plain, nnx.to_pure_dict(nnx.state(module)))


def assert_same(found, expected, atol=0.0):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, expected)


STACKS = [Stack, SharedStream]


class TestLayerStacks:
    @pytest.mark.parametrize("kind", STACKS)
    def test_made_in_a_scope_are_those_made_outside(self, kind, two):
        with two.scope():
            inside = kind(3, 0.5)

        assert_same(numbers(inside), numbers(kind(3, 0.5)))

    @pytest.mark.parametrize("kind", STACKS)
    @pytest.mark.parametrize("way", WAYS)
    def test_first_replica_drops_what_one_device_drops(self, way, kind, two):
        x = jnp.arange(12.0).reshape(4, 3)
        alone = kind(3, 0.5)
        with two.scope():
            stack = kind(3, 0.5)

        for _ in range(2):
            found = way(two, lambda: stack(x))
            np.testing.assert_allclose(found.values[0], alone(x), rtol=1e-5)
            assert not np.allclose(found.values[1], found.values[0])

        assert_same(numbers(stack), numbers(alone))

    @pytest.mark.parametrize("kind", STACKS)
    def test_train_as_on_one_device(self, kind, two):
        def train(stack, optimizer, x, total):
            def loss_of(stack):
                return (stack(x) ** 2).sum() / total

            optimizer.update(stack, nnx.grad(loss_of)(stack))

        def make():
            stack = kind(3, 0.0)
            return stack, nnx.Optimizer(stack, optax.sgd(0.1), wrt=nnx.Param)

        alone, (x, _) = make(), next(batches([8]))
        with two.scope():
            many = make()
        compiled_train = rx.function(lambda x: two.run(lambda x: train(*many, x, 8), args=x))
        for _ in range(3):
            train(*alone, x, 8)
            compiled_train(distributed(two, x))

        assert_same(numbers(many[0]), numbers(alone[0]), atol=1e-5)

    def test_streams_that_stay_split_are_refused(self, two):
        with two.scope():
            rngs = nnx.Rngs(0)

        for way in WAYS:
            with pytest.raises(rx.errors.TracingError, match=r"nnx\.restore_rngs"):
                way(two, lambda: nnx.split_rngs(rngs, splits=2))
            assert rngs.default.key.shape == ()

    @pytest.mark.parametrize("way", WAYS)
    def test_an_error_between_split_and_restore_leaves_nothing(self, way, two):
        with two.scope():
            rngs = nnx.Rngs(0)

        def fail():
            nnx.split_rngs(rngs, splits=2)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            way(two, fail)

        assert rngs.default.key.shape == ()
        found = way(two, lambda: rngs.params())
        assert found.values[0].shape == ()

    def test_a_split_outside_is_seen_by_compiled_functions(self, two):
        with two.scope():
            rngs = nnx.Rngs(0)
        read = rx.function(lambda: jax.random.key_data(rngs.default.key[...]))
        key = np.asarray(read())

        with nnx.split_rngs(rngs, splits=2):
            assert read().shape == (2, *key.shape)
        np.testing.assert_array_equal(read(), key)

        assert read.experimental_get_tracing_count() == 2


@pytest.mark.parametrize(
    "value",
    [jnp.ones(3), jnp.ones(2, "bfloat16"), jnp.ones((2, 2)), np.ones(4, "int32"), None, "text"],
    ids=str,
)
def test_a_variable_takes_any_value_outside(value, two):
    plain = nnx.Variable(jnp.zeros(2))
    with two.scope():
        held = nnx.Variable(jnp.zeros(2))
    call = rx.function(lambda: jax.tree.leaves(held.get_value()))
    call()

    for v in (plain, held):
        v.set_value(value)

    if hasattr(value, "dtype"):
        np.testing.assert_array_equal(call()[0], plain.get_value())
        assert call()[0].dtype == held.dtype == plain.dtype
    else:
        assert held.get_value() == plain.get_value()
    held.set_value(jnp.full(2, 7.0))
    np.testing.assert_array_equal(call()[0], [7.0, 7.0])


class TestMeshesOfTheProgram:
    def test_variables_stay_where_the_program_puts_them(self, two):
        mesh = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4])
        spec = jax.P("rows", "columns")
        with two.scope(), jax.set_mesh(mesh):
            made = nnx.Param(jnp.ones((4, 4)), out_sharding=spec)
            placed = jax.device_put(jnp.ones((4, 4)), jax.NamedSharding(mesh, spec))
        with two.scope():
            given = nnx.Param(placed)

        for v in (made, given):
            assert v[...].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 2)
            for way in WAYS:
                with pytest.raises(rx.errors.ScopeError, match="placed itself"):
                    way(two, lambda v=v: v[...].sum())

    def test_variables_of_a_scope_can_be_used_under_a_mesh(self, two):
        x = jnp.ones((4, 3))
        with two.scope():
            linear, rngs = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Rngs(1)
        expected = nnx.Linear(3, 4, rngs=nnx.Rngs(0))(x), nnx.Rngs(1).params.normal((2,))

        mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices()[:4])
        with jax.set_mesh(mesh):
            found = linear(x), rngs.params.normal((2,))

        assert_same(found, expected)


class Watched(nnx.Module):
    """A module that knows when its own code runs."""

    level = 0

    def __init__(self):
        self.calls = []
        self.stored = 1

    def __getattr__(self, name):
        vars(self)["calls"].append(("getattr", name))
        raise AttributeError(name)

    @property
    def shown(self):
        self.calls.append("read")
        return self.stored

    @shown.setter
    def shown(self, value):
        self.stored = value


class TestHooksRunNoCodeOfTheUsers:
    def test_linen_modules_can_be_wrapped(self):
        x = jnp.ones((1, 2))

        wrapped = nnx.bridge.ToNNX(linen.Dense(3), rngs=nnx.Rngs(0)).lazy_init(x)

        expected = linen.Dense(3).init(wrapped.to_nnx__rngs.params.key[...], x)
        assert wrapped.kernel.shape == expected["params"]["kernel"].shape

    def test_setting_an_attribute_reads_none(self):
        watched = Watched()

        watched.shown = 2
        watched.new = 3
        watched.level = 4

        assert watched.calls == []

    def test_a_property_that_is_set_is_seen_by_compiled_functions(self):
        watched = Watched()
        call = rx.function(lambda: jnp.float32(watched.stored))

        found = []
        for value in (1, 5, 1):
            watched.shown = value
            found.append(float(call()))

        assert found == [1, 5, 1]
        assert call.experimental_get_tracing_count() == 2


class Sowing(nnx.Module):
    """A transform of NNX over a submodule, and what a call leaves in the module."""

    def __init__(self, transform):
        rngs = nnx.Rngs(0)
        make, _ = TRANSFORMS[transform]
        self.inner = make(rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.transform = transform

    def __call__(self, x):
        self.norm(x)
        self.sow(nnx.Intermediate, "seen", x)
        _, call = TRANSFORMS[self.transform]
        return call(self.inner, x)


def block(rngs):
    return Block(3, 0.5, rngs)


def stack(_, kind=Block):
    return Stack(2, 0.5, kind)


TRANSFORMS = {
    "none": (block, lambda inner, x: inner(x)),
    "remat": (block, lambda inner, x: nnx.remat(lambda inner, x: inner(x))(inner, x)),
    "scan": (stack, lambda inner, x: inner(x)),
    "scan with statistics": (functools.partial(stack, kind=NormBlock), lambda inner, x: inner(x)),
    "vmap": (
        stack,
        lambda inner, x: nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(inner.layers, x),
    ),
    "cond": (
        block,
        lambda inner, x: nnx.cond(True, lambda m, x: m(x), lambda _, x: x, inner, x),
    ),
}


@pytest.mark.filterwarnings("ignore:(?s).*sow.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "transform"),
    [
        # Stacks with statistics have all that those without have.
        pytest.param(way, name, marks=[pytest.mark.slow] if name == "scan" else [])
        for way, name in itertools.product(WAYS, TRANSFORMS)
    ],
)
def test_nothing_of_a_trace_stays_in_a_module(way, transform, two):
    x = jnp.arange(6.0).reshape(2, 3)
    with two.scope():
        model = Sowing(transform)
    keys = set(vars(model))

    def step():
        return nnx.value_and_grad(lambda m: m(x).sum())(model)[0]

    for _ in range(2):
        way(two, step)

    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Pytree):
            node._check_valid_context(lambda: "left in a trace")
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(model)))
    assert set(vars(model)) - {"seen"} == keys
    model.eval()
    first = model(x)
    np.testing.assert_array_equal(first, model(x))
    nnx.pop(model, nnx.Intermediate)
    model.train()
    way(two, step)


class PlainArrays(nnx.Module):
    """A module with arrays that are not variables, one of which a call may replace."""

    def __init__(self, *, is_counting):
        self.table = jnp.arange(3.0)
        self.count = jnp.zeros(())
        self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.is_counting = is_counting

    def __call__(self, x):
        if self.is_counting:
            self.count += x.sum()
        return self.linear(x + self.table)


CALLS = {
    "none": lambda m, x: m(x),
    "grad": lambda m, x: nnx.grad(lambda m: m(x).sum())(m).linear.bias[...],
    "remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
    "cond": lambda m, x: nnx.cond(True, lambda m, x: m(x), lambda m, x: 2 * m(x), m, x),
}


@pytest.mark.parametrize("call", CALLS)
def test_compiled_function_rejects_a_new_plain_array(call, two):
    x = jnp.ones((2, 3))
    with two.scope():
        model = PlainArrays(is_counting=True)

    with pytest.raises(rx.errors.TracingError, match=r"PlainArrays\.count.*nnx\.Variable"):
        compiled(two, lambda: CALLS[call](model, x))

    assert model.count == 0


@pytest.mark.parametrize("call", CALLS)
def test_plain_arrays_that_stay_pass_all_transforms(call, two):
    x = jnp.ones((2, 3))
    with two.scope():
        model = PlainArrays(is_counting=False)

    got = compiled(two, lambda: CALLS[call](model, x))

    expected = CALLS[call](PlainArrays(is_counting=False), x)
    for part in two.experimental_local_results(got):
        np.testing.assert_allclose(part, expected, rtol=1e-6)
