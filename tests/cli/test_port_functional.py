"""`replicax port` chooses functions that take the symbolic tensors of Keras's functional models."""

import keras
import numpy as np
import pytest

from replicax._src.port.rewrite import port

HEAD = "import tensorflow as tf\nfrom tensorflow.keras import layers\n"
PROGRAM = (
    HEAD
    + """
def mish(x):
    return x * tf.tanh(tf.nn.softplus(x))

class Builder:
    def pool(self, t, k=2):
        t = layers.AveragePooling2D(k)(t)
        return tf.add(t, tf.square(t), name="sum")

    def build(self):
        i = layers.Input(shape=(4, 4, 3))
        x = tf.concat([tf.identity(i), mish(i)], -1)
        a, c = tf.split(x, 2, axis=-1)
        x = self.pool(a - c)
        b, n = tf.shape(x)[0], tf.shape(x)[1] * 2
        token = tf.ones([b, 1, 3])
        x = tf.reshape(x, [b, -1, x.shape[-1]])
        x = tf.concat([x, token], axis=1)[:, 1:, :]
        x = tf.pad(x, [[0, 0], [1, 0], [0, 0]])
        x = tf.image.resize(tf.expand_dims(x, -1), (2, 2), method="nearest")
        x = tf.cast(tf.reshape(x, (-1, n)), tf.float32)
        return tf.keras.Model(i, tf.reduce_mean(x, axis=[1], keepdims=True))

model = Builder().build()
"""
)


def by_hand(x):
    mish = x * np.tanh(np.log1p(np.exp(x)))
    pooled = (x - mish).reshape(-1, 2, 2, 2, 2, 3).mean((2, 4))
    rows = (pooled + pooled**2).reshape(-1, 4, 3)
    rows = np.concatenate([rows, np.ones_like(rows[:, :1])], 1)[:, 1:]
    rows = np.pad(rows, [[0, 0], [1, 0], [0, 0]])
    near = rows[:, [1, 3]][:, :, [0, 2]]
    return near.reshape(-1, 4).mean(1, keepdims=True)


@pytest.mark.filterwarnings("error")
def test_a_functional_model_of_tensorflows_functions_runs_and_is_saved(tmp_path):
    code = port(PROGRAM).code
    scope = {}
    exec(code, scope)
    model = scope["model"]
    x = np.random.RandomState(0).randn(5, 4, 4, 3).astype("float32")

    result = np.asarray(model(x))
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")

    assert model.output_shape == (None, 1)
    np.testing.assert_allclose(result, by_hand(x), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(again(x)), result)
    np.testing.assert_allclose(np.asarray(model(x[:2])), by_hand(x[:2]), rtol=1e-5, atol=1e-6)


def body(text):
    code = port(HEAD + text).code
    return "\n".join(line for line in code.splitlines() if not line.startswith(("import", "from")))


@pytest.mark.parametrize(
    "text",
    [
        "x = tf.keras.Input((2,))\ny = tf.exp(x)",
        "x = layers.Input((2,))\nfor _ in [1, 2]:\n    x = layer(x)\n    x = tf.exp(x)",
        "x = model.output\nx = tf.exp(x)",
        "def f(x):\n    y = layers.Dense(2)(x)\n    return tf.exp(y)",
        "def f(x):\n    dense = layers.Dense(2)\n    return tf.exp(dense(x))",
        "def f(x):\n    return tf.exp(x)\ny = f(x=tf.keras.Input((2,)))",
        "def f():\n    return tf.keras.Input((2,))\ny = tf.exp(f())",
    ],
)
def test_calls_on_symbolic_tensors_keep_tensorflows_functions(text):
    assert "tf.exp(" in body(text)


@pytest.mark.parametrize(
    "text",
    [
        "x = tf.keras.Input((2,))\nmodel = tf.keras.Model(x, x)\ny = tf.exp(model(z))",
        "x = tf.keras.Input((2,))\nf = layers.Lambda(lambda x: tf.exp(x))(x)",
        "dense = layers.Dense(2)\ny = tf.exp(dense(z))",
        "x = tf.keras.Input((2,))\ndef loss(x, y):\n    return tf.exp(x)",
    ],
)
def test_calls_on_arrays_become_jaxs_functions(text):
    assert "jnp.exp(" in body(text)
