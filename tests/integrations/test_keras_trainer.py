"""fit, evaluate and predict of models made in a scope: what stock Keras gives on one device."""

import functools
import itertools

import jax
import numpy as np
import pytest

import replicax as rx
from replicax._src.base.errors import ScopeError
from replicax._src.values import sharded
from tests.integrations.keras_loops import initializers, weights
from tests.replicas import mirrored
from tests.tpu.nets import slice_of

# Datasets that end warn.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:`shuffle=True` was passed"),
]

keras = rx.keras
layers = keras.layers

TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}  # float32 sums in another order
ROWS, BATCH = 37, 8  # four full batches of 2 rows for each of 4 replicas, and 5 rows
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
WEIGHTS = RNG.uniform(0.5, 2.0, size=ROWS).astype("float32")


def net(*between, names=(None, None)):
    a, b = itertools.islice(initializers(), 2)
    hidden = layers.Dense(5, "tanh", kernel_initializer=a, kernel_regularizer="l2", name=names[0])
    out = layers.Dense(1, "sigmoid", kernel_initializer=b, name=names[1])
    return keras.Sequential([keras.Input((4,)), hidden, *between, out])


def compiled_net(between=lambda: (), names=(None, None), **options):
    model = net(*between(), names=names)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, "binary_crossentropy", **{"metrics": ["accuracy"], **options})
    return model


@functools.cache
def stock_fit(epochs=1, **options):
    """What stock Keras makes of the rows in their order; computed once for all tests."""
    model = compiled_net()
    history = model.fit(**ARRAYS, epochs=epochs, verbose=0, **options)
    return model, history


def in_scope(strategy, make, *args, **kwargs):
    with strategy.scope():
        return make(*args, **kwargs)


def assert_same(model, history, expected_model, expected_history):
    """Weights and history as stock Keras has them."""
    for a, b in zip(weights(model), weights(expected_model), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    got = {k.rstrip("_0123456789"): v for k, v in history.history.items()}
    expected = {k.rstrip("_0123456789"): v for k, v in expected_history.history.items()}
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(got[name], values, **TOLERANCE, err_msg=name)


def generator():
    for at in range(0, ROWS, BATCH):
        yield X[at : at + BATCH], Y[at : at + BATCH]


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, i):
        return X[i * BATCH :][:BATCH], Y[i * BATCH :][:BATCH]


def dataset():
    return rx.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


ARRAYS = {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False}


def test_fit_with_sharded_variables_gives_one_devices_numbers(monkeypatch):
    monkeypatch.setattr(sharded, "SMALL_BYTES", 0)
    model = in_scope(mirrored(2, variable_policy="sharded"), compiled_net)

    assert_same(model, model.fit(**ARRAYS, verbose=0), *stock_fit())

    stock, _ = stock_fit()
    np.testing.assert_allclose(
        model.predict(X, BATCH, verbose=0), stock.predict(X, verbose=0), **TOLERANCE
    )


def test_fit_with_validation_gives_one_devices_numbers_also_outside_of_the_scope(four):
    make = functools.partial(
        compiled_net,
        lambda: (layers.BatchNormalization(momentum=0.5), layers.Dropout(0.3, seed=3)),
    )
    options = {**ARRAYS, "shuffle": True, "epochs": 2, "validation_data": (X, Y), "verbose": 0}
    stock, model = make(), in_scope(four, make)

    keras.utils.set_random_seed(1)
    expected = stock.fit(**options)
    keras.utils.set_random_seed(1)
    history = model.fit(**options)

    assert_same(model, history, stock, expected)
    assert all(len(v.value.devices()) == 4 for v in model.variables)
    last = [expected.history[f"val_{name}"][-1] for name in ("loss", "accuracy")]
    np.testing.assert_allclose(model.evaluate(X, Y, BATCH, verbose=0), last, **TOLERANCE)
    np.testing.assert_allclose(
        model.predict(X, BATCH, verbose=0), stock.predict(X, verbose=0), **TOLERANCE
    )
    rx.debug.check_in_sync(model.variables)


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"sample_weight": WEIGHTS}, {"weighted_metrics": ["accuracy"], "metrics": ["mse"]}),
        ({"class_weight": {0: 1.0, 1: 3.0}}, {"steps_per_execution": 3}),
        ({"epochs": 2, "steps_per_epoch": 2}, {}),
        pytest.param({}, {"run_eagerly": True}, marks=pytest.mark.slow),
        pytest.param({}, {"jit_compile": False}, marks=pytest.mark.slow),
    ],
    ids=["sample_weight", "class_weight, steps_per_execution", "steps", "eager", "not jitted"],
)
def test_options_of_fit_and_compile_mean_what_they_do_on_one_device(options, settings, two):
    make = functools.partial(compiled_net, **settings)
    stock, model = make(), in_scope(two, make)

    expected = stock.fit(**ARRAYS, **options, verbose=0)
    history = model.fit(**ARRAYS, **options, verbose=0)

    assert_same(model, history, stock, expected)


@pytest.mark.parametrize(
    "source", [dataset, generator, lambda: Numbered()], ids=["rx.data", "generator", "PyDataset"]
)
def test_every_source_gives_the_same_steps(source, two):
    model = in_scope(two, compiled_net)

    history = model.fit(source(), shuffle=False, verbose=0)

    assert_same(model, history, *stock_fit())


def test_datasets_are_validated_evaluated_and_predicted_from(two):
    stock, model = compiled_net(), in_scope(two, compiled_net)
    spread = two.experimental_distribute_dataset(dataset())
    inputs = rx.data.Dataset.from_tensor_slices(X).batch(BATCH)

    expected = stock.fit(**ARRAYS, epochs=2, validation_data=(X, Y), verbose=0)
    history = model.fit(spread, epochs=2, validation_data=dataset(), verbose=0)

    assert_same(model, history, stock, expected)
    assert model.evaluate(spread, verbose=0) == model.evaluate(dataset(), verbose=0)
    np.testing.assert_allclose(
        model.predict(inputs, verbose=0), stock.predict(X, verbose=0), **TOLERANCE
    )
    weighted, plain = in_scope(two, compiled_net), compiled_net()
    more = {"class_weight": {0: 1.0, 1: 3.0}, "verbose": 0}
    assert_same(weighted, weighted.fit(dataset(), **more), plain, plain.fit(**ARRAYS, **more))


def test_a_dataset_without_end_needs_the_number_of_steps(two):
    model = in_scope(two, compiled_net)

    with pytest.raises(ValueError, match="steps_per_epoch="):
        model.fit(dataset().repeat(), verbose=0)
    with pytest.raises(ValueError, match="`y` was given together with a dataset"):
        model.fit(dataset(), Y, verbose=0)
    model.fit(dataset().repeat(), steps_per_epoch=3, verbose=0)
    assert int(model.optimizer.iterations) == 3


def test_single_batches_are_trained_tested_and_predicted(two):
    stock, model = compiled_net(), in_scope(two, compiled_net)

    for rows in (8, 5):
        for call in (
            lambda m, n: m.train_on_batch(X[:n], Y[:n]),
            lambda m, n: m.test_on_batch(X[:n], Y[:n], WEIGHTS[:n]),
            lambda m, n: m.predict_on_batch(X[:n]),
        ):
            np.testing.assert_allclose(call(model, rows), call(stock, rows), **TOLERANCE)


def test_callbacks_see_live_weights_and_do_their_work(two, tmp_path):
    seen = []

    def after_batch(batch, logs):
        seen.append(float(np.abs(model.weights[0].numpy()).sum()))

    def callbacks(directory):
        return [
            keras.callbacks.ModelCheckpoint(
                directory / "{epoch:02d}.weights.h5", save_weights_only=True
            ),
            keras.callbacks.EarlyStopping(
                "loss", patience=1, min_delta=10.0, restore_best_weights=True
            ),
            keras.callbacks.LearningRateScheduler(lambda epoch, lr: lr * 0.5),
            keras.callbacks.BackupAndRestore(directory / "backup"),
            keras.callbacks.CSVLogger(directory / "log.csv"),
        ]

    stock, model = compiled_net(), in_scope(two, compiled_net)
    (tmp_path / "stock").mkdir()
    expected = stock.fit(**ARRAYS, epochs=4, verbose=0, callbacks=callbacks(tmp_path / "stock"))
    history = model.fit(
        **ARRAYS,
        epochs=4,
        verbose=0,
        callbacks=[
            *callbacks(tmp_path),
            keras.callbacks.LambdaCallback(on_train_batch_end=after_batch),
        ],
    )

    assert_same(model, history, stock, expected)
    assert len(set(seen)) == len(seen) > 1
    assert {p.name for p in tmp_path.iterdir()} >= {"01.weights.h5", "02.weights.h5", "log.csv"}


def test_a_saved_model_is_loaded_inside_outside_and_under_another_strategy(two, four, tmp_path):
    one_batch = {**ARRAYS, "x": X[:8], "y": Y[:8]}
    path = tmp_path / "model.keras"
    between = lambda: (layers.BatchNormalization(synchronized=True),)  # noqa: E731
    model = in_scope(two, compiled_net, between)
    model.fit(**one_batch, verbose=0)
    model.save(path)

    loaded = [keras.models.load_model(path), in_scope(two, keras.models.load_model, path)]
    loaded.append(in_scope(four, keras.models.load_model, path))
    expected = model.fit(**one_batch, verbose=0)

    for other, count in zip(loaded, (1, 2, 4), strict=True):
        assert len(other.weights[0].value.devices()) == count
        assert_same(other, other.fit(**one_batch, verbose=0), model, expected)
    fresh = in_scope(four, net, *between())
    model.save_weights(tmp_path / "model.weights.h5")
    fresh.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_allclose(
        fresh.predict(X, verbose=0), model.predict(X, verbose=0), **TOLERANCE
    )
    fresh.summary(print_fn=lambda line: None)


class Doubled(keras.Model):
    """A model with a train_step of its own, and a loss that is added."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def call(self, x, training=False):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return self.net(x)

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "double": 2 * logs["loss"]}, state


def test_a_user_defined_train_step_sees_the_whole_batch(two):
    def make():
        model = Doubled()
        model.compile("sgd", "mse")
        return model

    stock, model = make(), in_scope(two, make)

    assert_same(model, model.fit(**ARRAYS, verbose=0), stock, stock.fit(**ARRAYS, verbose=0))


class Taped(keras.Model):
    """Steps as they are written for TensorFlow: of the data alone, with a tape."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with rx.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(x, y, predictions, weight)
        self._loss_tracker.update_state(loss, sample_weight=x.shape[0])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, predictions, weight)

    def test_step(self, data, factor=2):
        logs = super().test_step(data)
        return {**logs, "double": factor * logs["loss"]}

    def predict_step(self, data):
        return 2 * super().predict_step(data)


@pytest.mark.filterwarnings("ignore:Model .* was made outside of every scope")
@pytest.mark.parametrize("is_scoped", [False, True])
@pytest.mark.parametrize("eagerly", [False, True])
def test_steps_of_the_data_alone_as_in_tensorflow_are_those_of_keras(two, eagerly, is_scoped):
    def make():
        inner = net()
        model = Taped(inner.inputs, inner.outputs)
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        options = {"metrics": ["accuracy"], "run_eagerly": eagerly}
        model.compile(optimizer, "binary_crossentropy", **options)
        return model

    stock, expected = stock_fit()
    model = in_scope(two, make) if is_scoped else make()

    assert_same(model, model.fit(**ARRAYS, verbose=0), stock, expected)
    loss, accuracy = stock.evaluate(X, Y, batch_size=BATCH, verbose=0)
    found = model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
    wanted = {"loss": loss, "accuracy": accuracy, "double": 2 * loss}
    assert found == pytest.approx(wanted, rel=1e-5)
    expected = 2 * stock.predict(X, verbose=0)
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, **TOLERANCE)


class Tracked(keras.Model):
    """A model whose `metrics` names a tracker that its `compile` makes last, as keras.io's GANs."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def call(self, x, training=False):
        return self.net(x)

    def compile(self, **options):
        super().compile(**options)
        self.tracker = keras.metrics.Mean(name="tracked")

    @property
    def metrics(self):
        return [*super().metrics, self.tracker]

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.tracker.update_state(loss)
        return loss


def test_compile_may_make_the_metrics_that_a_model_names(two):
    def make():
        model = Tracked()
        model.compile(optimizer="sgd", loss="mse")
        return model

    stock, model = make(), in_scope(two, make)
    expected = stock.fit(**ARRAYS, verbose=0)

    assert "tracked" in expected.history
    assert_same(model, model.fit(**ARRAYS, verbose=0), stock, expected)


class Watched(keras.Model):
    """A model that records the names of its properties that are read."""

    reads: set[str]

    def __init__(self):
        super().__init__()
        self.reads = set()
        self.net = net()

    def call(self, x, training=False):
        return self.net(x)


def watch(name, original):
    def read(self):
        if "reads" in vars(self):
            self.reads.add(name)
        return original.fget(self)

    return property(read, original.fset)


for base in reversed(keras.Model.__mro__):
    for name, attribute in vars(base).items():
        if isinstance(attribute, property):
            setattr(Watched, name, watch(name, attribute))


def test_a_scope_reads_no_property_of_a_model_that_keras_does_not(two):
    """A user's property may name parts that exist only when Keras reads it."""

    def reads():
        model = Watched()
        calls = {
            "compile": lambda: model.compile("sgd", "mse", metrics=["mae"]),
            "predict": lambda: model.predict(X, verbose=0),
            "fit": lambda: model.fit(**ARRAYS, verbose=0),
            "predict_on_batch": lambda: model.predict_on_batch(X),
        }
        for name, call in calls.items():
            model.reads.clear()
            call()
            yield name, set(model.reads)

    expected, found = dict(reads()), in_scope(two, lambda: dict(reads()))

    assert {name: more for name in found if (more := found[name] - expected[name])} == {}


class LateMetrics(Tracked):
    """A model whose `metrics` names a tracker that `build` makes."""

    def build(self, shape):
        self.tracker = keras.metrics.Mean(name="tracked")

    def compile(self, **options):
        keras.Model.compile(self, **options)


def test_build_may_make_the_metrics_that_a_model_names(two):
    def trained():
        model = LateMetrics()
        model.compile(optimizer="sgd", loss="mse")
        return model, model.fit(**ARRAYS, verbose=0)

    model, history = in_scope(two, trained)

    assert "tracked" in history.history
    assert_same(model, history, *trained())


@pytest.mark.parametrize("name", ["Adam", "ScheduleFreeAdamW"])
def test_averages_that_overwrite_the_weights_are_those_of_keras(name, two):
    def make():
        model = net()
        kind = getattr(keras.optimizers, name)
        model.compile(kind(0.01, use_ema=True, ema_overwrite_frequency=3), "mse")
        return model

    stock, model = make(), in_scope(two, make)
    expected = stock.fit(**ARRAYS, verbose=0)

    assert_same(model, model.fit(**ARRAYS, verbose=0), stock, expected)


class PairSteps:
    """A step as TensorFlow's, which calls the model on parts of the data, never on the data."""

    def train_step(self, data):
        (pairs,) = data
        with rx.GradientTape() as tape:
            loss = distance(*(self(pairs[i], training=True) for i in (0, 1)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"distance": loss}


class Pairs(PairSteps, keras.Model):
    """With inputs and outputs."""


class UnbuiltPairs(PairSteps, keras.Model):
    """With layers that the first call builds."""

    def __init__(self):
        super().__init__()
        self.parts = [layer.from_config(layer.get_config()) for layer in net().layers]

    def call(self, x, training=False):
        for layer in self.parts:
            x = layer(x)
        return x


def distance(a, b):
    return keras.ops.mean((a - b + 1) ** 2)


class PairBatches(keras.utils.PyDataset):
    """Three batches, each of two arrays in one."""

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.stack([X[i : i + 4], 2 * X[i + 4 : i + 8]])


@pytest.mark.parametrize("is_built", [True, False])
def test_a_step_of_the_data_alone_may_call_the_model_on_something_else(is_built, two):
    def make():
        inner = net()
        model = Pairs(inner.inputs, inner.outputs) if is_built else UnbuiltPairs()
        model.compile(keras.optimizers.SGD(0.5))
        return model

    model = in_scope(two, make)
    history = model.fit(PairBatches(), shuffle=False, verbose=0).history

    stock = net()
    weights = [v.value for v in stock.trainable_variables]

    def loss_of(weights, pairs):
        return distance(*(stock.stateless_call(weights, [], pairs[i])[0] for i in (0, 1)))

    for pairs in map(PairBatches().__getitem__, range(3)):
        loss, gradients = jax.value_and_grad(loss_of)(weights, pairs)
        weights = [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]
    np.testing.assert_allclose(history["distance"], [loss], **TOLERANCE)
    for found, expected in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(found.value, expected, **TOLERANCE)


class Adversaries(keras.Model):
    """Two networks with an optimizer each, and no `call`: only the step knows what is called."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([layers.Dense(4, kernel_initializer="identity")])
        self.critic = keras.Sequential([layers.Dense(1, kernel_initializer="ones")])
        self.seeds = keras.random.SeedGenerator(3)
        self.error = keras.metrics.Mean(name="error")

    @property
    def metrics(self):
        return [self.error]

    def compile(self, **optimizers):
        super().compile()
        self.optimizers = optimizers

    def train_step(self, rows):
        noise = keras.random.normal(rows.shape, seed=self.seeds)
        for name, sign in (("critic", 1), ("generator", -1)):
            with rx.GradientTape() as tape:
                made = keras.ops.mean(self.critic(self.generator(noise)) ** 2)
                error = sign * (made - keras.ops.mean(self.critic(rows)))
            weights = getattr(self, name).trainable_variables
            self.optimizers[name].apply(tape.gradient(error, weights), weights)
            self.error.update_state(error)
        return {"error": self.error.result()}


def test_a_model_that_only_its_step_can_call_is_built_by_it(two, four):
    def trained(strategy):
        with strategy.scope():
            model = Adversaries()
            model.compile(critic=keras.optimizers.Adam(), generator=keras.optimizers.SGD())
        return model, model.fit(X, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)

    one = rx.distribute.OneDeviceStrategy("CPU:0")

    assert_same(*trained(two), *trained(one))
    assert_same(*trained(four), *trained(one))


def images():
    return rx.data.Dataset.from_tensor_slices(X).batch(BATCH)


class Sums(keras.Model):
    """A step that takes rows, without targets."""

    def train_step(self, rows):
        return {"sum": keras.ops.sum(rows[:2])}


def test_a_dataset_of_inputs_gives_a_step_the_inputs_alone(two):
    """As tf.data does: there is no tuple around them."""
    model = in_scope(two, Sums)
    in_scope(two, model.compile)

    for data in (images(), two.experimental_distribute_dataset(images())):
        history = model.fit(data, verbose=0).history
        np.testing.assert_allclose(history["sum"], [X[32:34].sum()], **TOLERANCE)


def test_callbacks_save_a_model_that_only_its_step_can_call(two, tmp_path):
    def make():
        model = Adversaries()
        model.compile(critic=keras.optimizers.Adam(), generator=keras.optimizers.SGD())
        return model

    def fit(model, epochs):
        return model.fit(
            images(),
            epochs=epochs,
            verbose=0,
            callbacks=[
                keras.callbacks.ModelCheckpoint(
                    tmp_path / "{epoch}.weights.h5", save_weights_only=True
                ),
                keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False),
            ],
        )

    once, again = in_scope(two, make), in_scope(two, make)
    fit(once, 2)
    saved = weights(once)
    fit(again, 3)  # goes on after the second epoch
    other = in_scope(two, make)
    other.fit(images().take(1), verbose=0)
    other.load_weights(tmp_path / "2.weights.h5")

    for a, b in zip(weights(other), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(again.optimizers["critic"].iterations) == 3 * 5


class UnseededNoise(keras.Model):
    """A step that draws without a seed, as TensorFlow's may."""

    def train_step(self, rows):
        return {"noise": keras.random.normal(()), "rate": keras.random.uniform(())}


def test_unseeded_draws_of_a_step_differ_between_steps_and_are_those_of_one_device(two, four):
    def drawn(strategy):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = UnseededNoise()
            model.compile()
        seen = []
        after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: seen.append(logs))
        model.fit(X, batch_size=BATCH, verbose=0, callbacks=[after])
        return [(logs["noise"], logs["rate"]) for logs in seen]

    expected = drawn(rx.distribute.OneDeviceStrategy("CPU:0"))

    assert len(set(expected)) == len(expected) == 5
    np.testing.assert_array_equal(drawn(two), expected)
    np.testing.assert_array_equal(drawn(four), expected)


def test_parts_from_another_scope_are_refused_with_advice(two, four):
    with two.scope():
        model = net()
        optimizer, metric = keras.optimizers.SGD(), keras.metrics.MeanSquaredError()
    outside = net()

    other = in_scope(four, net)
    with pytest.raises(ScopeError, match=r"The optimizer .* in another scope than the model"):
        other.compile(optimizer, "mse")
    with pytest.raises(ScopeError, match=r"The metric .* in another scope than the model"):
        other.compile("sgd", "mse", metrics=[metric])
    with (
        four.scope(),
        pytest.raises(ScopeError, match=r"was made in that of another, .*2 replicas"),
    ):
        model.compile("sgd", "mse")
    with four.scope(), pytest.raises(ScopeError, match="made outside of every scope"):
        outside.compile("sgd", "mse")
    with two.scope():
        mixed = keras.Sequential([outside])
        with pytest.raises(ScopeError, match=r"Variable .* in another scope"):
            mixed.compile("sgd", "mse")


@pytest.mark.parametrize("is_outside", [True, False], ids=["outside", "of another strategy"])
def test_a_metric_from_elsewhere_is_not_updated_by_replicas(is_outside, two):
    metric = keras.metrics.Sum() if is_outside else in_scope(mirrored(2), keras.metrics.Sum)
    count = rx.function(lambda: two.run(lambda: metric.update_state([1.0])))

    words = "made outside of its scope" if is_outside else "cannot be read in a scope or run of"
    with pytest.raises(ScopeError, match=words):
        count()
    assert metric.result() == 0


def test_a_metric_begins_with_its_initial_value_for_all_replicas_together(two):
    with two.scope():
        metric = keras.metrics.Metric()
        weight = metric.add_weight(initializer="ones", dtype="int32")
    assert weight.numpy() == 1

    two.run(lambda: weight.assign_add(1))

    assert weight.numpy() == 3


def test_an_optimizer_from_outside_steps_once_for_all_replicas(two):
    steps = []
    for home in (two, rx.distribute.get_strategy()):
        model, optimizer = in_scope(two, net), in_scope(home, keras.optimizers.SGD, 0.5, 0.9)
        model.optimizer = optimizer
        train_by_hand(two, model, dataset().take(2))
        steps.append(weights(model))

    np.testing.assert_equal(*steps)
    assert int(optimizer.iterations) == 2


def test_a_keras_distribution_inside_of_a_scope_has_to_be_of_its_devices(two):
    parallel = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(2)])
    more = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(4)])
    layouts = keras.distribution.LayoutMap(parallel.device_mesh)
    layouts[".*kernel"] = ("batch", None)
    over_replicas = keras.distribution.ModelParallel(layout_map=layouts)

    with more.scope(), two.scope(), pytest.raises(ScopeError, match="two would decide"):
        net()
    with over_replicas.scope(), two.scope(), pytest.raises(ScopeError, match="of the replicas"):
        net()
    with parallel.scope(), two.scope():
        model = compiled_net()
        assert_same(model, model.fit(**ARRAYS, verbose=0), *stock_fit())
    assert model.weights[0].value.sharding == two.topology.mirrored


def test_a_keras_distribution_outside_of_scopes_does_what_it_does_alone():
    parallel = keras.distribution.DataParallel(devices=[f"cpu:{i}" for i in range(2)])
    with parallel.scope():
        model = compiled_net()
        history = model.fit(X[:32], Y[:32], BATCH, shuffle=False, verbose=0)
    stock = compiled_net()
    expected = stock.fit(X[:32], Y[:32], BATCH, shuffle=False, verbose=0)

    assert_same(model, history, stock, expected)
    assert len(model.weights[0].value.devices()) == 2


def test_models_that_replicax_has_seen_outside_of_scopes_still_fit():
    stock, model = compiled_net(), compiled_net()
    rx.function(lambda x: model(x))(X)  # its variables are state of the function from here on

    assert_same(
        model,
        model.fit(**ARRAYS, epochs=2, verbose=0),
        stock,
        stock.fit(**ARRAYS, epochs=2, verbose=0),
    )
    assert model.predict(X, verbose=0).shape == (ROWS, 1)


def test_a_simulated_tpu_trains_with_weights_cut_over_logical_devices():
    strategy = slice_of(cores=2, replicas=2)
    model = in_scope(strategy, compiled_net)
    strategy.experimental_split_to_logical_devices(model.weights[0], [2, 1])

    assert_same(model, model.fit(**ARRAYS, verbose=0), *stock_fit())
    assert len(model.weights[-1].value.devices()) == 4
    assert part(model.weights[0]) == (2, 5)
    assert part(momentum_of(model.weights[0], model)) == (2, 5)
    assert part(momentum_of(model.weights[1], model)) == (5,)


def our_layouts(strategy):
    return rx.tpu.LayoutMap({"hidden/kernel$": [2, 1], "out/kernel$": [1, 1]})


def keras_layouts(strategy):
    devices = [f"cpu:{d.id}" for d in strategy.mesh.devices.flat]
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*hidden/kernel"] = ("model", None)
    layouts[".*hidden/output"] = ("batch", None)
    return keras.distribution.ModelParallel(layout_map=layouts)


@pytest.mark.parametrize(
    ("layouts", "loop"),
    [
        (our_layouts, "fit"),
        (our_layouts, "custom"),
        (keras_layouts, "fit"),
        (keras_layouts, "custom"),
    ],
)
def test_a_layout_map_cuts_weights_by_their_paths_and_slots_like_their_weights(layouts, loop):
    strategy = slice_of(cores=2, replicas=2)
    layouts = layouts(strategy)
    with strategy.scope(), layouts.scope():
        model = compiled_net(names=("hidden", "out"))
    assert [part(w) for w in model.weights] == [(2, 5), (5,), (5, 1), (1,)]

    rows, stock = {**ARRAYS, "x": X[:16], "y": Y[:16]}, compiled_net()
    stock.fit(**rows, verbose=0)
    with layouts.scope():
        if loop == "fit":
            model.fit(**rows, verbose=0)
        else:
            train_by_hand(strategy, model, dataset().take(2))

    for a, b in zip(weights(model), weights(stock), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    for weight in model.weights:
        assert part(weight) == part(momentum_of(weight, model))
    assert part(model.weights[0]) == (2, 5)


def train_by_hand(strategy, model, data):
    """One epoch of what `fit` does, in a replica function."""
    by_row = keras.losses.BinaryCrossentropy(reduction="none")

    def step(x, y):
        with rx.GradientTape() as tape:
            losses = by_row(y, model(x, training=True))
            loss = rx.nn.compute_average_loss(losses, global_batch_size=BATCH)
            loss += rx.nn.scale_regularization_loss(sum(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    compiled = rx.function(lambda batch: strategy.run(step, args=batch))
    for batch in strategy.experimental_distribute_dataset(data):
        compiled(batch)


def part(variable):
    """The shape of what one device holds."""
    return variable.value.addressable_shards[0].data.shape


def momentum_of(weight, model):
    wanted = f"{weight.path.replace('/', '_')}_momentum"
    [slot] = [v for v in model.optimizer.variables if v.name == wanted]
    return slot


def test_one_replica_fits_as_stock_keras_does():
    model = in_scope(mirrored(1), compiled_net)

    assert_same(model, model.fit(**ARRAYS, verbose=0), *stock_fit())


class Counting(layers.Layer):
    """A layer written for TensorFlow: it counts its calls, and draws a number for each row."""

    def __init__(self):
        super().__init__()
        self.calls = rx.Variable(0, trainable=False)

    def call(self, x):
        self.calls.assign_add(1)
        rows = np.int32(x.shape[0])  # fails for a size that is only a name
        return x + 0.0 * rx.random.normal([rows, 4])


@pytest.mark.filterwarnings("ignore:Model .* was made outside of every scope")
@pytest.mark.parametrize("is_scoped", [False, True])
@pytest.mark.parametrize("eagerly", [False, True])
def test_layers_write_variables_and_draw_numbers_in_functional_models(eagerly, is_scoped):
    def make():
        hidden, out = net().layers
        given = keras.Input((4,))
        counting = Counting()
        model = keras.Model(given, out(hidden(counting(given))))
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
        options = {"metrics": ["accuracy"], "run_eagerly": eagerly}
        model.compile(optimizer, "binary_crossentropy", **options)
        return model, counting

    model, counting = in_scope(mirrored(1), make) if is_scoped else make()
    assert model.output_shape == (None, 1)
    assert int(counting.calls.read_value()) == 0

    history = model.fit(**ARRAYS, verbose=0)
    assert int(counting.calls.read_value()) == len(range(0, ROWS, BATCH))
    assert_same(model, history, *stock_fit())
    model.evaluate(X, Y, batch_size=ROWS, verbose=0)
    model.predict(X, batch_size=ROWS, verbose=0)
    assert int(counting.calls.read_value()) == len(range(0, ROWS, BATCH)) + 2


def test_an_error_of_a_layer_is_the_one_for_names_of_sizes():
    class Refusing(layers.Layer):
        def call(self, x):
            raise ValueError(f"refused {type(x.shape[0]).__name__}")

    with pytest.raises(ValueError, match="refused _DimExpr"):
        Refusing()(keras.Input((4,)))


def test_a_layer_may_compile_its_call():
    class Doubling(layers.Layer):
        @rx.function
        def call(self, x):
            return 2 * x

    np.testing.assert_array_equal(Doubling()(X), 2 * X)


class Older(keras.Model):
    """A step that is written for Keras 2."""

    def train_step(self, data):
        x, y = data
        with rx.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.compiled_loss(y, predictions, regularization_losses=self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.compiled_metrics.update_state(y, predictions)
        return {metric.name: metric.result() for metric in self.metrics}


def test_steps_of_keras_2_use_the_compiled_loss_and_metrics():
    inner, stock = net(), compiled_net()
    model = Older(inner.inputs, inner.outputs)
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    model.compile(optimizer, "binary_crossentropy", metrics=["mse"])

    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    stock.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for a, b in zip(weights(model), weights(stock), strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
