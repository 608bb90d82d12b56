import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

keras = rx.keras
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROWS = rx.TensorSpec([None, 2], "float32")


class Net:
    def __init__(self):
        self.w = rx.Variable(jnp.asarray([[1.0], [2.0]]))
        self.calls = rx.Variable(0, trainable=False)

    @rx.function(input_signature=[ROWS])
    def forward(self, x):
        return x @ self.w

    @rx.function(input_signature=[ROWS])
    def counted(self, x):
        self.calls.assign_add(1)
        return {"sum": x.sum(), "parts": (x, self.calls.read_value())}


@pytest.fixture
def strategy():
    return rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_functions_and_variables_come_back_without_the_code(tmp_path):
    rx.saved_model.save(Net(), tmp_path)
    program = f"""
import numpy as np, replicax as rx
loaded = rx.saved_model.load({str(tmp_path)!r})
for rows in (1, 3):
    assert loaded.forward(np.ones((rows, 2), np.float32)).tolist() == [[3.0]] * rows
result = loaded.counted(np.ones((2, 2), np.float32))
assert float(result["sum"]) == 4.0 and int(result["parts"][1]) == 1
assert sorted(v.name for v in loaded.variables) == ["calls:0", "w:0"]
assert [v.name for v in loaded.trainable_variables] == ["w:0"]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_what_is_saved_in_a_scope_is_loaded_in_another(tmp_path, strategy):
    with strategy.scope():
        net = Net()
    net.w.assign([[3.0], [4.0]])
    rx.saved_model.save(net, tmp_path)

    four = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    with four.scope():
        loaded = rx.saved_model.load(tmp_path)
    batch = four.experimental_distribute_values_from_function(
        lambda c: jnp.full((2, 2), float(c.replica_id_in_sync_group))
    )
    results = four.experimental_local_results(four.run(loaded.forward, args=(batch,)))

    assert [r.tolist() for r in results] == [[[7.0 * i]] * 2 for i in range(4)]


def test_training_continues_with_what_was_loaded(tmp_path, strategy):
    rx.saved_model.save(Net(), tmp_path)
    with strategy.scope():
        loaded = rx.saved_model.load(tmp_path)
    batch = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones((2, 2)))

    @rx.function
    def step(batch):
        def replica(x):
            def loss():
                return (loaded.forward(x) ** 2).mean()

            value, gradients = rx.value_and_grad(loss, loaded.trainable_variables)()
            context = rx.distribute.get_replica_context()
            for v, g in zip(
                loaded.trainable_variables, context.all_reduce("MEAN", gradients), strict=True
            ):
                v.assign_sub(0.1 * g)
            return value

        return strategy.reduce("MEAN", strategy.run(replica, args=(batch,)), axis=None)

    losses = [float(step(batch)) for _ in range(3)]
    assert losses[0] == 9.0
    assert losses == sorted(losses, reverse=True)


def test_a_signature_serves_a_dict(tmp_path):
    net = Net()

    @rx.function(input_signature=[ROWS])
    def serve(x):
        return net.forward(x)

    rx.saved_model.save(net, tmp_path, signatures=serve)
    loaded = rx.saved_model.load(tmp_path)

    served = loaded.signatures["serving_default"](np.ones((1, 2), np.float32))

    assert {k: v.tolist() for k, v in served.items()} == {"output_0": [[3.0]]}


def test_a_keras_model_is_loaded_and_served(tmp_path, strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3, "relu"),
                keras.layers.Dropout(0.5),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(2),
            ]
        )
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    model.fit(x, x[:, :2], verbose=0)
    rx.saved_model.save(model, tmp_path)

    with rx.distribute.OneDeviceStrategy("CPU:0").scope():
        loaded = rx.saved_model.load(tmp_path)

    wanted = model.predict(x, verbose=0)
    np.testing.assert_allclose(loaded(x), wanted, rtol=1e-5)
    np.testing.assert_allclose(
        loaded.signatures["serving_default"](x)["output_0"], wanted, rtol=1e-5
    )


def test_a_model_whose_input_is_not_known_says_what_to_call(tmp_path):
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="Call it once on a batch"):
        rx.saved_model.save(model, tmp_path)


def test_an_object_without_functions_says_what_to_write(tmp_path):
    with pytest.raises(ValueError, match="input_signature"):
        rx.saved_model.save({"v": rx.Variable(0.0)}, tmp_path)
    with pytest.raises(ValueError, match="input_signature"):
        rx.saved_model.save(Net(), tmp_path, signatures=rx.function(lambda x: x))


def test_a_function_that_runs_replicas_is_refused(tmp_path, strategy):
    class Runs:
        @rx.function(input_signature=[ROWS])
        def f(self, x):
            return strategy.reduce("SUM", strategy.run(lambda: x.sum()), axis=None)

    with pytest.raises(rx.errors.TracingError, match="one replica"):
        rx.saved_model.save(Runs(), tmp_path)


def test_a_checkpoint_is_not_a_saved_model(tmp_path):
    path = rx.train.Checkpoint(v=rx.Variable(0.0)).write(f"{tmp_path}/ckpt")
    with pytest.raises(rx.errors.DataLossError, match="without functions"):
        rx.saved_model.load(path)


def test_arguments_that_do_not_fit_are_refused(tmp_path):
    rx.saved_model.save(Net(), tmp_path)
    loaded = rx.saved_model.load(tmp_path)
    with pytest.raises(TypeError, match="takes arguments"):
        loaded.forward(jnp.ones((1, 2)), jnp.ones((1, 2)))
    with pytest.raises(TypeError, match="could not be called"):
        loaded(jnp.ones((1, 2)))


def test_a_program_is_saved_for_cpus_gpus_and_tpus(tmp_path):
    rx.saved_model.save(Net(), tmp_path)
    stored = rx.train.load_checkpoint(tmp_path).get_tensor("functions/forward")
    program = jax.export.deserialize(bytearray(stored.tobytes()))
    assert set(program.platforms) == {"cpu", "cuda", "tpu"}


def test_the_extra_that_the_page_names_brings_what_jax_writes_models_with():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"]["checkpoint"]

    assert "replicax[checkpoint]" in (root / "docs" / "export.md").read_text()
    assert any(requirement.startswith("flatbuffers") for requirement in needed)


class Scale:
    def __init__(self, by):
        self.by = rx.Variable(by)

    @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
    def __call__(self, x):
        return self.by * x

    @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
    def _hidden(self, x):
        return self.by + x


class Shifted(Scale):
    @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
    def __call__(self, x):
        return Scale.__call__.python_function(self, x) + 1


@pytest.mark.parametrize("replicas", [0, 2])
@pytest.mark.parametrize(("kind", "expected"), [(Scale, 6.0), (Shifted, 7.0)])
def test_a_decorated_call_is_saved_and_called(tmp_path, strategy, kind, expected, replicas):
    if replicas:
        with strategy.scope():
            saved = kind(2.0)
    else:
        saved = kind(2.0)
    rx.saved_model.save(saved, tmp_path)
    loaded = rx.saved_model.load(tmp_path)
    x = jnp.full(2, 3.0)
    assert loaded(x).tolist() == saved(x).tolist() == [expected] * 2
    assert loaded._hidden(x).tolist() == [5.0] * 2
    assert loaded.signatures["serving_default"](x)["output_0"].tolist() == [expected] * 2


def test_an_object_without_a_call_is_not_called(tmp_path):
    rx.saved_model.save(Net(), tmp_path)
    with pytest.raises(TypeError, match="could not be called; it has counted, forward"):
        rx.saved_model.load(tmp_path)(jnp.ones((1, 2)))


def test_the_only_function_serves(tmp_path):
    class One:
        @rx.function(input_signature=[ROWS])
        def at(self, x):
            return x * 2

    rx.saved_model.save(One(), tmp_path)
    served = rx.saved_model.load(tmp_path).signatures["serving_default"](jnp.ones((1, 2)))
    assert served["output_0"].tolist() == [[2.0, 2.0]]


OUTSIDE = rx.Variable(5.0)
SCALAR = rx.TensorSpec([], "float32")


class Captured:
    """Has an attribute whose path is one that variables of no object get."""

    def __init__(self):
        self.captured = {"1": rx.Variable(2.0)}

    @rx.function(input_signature=[SCALAR])
    def __call__(self, x):
        return x * self.captured["1"] + OUTSIDE


def test_variables_without_a_name_do_not_take_another_ones(tmp_path):
    rx.saved_model.save(Captured(), tmp_path)
    assert float(rx.saved_model.load(tmp_path)(3.0)) == 11.0


class WithSlots:
    __slots__ = ("double", "w")

    def __init__(self):
        self.w = rx.Variable(2.0)
        self.double = rx.function(lambda x: x * self.w, input_signature=[SCALAR])


def test_functions_in_slots_are_saved(tmp_path):
    rx.saved_model.save(WithSlots(), tmp_path)
    assert float(rx.saved_model.load(tmp_path).double(3.0)) == 6.0
