"""Keras models, optimizers and metrics in custom loops: the numbers of one device."""

import contextlib
import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.base.errors import DivergenceError, ScopeError
from replicax._src.values import sharded
from tests.fresh_process import run_fresh
from tests.integrations.keras_loops import SIZES, alone, batches, initializers, replicated
from tests.replicas import compiled, eagerly, mirrored

keras = rx.keras
layers = keras.layers

# float32 sums in another order: what is left after three steps.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
# The unit of float16 is 1e-3.
HALF_TOLERANCE = {"rtol": 5e-3, "atol": 1e-3}


def dense(**options):
    init = initializers()
    hidden = layers.Dense(
        6,
        "tanh",
        kernel_initializer=next(init),
        kernel_regularizer=options.pop("regularizer", None),
    )
    return keras.Sequential([hidden, layers.Dense(1, kernel_initializer=next(init), **options)])


def clipped_momentum_with_regularizer():
    return dense(regularizer="l2"), keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.5)


def adamw_schedule_and_average():
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 4)
    return dense(), keras.optimizers.AdamW(
        schedule, global_clipnorm=1.0, use_ema=True, ema_overwrite_frequency=2
    )


def accumulated_and_clipped_by_value():
    return dense(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, clipvalue=0.3)


def scaled_half_precision():
    init = initializers()
    model = keras.Sequential(
        [
            layers.Dense(6, "tanh", kernel_initializer=next(init), dtype="mixed_float16"),
            layers.Dense(1, kernel_initializer=next(init), dtype="mixed_float16"),
        ]
    )
    inner = keras.optimizers.SGD(0.1)
    return model, keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=2)


def synchronized_statistics():
    init = initializers()
    model = keras.Sequential(
        [
            layers.Dense(6, kernel_initializer=next(init)),
            layers.BatchNormalization(synchronized=True, momentum=0.5),
            layers.Dense(1, kernel_initializer=next(init)),
        ]
    )
    return model, keras.optimizers.SGD(0.1)


def recurrent_words_with_attention():
    init = initializers()
    words = keras.Input((3,), dtype="int32")
    vectors = layers.Embedding(10, 4, embeddings_initializer=next(init))(words)
    attended = layers.MultiHeadAttention(2, 2, kernel_initializer=next(init))(vectors, vectors)
    attended = layers.LayerNormalization()(attended + vectors)
    state = layers.LSTM(3, kernel_initializer=next(init), recurrent_initializer=next(init))(
        attended
    )
    out = layers.Dense(1, kernel_initializer=next(init))(state)
    return keras.Model(words, out), keras.optimizers.SGD(0.1)


class Shared(keras.Model):
    """A subclassed model whose layers are built on the first call; one of them is used twice."""

    def __init__(self):
        super().__init__()
        init = initializers()
        self.shared = layers.Dense(4, "tanh", kernel_initializer=next(init))
        self.inner = keras.Sequential([layers.Dense(3, "relu", kernel_initializer=next(init))])
        self.out = layers.Dense(1, kernel_initializer=next(init))

    def call(self, x, training=False):
        h = self.shared(self.shared(x))
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(self.shared.kernel)))
        return self.out(self.inner(h))


def nested_built_on_the_first_call():
    return Shared(), keras.optimizers.RMSprop(0.01)


WORDS = {"shape": (3,), "kind": "int32"}
FULL = (8, 8, 8)  # one program on each side, where most of the time goes
CASES = [
    pytest.param(make, count, sizes, marks=() if is_quick else pytest.mark.slow)
    for make, count, sizes, is_quick in [
        (clipped_momentum_with_regularizer, 4, SIZES, True),
        (adamw_schedule_and_average, 2, SIZES, True),
        (accumulated_and_clipped_by_value, 2, FULL, True),
        (scaled_half_precision, 2, FULL, True),
        (synchronized_statistics, 4, SIZES, True),
        (recurrent_words_with_attention, 2, FULL[:2], True),
        (nested_built_on_the_first_call, 2, FULL, True),
        (clipped_momentum_with_regularizer, 2, SIZES, False),
        (adamw_schedule_and_average, 4, SIZES, False),
        (accumulated_and_clipped_by_value, 4, SIZES, False),
        (scaled_half_precision, 4, SIZES, False),
        (recurrent_words_with_attention, 4, SIZES, False),
        (nested_built_on_the_first_call, 4, SIZES, False),
    ]
]


@pytest.mark.parametrize(("make", "count", "sizes"), CASES)
def test_a_custom_loop_gives_the_numbers_of_one_device(make, count, sizes):
    data = batches(**(WORDS if make is recurrent_words_with_attention else {}), sizes=sizes)
    near = HALF_TOLERANCE if make is scaled_half_precision else TOLERANCE
    losses, expected, steps, error = alone(make, data)

    got_losses, got, got_steps, got_error = replicated(mirrored(count), make, data)

    np.testing.assert_allclose(got_losses, losses, **near)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **near)
    assert got_steps == steps
    np.testing.assert_allclose(got_error, error, **near)


@pytest.mark.parametrize(
    "make",
    [
        adamw_schedule_and_average,
        accumulated_and_clipped_by_value,
        pytest.param(synchronized_statistics, marks=pytest.mark.slow),
        pytest.param(clipped_momentum_with_regularizer, marks=pytest.mark.slow),
        pytest.param(scaled_half_precision, marks=pytest.mark.slow),
        pytest.param(nested_built_on_the_first_call, marks=pytest.mark.slow),
    ],
)
def test_sharded_variables_give_the_numbers_of_one_device(make, monkeypatch):
    monkeypatch.setattr(sharded, "SMALL_BYTES", 0)
    near = HALF_TOLERANCE if make is scaled_half_precision else TOLERANCE
    data = batches(sizes=(8, 8))
    losses, expected, steps, _ = alone(make, data)

    strategy = mirrored(4, variable_policy="sharded")
    got_losses, got, got_steps, _ = replicated(strategy, make, data)

    np.testing.assert_allclose(got_losses, losses, **near)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **near)
    assert got_steps == steps


@pytest.mark.parametrize(
    ("make", "eager"),
    [(clipped_momentum_with_regularizer, False), (accumulated_and_clipped_by_value, True)],
)
def test_one_replica_gives_the_numbers_of_one_device(make, eager):
    data = batches(sizes=(8, 8))
    losses, expected, steps, _ = alone(make, data)

    got_losses, got, got_steps, _ = replicated(mirrored(1), make, data, eager=eager)

    np.testing.assert_allclose(got_losses, losses, **TOLERANCE)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    assert got_steps == steps


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (synchronized_statistics, (8, 8)),
        (nested_built_on_the_first_call, (8, 8)),
        pytest.param(synchronized_statistics, (8, 5), marks=pytest.mark.slow),
        pytest.param(nested_built_on_the_first_call, (8, 5), marks=pytest.mark.slow),
    ],
)
def test_eager_replicas_build_once_and_step_once(make, sizes, two):
    data = batches(sizes=sizes)
    losses, expected, steps, _ = alone(make, data)

    got_losses, got, got_steps, _ = replicated(two, make, data, eager=True)

    np.testing.assert_allclose(got_losses, losses, **TOLERANCE)
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    assert got_steps == steps == 2


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_a_metric_adds_up_over_replicas_and_is_reset(way, two):
    with two.scope():
        mean, hits = keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()
        by_class = keras.metrics.AUC(num_thresholds=5)

    def step(x):
        mean.update_state(x)
        hits.update_state(jnp.zeros((2, 1)), jnp.stack([x, 1 - x], axis=-1))
        by_class.update_state(jnp.asarray([0.0, 1.0]), x)

    values = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray([0.2, 0.4]) + c.replica_id_in_sync_group * 0.5
    )
    way(two, step, values)

    assert float(mean.result()) == pytest.approx(0.55)
    assert float(hits.result()) == pytest.approx(0.5)
    alone = keras.metrics.AUC(num_thresholds=5)
    alone.update_state(np.asarray([0.0, 1.0, 0.0, 1.0]), np.asarray([0.2, 0.4, 0.7, 0.9]))
    assert float(by_class.result()) == pytest.approx(float(alone.result()))
    mean.update_state(jnp.asarray([2.8]))  # across replicas it counts once
    assert float(mean.result()) == pytest.approx(1.0)
    mean.reset_states()
    assert float(mean.result()) == 0.0


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_dropout_masks_differ_between_replicas_and_the_first_has_one_devices(way, two):
    with two.scope():
        drop = layers.Dropout(0.5, seed=7)
    drop_alone = layers.Dropout(0.5, seed=7)
    x = jnp.ones(64)

    first, second = way(two, lambda: drop(x, training=True)).values
    again = way(two, lambda: drop(x, training=True)).values[0]

    expected = [np.asarray(drop_alone(x, training=True)) for _ in range(2)]
    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(again, expected[1])
    assert (np.asarray(first) != np.asarray(second)).any()


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_batch_normalization_keeps_the_mean_of_the_replicas_statistics(way, two):
    with two.scope():
        norm = layers.BatchNormalization(momentum=0.5)
        norm.build((None, 2))
    rows = np.arange(8.0, dtype="float32").reshape(4, 2)
    halves = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray(rows[2 * c.replica_id_in_sync_group :][:2])
    )

    outputs = way(two, lambda x: norm(x, training=True), halves)

    own = [rows[:2], rows[2:]]
    for out, half in zip(outputs.values, own, strict=True):
        np.testing.assert_allclose(
            out, (half - half.mean(0)) / np.sqrt(half.var(0) + 1e-3), rtol=1e-4, atol=1e-5
        )
    means = np.mean([h.mean(0) for h in own], axis=0)
    np.testing.assert_allclose(norm.moving_mean, 0.5 * means, rtol=1e-6)
    variances = np.mean([h.var(0) for h in own], axis=0)
    np.testing.assert_allclose(norm.moving_variance, 0.5 + 0.5 * variances, rtol=1e-6)


def test_a_trainable_weight_that_replicas_write_differently_is_refused(two):
    with two.scope():
        weight = keras.Variable(1.0)

    with pytest.raises(DivergenceError, match="different values"):
        eagerly(
            two, lambda: weight.assign(rx.distribute.get_replica_context().replica_id_in_sync_group)
        )


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_control_flow_of_keras_carries_assignments(way, two):
    ops = keras.ops
    with two.scope():
        count = keras.Variable(0.0, trainable=False)

    def bump(value):
        count.assign_add(value)
        return value

    def step(x):
        ops.cond(x > 0, lambda: bump(1.0), lambda: bump(100.0))
        ops.while_loop(lambda i: i < 3, lambda i: (i + bump(1.0),), (x * 0,))
        ops.while_loop(lambda i: i < 9, lambda i: i + bump(1.0), x * 0, maximum_iterations=2)
        ops.fori_loop(0, 2, lambda i, v: v + bump(1.0), x)
        ops.switch(1, [lambda: bump(100.0), lambda: bump(1.0)])
        ops.scan(lambda c, v: (c, bump(v)), 0.0, jnp.ones(2))
        ops.map(bump, jnp.ones(2))
        return count.value

    value = way(two, step, jnp.float32(1.0))

    assert [float(v) for v in value.values] == [13.0, 13.0]
    assert float(count.value) == 13.0


def test_variables_made_outside_of_scopes_are_state_of_a_function():
    layer = layers.Dense(1, kernel_initializer="ones")
    layer.build((None, 2))

    @rx.function
    def step(x):
        layer.bias.assign_add(jnp.ones(1))
        return layer(x)

    first, second = float(step(jnp.ones((1, 2)))[0, 0]), float(step(jnp.ones((1, 2)))[0, 0])
    layer.kernel.assign(jnp.zeros((2, 1)))

    assert (first, second) == (3.0, 4.0)
    assert float(step(jnp.ones((1, 2)))[0, 0]) == 3.0
    assert layer.bias.numpy() == [3.0]
    value, grads = rx.value_and_grad(
        lambda: layer(jnp.ones((1, 2))).sum(), layer.trainable_weights
    )()
    assert float(value) == 3.0
    assert grads[0].tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("scope", [contextlib.nullcontext, None], ids=["outside", "in scope"])
def test_a_tape_watches_keras_variables_by_itself(scope, two):
    with (scope or two.scope)():
        weight = keras.Variable(3.0)
        frozen = keras.Variable(2.0, trainable=False)

    with rx.GradientTape() as tape:
        loss = weight * weight * frozen

    gradients = tape.gradient(loss, [weight, frozen])
    assert float(gradients[0]) == 12.0
    assert gradients[1] is None


@pytest.mark.parametrize("way", [eagerly, compiled])
def test_a_variable_that_its_gradient_overwrites_takes_the_largest(way, two):
    with two.scope():
        weight, amax = keras.Variable(jnp.ones(2)), keras.Variable(jnp.zeros(2))
        amax.overwrite_with_gradient = True
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight, amax])
    values = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray([1.0, 2.0]) * (1 + c.replica_id_in_sync_group)
    )

    way(two, lambda x: optimizer.apply([x, x], [weight, amax]), values)

    assert amax.numpy().tolist() == [2.0, 4.0]
    assert weight.numpy().tolist() == [-2.0, -5.0]


def test_losses_of_layers_belong_to_their_replica_and_leave_no_tracer(two):
    class Activity(layers.Layer):
        def call(self, x):
            self.add_loss(x.sum())
            return x

    with two.scope():
        layer = Activity()
    values = two.experimental_distribute_values_from_function(
        lambda c: jnp.asarray([1.0 + c.replica_id_in_sync_group])
    )

    def step(x):
        layer(x)
        return sum(layer.losses)

    for way in (eagerly, compiled):
        assert [float(v) for v in way(two, step, values).values] == [1.0, 2.0]
    assert layer.losses == []
    rx.function(lambda x: layer(x))(jnp.ones(1))
    assert layer.losses == []


def test_a_model_of_another_scope_is_refused_by_the_optimizer(two):
    model = dense()
    model.build((None, 4))
    with two.scope():
        optimizer = keras.optimizers.SGD()

    with pytest.raises(ScopeError, match=r"was not made in its scope.*strategy\.scope\(\)"):
        two.run(
            lambda: optimizer.apply(
                [jnp.zeros(v.shape) for v in model.trainable_variables], model.trainable_variables
            )
        )


def test_values_lie_on_all_devices_and_arrays_meet_them(two):
    with two.scope():
        model = dense()
        model.build((None, 4))

    assert len(model.weights[0].value.devices()) == 2
    assert model(jnp.ones((3, 4))).shape == (3, 1)
    assert model.get_weights()[0].shape == (4, 6)
    assert "value=" in repr(model.weights[0])
    model.set_weights([np.zeros(w.shape) for w in model.weights])
    rx.debug.check_in_sync(model.weights)
    assert float(model(jnp.ones((3, 4))).sum()) == 0.0


def test_models_are_collected_with_their_functions(two):
    with two.scope():
        model = dense()
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 1)), verbose=0)
    gone = weakref.ref(model)

    del model
    gc.collect()

    assert gone() is None


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_a_copy_of_a_variable_has_a_value_of_its_own(duplicate, two):
    with two.scope():
        weight = keras.Variable(1.0)
        twin = duplicate(weight)

    twin.assign(2.0)

    assert (float(weight.value), float(twin.value)) == (1.0, 2.0)
    assert len(twin.value.devices()) == 2
    assert len(copy.deepcopy(weight).value.devices()) == 2


def test_another_backend_is_refused_where_it_would_not_be_distributed():
    result = run_fresh("""
        import os
        os.environ["KERAS_BACKEND"] = "numpy"
        import keras
        import replicax as rx
        keras.Variable(1.0)
        try:
            with rx.distribute.MirroredStrategy(["CPU:0"]).scope():
                keras.Variable(1.0)
        except RuntimeError as error:
            print("KERAS_BACKEND=jax" in str(error))
        try:
            rx.keras
        except ImportError as error:
            print("KERAS_BACKEND=jax" in str(error))
    """)

    assert result.stdout.split() == ["True", "True"], result.stderr


@pytest.mark.parametrize(
    "imports",
    ["import keras, replicax as rx", "import replicax as rx, keras", "import replicax as rx"],
    ids=["keras first", "replicax first", "rx.keras"],
)
def test_keras_is_joined_in_whichever_order_it_is_imported(imports):
    result = run_fresh(f"""
        import os
        os.environ["REPLICAX_CPU_DEVICES"] = "2"
        if "keras" in {imports!r}:
            os.environ["KERAS_BACKEND"] = "jax"
        {imports}
        with rx.distribute.MirroredStrategy().scope():
            print(len(rx.keras.Variable(1.0).value.devices()))
    """)

    assert result.stdout.split() == ["2"], result.stderr


def test_functions_of_jax_take_a_keras_variable_as_its_value():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        v = keras.Variable(np.array([1.0, 2.0], np.float32))

    def step():
        with rx.GradientTape() as tape:
            loss = jnp.sum(jnp.square(v)) + jnp.dot(v, v)
        v.assign(v * 2.0)
        return tape.gradient(loss, [v])[0] + 0 * jnp.max(v)

    for turn in (1.0, 2.0):  # the second sees what the first assigned
        local = strategy.experimental_local_results(rx.function(strategy.run)(step))
        assert [x.tolist() for x in local] == [[4.0 * turn, 8.0 * turn]] * 2
    assert float(jnp.sum(v)) == 12.0
    assert jax.jit(jnp.tanh)(v).shape == (2,)


def test_a_layer_that_is_frozen_later_is_frozen_in_compiled_steps():
    strategy = mirrored(2)
    with strategy.scope():
        model, optimizer = dense(), keras.optimizers.Adam(0.1)
        model.build((None, 3))

    def replica_step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(model(x)[:, 0] ** 2, global_batch_size=4)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = rx.function(lambda x: strategy.run(replica_step, args=(x,)))

    def moves():
        before = [w.copy() for w in model.get_weights()]
        step(jnp.ones((2, 3)))
        return [bool((a != b).any()) for a, b in zip(before, model.get_weights(), strict=True)]

    assert moves() == [True] * 4
    model.layers[0].trainable = False
    assert moves() == [False, False, True, True]
    model.layers[0].trainable = True
    assert moves() == [True] * 4
    model.layers[1].kernel.trainable = False
    assert moves() == [True, True, False, True]
    assert step.experimental_get_tracing_count() == 3


def test_fit_of_a_model_that_was_frozen_after_compile_is_refused_by_keras():
    with mirrored(2).scope():
        model = dense()
        model.compile("adam", "mse")
    x = np.ones((4, 3), np.float32)
    model.fit(x, x[:, :1], verbose=0)

    model.layers[0].trainable = False

    with pytest.raises(ValueError, match="trainable variables list that the optimizer was built"):
        model.fit(x, x[:, :1], verbose=0)


@pytest.mark.parametrize("how", ["eager", "function", "datasets"])
def test_keras_seed_seeds_replicax(how):
    draw = {
        "eager": lambda: rx.random.normal([3]),
        "function": rx.function(lambda: rx.random.normal([3])),
        "datasets": lambda: np.array(list(rx.data.Dataset.range(20).shuffle(20))),
    }[how]

    def drawn(seed):
        keras.utils.set_random_seed(seed)
        return [np.asarray(draw()).tolist() for _ in range(2)]

    first = drawn(1)

    assert drawn(1) == first
    assert drawn(2) != first
    assert first[0] != first[1]


def test_keras_seed_before_the_import_of_replicax_counts():
    program = """
import keras
keras.utils.set_random_seed(1)
import replicax as rx
first = rx.random.normal([3])
keras.utils.set_random_seed(1)
print(bool((first == rx.random.normal([3])).all()))
"""
    ended = run_fresh(program, KERAS_BACKEND="jax")

    assert ended.stdout.strip() == "True", ended.stderr


class _Normalized(keras.layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.normalization, self.dense = (
            keras.layers.LayerNormalization(),
            keras.layers.Dense(units),
        )

    def build(self, shape):
        self.normalization.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(self.normalization(x))


def test_planned_model_of_layers_in_layers_is_compiled():
    with mirrored(2).scope(), rx.tpu.planning():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, _Normalized(3)(inputs))
        model.compile(keras.optimizers.AdamW(global_clipnorm=1.0), "mse")

    assert model.output_shape == (None, 3)
    with pytest.raises(ValueError, match="made while planning"):
        model.weights[-1].numpy()
