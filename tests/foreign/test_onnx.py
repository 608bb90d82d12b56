"""`model.export` of models of a strategy: ONNX Runtime and TensorFlow compute what Keras does."""

import numpy as np
import pytest

import replicax as rx

pytest.importorskip("jax2onnx")
onnxruntime = pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.foreign

X = np.random.default_rng(0).normal(size=(6, 8)).astype("float32")


@pytest.fixture(params=[1, 2])
def strategy(request):
    return rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(request.param)])


@pytest.fixture
def model(strategy):
    keras = rx.keras
    layers = [keras.layers.Dense(16, "relu"), keras.layers.BatchNormalization()]
    with strategy.scope():
        made = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(3)])
        made.compile("adam", "mse")
    made.fit(X, np.ones((6, 3), "float32"), batch_size=6, verbose=0)
    return made


def run(path):
    session = onnxruntime.InferenceSession(path)
    return session.run(None, {session.get_inputs()[0].name: X})[0]


def test_export_to_onnx_has_the_trained_values(tmp_path, model, strategy):
    outside, inside = str(tmp_path / "outside.onnx"), str(tmp_path / "inside.onnx")
    model.export(outside, format="onnx", verbose=False)
    with strategy.scope():
        model.export(inside, format="onnx", verbose=False)

    expected = model.predict(X, verbose=0)
    for path in (outside, inside):
        np.testing.assert_allclose(run(path), expected, atol=1e-5)


def test_training_continues_after_an_export(tmp_path, model):
    path = str(tmp_path / "model.onnx")
    model.export(path, format="onnx", verbose=False)
    exported = model.predict(X, verbose=0)
    model.fit(X, np.ones((6, 3), "float32"), batch_size=6, epochs=3, verbose=0)

    np.testing.assert_allclose(run(path), exported, atol=1e-5)
    assert np.abs(model.predict(X, verbose=0) - exported).max() > 1e-3


# Keras passes an option to jax2tf that newer versions of JAX warn of.
@pytest.mark.filterwarnings("ignore:The `.*` parameter is deprecated:DeprecationWarning")
def test_export_to_a_saved_model_has_the_trained_values(tmp_path, model):
    tf = pytest.importorskip("tensorflow")
    model.export(str(tmp_path), verbose=False)

    loaded = tf.saved_model.load(str(tmp_path))  # owns the variables of `serve`
    served = loaded.serve(X)
    np.testing.assert_allclose(served.numpy(), model.predict(X, verbose=0), atol=1e-5)
