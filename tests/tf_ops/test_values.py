"""`replicax.compat.tf` gives TensorFlow's results, on devices and in functions of elements."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.data.user_functions import ElementFunction
from replicax.compat import tf
from tests.golden.public_names import takes_less
from tests.golden.tf_ops_cases import EXPRESSIONS, NAMES, TEXTS

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "tf_ops.json").read_text())
VALUES, TAKES = GOLDEN["values"], GOLDEN["takes"]
MODULES = (
    "",
    "bitwise",
    "debugging",
    "image",
    "linalg",
    "lookup",
    "math",
    "nn",
    "signal",
    "strings",
)
DTYPES = {name: getattr(jnp, name) for name in ("float32", "int32", "uint8", "int64")}
# Functions whose results are rounded at other places.
TOLERANCE = {
    "tf.linalg.": 2e-4,
    "tf.image.": 2e-5,
    "tf.math.": 2e-5,
    "tf.nn.": 2e-5,
    "tf.signal.": 2e-5,
}


class _Names:
    """`tf`, with its dtypes, which ported programs write as `jnp.float32`."""

    def __getattr__(self, name):
        return DTYPES[name] if name in DTYPES else getattr(tf, name)


def evaluate(text, values):
    return eval(text, {"tf": _Names()} | values)


def check(text, ours):
    dtype, expected = VALUES[text]
    wide = {"int64": "int32", "float64": "float32"}
    if dtype.startswith("complex"):
        expected = np.asarray(expected[0]) + 1j * np.asarray(expected[1])
    ours = np.asarray(ours)
    assert ours.shape == np.shape(expected)
    assert ours.dtype.name in (dtype, wide.get(dtype, dtype)), f"{ours.dtype}, not {dtype}"
    if ours.dtype.kind in "fc":
        limit = next((t for start, t in TOLERANCE.items() if text.startswith(start)), 1e-6)
        np.testing.assert_allclose(ours, np.asarray(expected), rtol=limit, atol=limit)
    elif ours.dtype == np.uint8:  # scaled colors, half way between two numbers
        assert np.abs(ours.astype(int) - np.asarray(expected)).max() <= 1
    else:
        assert ours.tolist() == expected


# Each expression compiles programs of its own, so that most are left to `make test-slow`.
@pytest.mark.parametrize(
    "text",
    [
        t if i % 8 == 0 else pytest.param(t, marks=pytest.mark.slow)
        for i, t in enumerate(EXPRESSIONS)
    ],
)
def test_a_function_gives_tensorflows_result(text):
    values = {k: jnp.asarray(v) for k, v in NAMES.items() if v.dtype != object}

    check(text, evaluate(text, values))


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_a_function_gives_tensorflows_result_in_functions_of_elements(text):
    check(text, ElementFunction(lambda _: evaluate(text, dict(NAMES)), "map").call(0, 0))


@pytest.mark.parametrize("text", TEXTS)
def test_a_function_of_strings_gives_tensorflows_result(text):
    ours = np.asarray(ElementFunction(lambda _: evaluate(text, dict(NAMES)), "map").call(0, 0))
    _, expected = VALUES[text]
    shown = json.loads(json.dumps(ours.tolist(), default=bytes.decode))

    assert shown == pytest.approx(expected) if ours.dtype.kind == "f" else shown == expected


def _functions():
    for module in MODULES:
        namespace = importlib.import_module(f"replicax.compat.tf.{module}".rstrip("."))
        for name in namespace.__all__:
            path = f"{module}.{name}".lstrip(".")
            if path in TAKES and name != "DType":  # NumPy's
                yield path, getattr(namespace, name)


@pytest.mark.parametrize(
    ("path", "ours"), list(_functions()), ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_function_takes_tensorflows_arguments(path, ours):
    theirs = [argument.replace("=-inf", "=...") for argument in TAKES[path]]

    assert list(takes_less(ours, theirs)) == []


def test_sizes_stay_known_in_compiled_functions():
    @rx.function
    def flatten(x):
        shape = tf.concat([tf.shape(x)[:1], [-1]], 0)
        rows, *_ = tf.unstack(tf.shape(x))
        return tf.reshape(x, shape), tf.reshape(x, tf.stack([rows, 12])), tf.zeros(tf.shape(x)[1:])

    made = flatten(jnp.ones((2, 3, 4)))

    assert [m.shape for m in made] == [(2, 12), (2, 12), (3, 4)]


def test_values_of_elements_stay_on_the_host():
    seen = []

    def change(x):
        made = tf.image.resize(tf.reshape(x, [2, 2, 1]), [4, 4])
        seen.append(type(made))
        return tf.image.random_flip_left_right(made)

    data = rx.data.Dataset.from_tensor_slices(np.ones((3, 4), np.float32)).map(change).batch(3)

    assert [np.shape(x) for x in data] == [(3, 4, 4, 1)]
    assert set(seen) == {np.ndarray}


def test_random_changes_follow_the_global_seed():
    def drawn():
        rx.random.set_seed(3)
        image = jnp.arange(12.0).reshape(2, 2, 3)
        return [tf.image.random_hue(tf.image.random_flip_left_right(image), 0.2) for _ in range(3)]

    assert all(np.array_equal(a, b) for a, b in zip(drawn(), drawn(), strict=True))


def test_a_module_finds_its_variables():
    class Inner(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = rx.Variable(1.0)
            self.frozen = rx.Variable(2.0, trainable=False)

    class Outer(tf.Module):
        def __init__(self):
            super().__init__(name="outer")
            self.parts = [Inner(), {"b": rx.Variable(3.0)}]
            self.again = self.parts[0]

        @tf.Module.with_name_scope
        def __call__(self, x):
            return x * self.again.w

    outer = Outer()

    assert [float(v) for v in outer.variables] == [2.0, 1.0, 3.0]
    assert len(outer.trainable_variables) == 2
    assert [m.name for m in outer.submodules] == ["inner"]
    assert float(outer(2.0)) == 2.0


def test_a_tensor_array_is_written_in_a_compiled_loop():
    @rx.function
    def squares(n):
        array = tf.TensorArray(jnp.float32, size=4, element_shape=[])
        _, array = tf.while_loop(
            lambda i, a: i < n, lambda i, a: (i + 1, a.write(i, jnp.float32(i * i))), (0, array)
        )
        return array.stack()

    assert squares(jnp.int32(3)).tolist() == [0.0, 1.0, 4.0, 0.0]


def test_roll_takes_shifts_that_are_computed():
    rolled = jax.jit(lambda x, a, b: tf.roll(x, shift=[a, b], axis=[0, 1]))
    x = jnp.arange(6).reshape(2, 3)

    assert rolled(x, 1, 2).tolist() == np.roll(np.asarray(x), (1, 2), (0, 1)).tolist()


def test_a_custom_gradient_is_used():
    @tf.custom_gradient
    def clipped(x):
        return x * 3, lambda upstream: jnp.clip(upstream, -1, 1)

    assert float(jax.grad(lambda x: 5 * clipped(x))(2.0)) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "tf.split(v, 2)",
        "tf.split(v, [1, 1])",
        "tf.ensure_shape(a, [2, 2])",
        "tf.image.resize(v, [2, 2])",
        "tf.image.resize(image, [2, 2], 'no such method')",
        "tf.nn.dropout(a, 1.5)",
        "tf.debugging.assert_equal(a, b)",
        "tf.image.pad_to_bounding_box(image, 0, 0, 2, 2)",
    ],
)
def test_wrong_arguments_are_explained(text):
    with pytest.raises(rx.errors.InvalidArgumentError, match=r"\w{4}"):
        evaluate(text, {k: jnp.asarray(v) for k, v in NAMES.items() if v.dtype != object})
