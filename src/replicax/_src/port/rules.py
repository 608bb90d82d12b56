"""Translation rules for TensorFlow names: a replicax name, a JAX expression, or advice.

The names that replicax shares with TensorFlow, and its advice on names that it leaves out, are
looked up in replicax itself and not repeated here.
"""

import ast
import importlib
import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from replicax._src.base.lazy import LeavesOut

# A TensorFlow call -> its JAX equivalent, and after `;` a caveat. A missing argument is omitted if
# the right side passes it by keyword (`axis=axis`), else its default is written. In functions that
# a dataset applies to elements, `jnp` becomes `np`, except that `jax.numpy` stays: there, NumPy
# would choose another dtype. A test compares every row with TensorFlow.
_TABLE = """
abs|math.abs(x) -> jnp.abs(x)
add_n|math.add_n(inputs) -> sum(inputs)
argmax|math.argmax(input, axis=0) -> jnp.argmax(input, axis)
argmin|math.argmin(input, axis=0) -> jnp.argmin(input, axis)
argsort(values, axis=-1) -> jnp.argsort(values, axis)
broadcast_to(input, shape) -> jnp.broadcast_to(input, shape)
cast(x, dtype) -> jnp.asarray(x, dtype)
clip_by_value(t, clip_value_min, clip_value_max)
    -> jnp.clip(t, clip_value_min, clip_value_max) ; GRADIENT
concat(values, axis) -> jnp.concatenate(values, axis)
cond(pred, true_fn, false_fn) -> rx.cond(pred, true_fn, false_fn)
convert_to_tensor(value, dtype=None) -> jax.numpy.asarray(value, dtype=dtype)
cos|math.cos(x) -> jnp.cos(x)
cosh|math.cosh(x) -> jnp.cosh(x)
cumsum|math.cumsum(x, axis=0) -> jnp.cumsum(x, axis)
divide|math.divide(x, y) -> jnp.true_divide(x, y)
einsum|linalg.einsum(equation, *inputs) -> jnp.einsum(equation, *inputs)
equal|math.equal(x, y) -> jnp.equal(x, y)
exp|math.exp(x) -> jnp.exp(x)
expand_dims(input, axis) -> jnp.expand_dims(input, axis)
eye|linalg.eye(num_rows, dtype=jnp.float32) -> jnp.eye(num_rows, dtype=dtype)
fill(dims, value) -> jax.numpy.full(dims, value)
floor|math.floor(x) -> jnp.floor(x)
gather(params, indices, axis=0) -> jnp.take(params, indices, axis) ; NEGATIVE
greater|math.greater(x, y) -> jnp.greater(x, y)
greater_equal|math.greater_equal(x, y) -> jnp.greater_equal(x, y)
less|math.less(x, y) -> jnp.less(x, y)
less_equal|math.less_equal(x, y) -> jnp.less_equal(x, y)
logical_and|math.logical_and(x, y) -> jnp.logical_and(x, y)
logical_not|math.logical_not(x) -> jnp.logical_not(x)
logical_or|math.logical_or(x, y) -> jnp.logical_or(x, y)
math.ceil(x) -> jnp.ceil(x)
math.cumprod(x, axis=0) -> jnp.cumprod(x, axis)
math.floordiv(x, y) -> jnp.floor_divide(x, y)
math.is_finite(x) -> jnp.isfinite(x)
math.is_inf(x) -> jnp.isinf(x)
math.is_nan(x) -> jnp.isnan(x)
math.log(x) -> jnp.log(x)
math.log1p(x) -> jnp.log1p(x)
math.log_sigmoid(x) -> jax.nn.log_sigmoid(x)
math.mod|math.floormod(x, y) -> jnp.mod(x, y)
math.reduce_std(input_tensor, axis=None, keepdims=False)
    -> jnp.std(input_tensor, axis=axis, keepdims=keepdims)
math.reduce_variance(input_tensor, axis=None, keepdims=False)
    -> jnp.var(input_tensor, axis=axis, keepdims=keepdims)
math.rsqrt(x) -> jax.lax.rsqrt(x)
math.squared_difference(x, y) -> jnp.square(x - y)
matmul|linalg.matmul(a, b) -> jnp.matmul(a, b)
maximum|math.maximum(x, y) -> jnp.maximum(x, y) ; GRADIENT
minimum|math.minimum(x, y) -> jnp.minimum(x, y) ; GRADIENT
multiply|math.multiply(x, y) -> jnp.multiply(x, y)
negative|math.negative(x) -> jnp.negative(x)
nn.bias_add(value, bias) -> jnp.add(value, bias)
nn.elu(features) -> jax.nn.elu(features)
nn.gelu(features, approximate=False) -> jax.nn.gelu(features, approximate)
nn.leaky_relu(features, alpha=0.2) -> jax.nn.leaky_relu(features, alpha)
nn.log_softmax|math.log_softmax(logits, axis=-1) -> jax.nn.log_softmax(logits, axis=axis)
nn.relu(features) -> jax.nn.relu(features)
nn.relu6(features) -> jax.nn.relu6(features)
nn.selu(features) -> jax.nn.selu(features)
nn.silu|nn.swish(features) -> jax.nn.silu(features)
nn.softmax|math.softmax(logits, axis=-1) -> jax.nn.softmax(logits, axis=axis)
nn.softmax_cross_entropy_with_logits(labels, logits)
    -> rx.keras.ops.categorical_crossentropy(labels, logits, from_logits=True)
nn.softplus|math.softplus(features) -> jax.nn.softplus(features)
nn.softsign|math.softsign(features) -> jax.nn.soft_sign(features)
nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    -> rx.keras.ops.sparse_categorical_crossentropy(labels, logits, from_logits=True)
norm|linalg.norm(tensor) -> jnp.linalg.norm(tensor)
not_equal|math.not_equal(x, y) -> jnp.not_equal(x, y)
one_hot(indices, depth, dtype=jnp.float32) -> jax.nn.one_hot(indices, depth, dtype=dtype)
ones(shape, dtype=jnp.float32) -> jnp.ones(shape, dtype)
ones_like(input, dtype=None) -> jnp.ones_like(input, dtype=dtype)
pow|math.pow(x, y) -> jnp.power(x, y)
range(*bounds) -> jax.numpy.arange(*bounds)
rank(input) -> jnp.ndim(input)
reduce_all|math.reduce_all(input_tensor, axis=None, keepdims=False)
    -> jnp.all(input_tensor, axis=axis, keepdims=keepdims)
reduce_any|math.reduce_any(input_tensor, axis=None, keepdims=False)
    -> jnp.any(input_tensor, axis=axis, keepdims=keepdims)
reduce_logsumexp|math.reduce_logsumexp(input_tensor, axis=None, keepdims=False)
    -> jax.nn.logsumexp(input_tensor, axis=axis, keepdims=keepdims)
reduce_max|math.reduce_max(input_tensor, axis=None, keepdims=False)
    -> jnp.max(input_tensor, axis=axis, keepdims=keepdims)
reduce_mean|math.reduce_mean(input_tensor, axis=None, keepdims=False)
    -> jnp.mean(input_tensor, axis=axis, keepdims=keepdims) ; FLOATS
reduce_min|math.reduce_min(input_tensor, axis=None, keepdims=False)
    -> jnp.min(input_tensor, axis=axis, keepdims=keepdims)
reduce_prod|math.reduce_prod(input_tensor, axis=None, keepdims=False)
    -> jnp.prod(input_tensor, axis=axis, keepdims=keepdims)
reduce_sum|math.reduce_sum(input_tensor, axis=None, keepdims=False)
    -> jnp.sum(input_tensor, axis=axis, keepdims=keepdims)
repeat(input, repeats, axis=None) -> jnp.repeat(input, repeats, axis=axis)
reshape(tensor, shape) -> jnp.reshape(tensor, shape)
reverse(tensor, axis) -> jnp.flip(tensor, axis)
round|math.round(x) -> jnp.round(x)
shape(input) -> jnp.shape(input)
sigmoid|math.sigmoid|nn.sigmoid(x) -> jax.nn.sigmoid(x)
sign|math.sign(x) -> jnp.sign(x)
sin|math.sin(x) -> jnp.sin(x)
sinh|math.sinh(x) -> jnp.sinh(x)
sort(values, axis=-1) -> jnp.sort(values, axis)
sqrt|math.sqrt(x) -> jnp.sqrt(x)
square|math.square(x) -> jnp.square(x)
squeeze(input, axis=None) -> jnp.squeeze(input, axis=axis)
stack(values, axis=0) -> jnp.stack(values, axis=axis)
stop_gradient(input) -> jax.lax.stop_gradient(input)
subtract|math.subtract(x, y) -> jnp.subtract(x, y)
tan|math.tan(x) -> jnp.tan(x)
tanh|math.tanh|nn.tanh(x) -> jnp.tanh(x)
tensordot|linalg.tensordot(a, b, axes) -> jnp.tensordot(a, b, axes)
tile(input, multiples) -> jnp.tile(input, multiples)
transpose(a, perm=None) -> jnp.transpose(a, axes=perm)
where(condition, x, y) -> jnp.where(condition, x, y)
zeros(shape, dtype=jnp.float32) -> jnp.zeros(shape, dtype)
zeros_like(input, dtype=None) -> jnp.zeros_like(input, dtype=dtype)
"""
_CAVEATS = {
    "FLOATS": "the same for floats. Of integers TensorFlow's mean is an integer, JAX's a float.",
    "GRADIENT": (
        "the same values. Where two are equal, TensorFlow's gradient is all of one's, and JAX's is"
        " shared by both."
    ),
    "NEGATIVE": (
        "the same for indices in bounds. Those below zero count from the end, where TensorFlow"
        " raises or gives zeros."
    ),
}
_BOARD = (
    "Keras's callback needs TensorFlow to be installed. `rx.summary.scalar` in an `on_epoch_end`"
    " does not."
)
RANDOM = "the same distribution, other random numbers than TensorFlow's."
WIDE = (
    'JAX keeps 32 bits of it, unless `jax.config.update("jax_enable_x64", True)` comes before all'
    " else."
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Top-level TensorFlow names with the same meaning in replicax.
_SHARED = _names(
    "GradientTape IndexedSlices Tensor TensorSpec TypeSpec UnconnectedGradients Variable"
    " VariableAggregation VariableSynchronization add compat config constant data device"
    " distribute errors function identity io keras nest nn random saved_model summary tpu train"
    " variable_creator_scope"
)
_KERAS_MODULES = frozenset(["initializers", "losses", "metrics", "optimizers"])
_NARROW = _names("float16 float32 bfloat16 int8 int16 int32 uint8 uint16 uint32 complex64")
_WIDE = {name: name for name in ("float64", "int64", "uint64", "complex128")} | {
    "double": "float64"
}
_DTYPES = (
    {name: f"jnp.{name}" for name in _NARROW}
    | {name: f"np.{kept}" for name, kept in _WIDE.items()}
    | {"bool": "jnp.bool_", "half": "jnp.float16", "string": "bytes", "newaxis": "None"}
    # Keras 3 takes strings; these constants were Keras 2's.
    | {
        f"keras.losses.Reduction.{name.upper()}": f'"{name}"'
        for name in ("none", "sum", "sum_over_batch_size")
    }
)
_NO_GRAPHS = "There are no graphs and no sessions: call the function, under `rx.function`."
_ADVICE = {
    "": "The module itself is not ported: name what is used of it.",
    "Module": "Write a plain class, and a list of its variables for `trainable_variables`.",
    "__version__": "This is TensorFlow's version; `rx.__version__` is replicax's.",
    "autograph": (
        "Python control flow is not rewritten: write `rx.cond`, `rx.scan` or `rx.while_loop`."
    ),
    "clip_by_global_norm": "Write `optax.clip_by_global_norm`, or `global_clipnorm=` of Keras's"
    " optimizers.",
    "compat.v1.Session": _NO_GRAPHS,
    "compat.v1.disable_eager_execution": _NO_GRAPHS,
    "compat.v1.disable_v2_behavior": _NO_GRAPHS,
    "compat.v1.enable_v2_behavior": "There is no other behaviour: remove it.",
    "compat.v1.global_variables_initializer": "Variables have their values at once: remove it.",
    "compat.v1.placeholder": _NO_GRAPHS,
    "debugging": (
        "Write `assert` outside of compiled functions; inside, `jax.experimental.checkify`, or hand"
        " the value out and look at it there."
    ),
    "estimator": "Estimators are gone from TensorFlow too: write `rx.keras`, or a loop.",
    "get_logger": 'Write `logging.getLogger("replicax")`.',
    "lookup": "There are no lookup tables: use a dict in the function of a dataset's `map`.",
    "map_fn": "Write `jax.lax.map`, or better `jax.vmap`.",
    "nn.dropout": "Write `rx.keras.layers.Dropout`, or draw a mask with `rx.random`.",
    "nn.l2_loss": "Write `jnp.sum(jnp.square(x)) / 2`.",
    "nn.sigmoid_cross_entropy_with_logits": (
        "Write `jax.nn.softplus(logits) - labels * logits`, or `optax.sigmoid_binary_cross_entropy`"
    ),
    "numpy_function": "Functions of elements get NumPy values: call the function itself.",
    "print": 'Write `jax.debug.print("loss {}", loss)`, or `print` outside of functions.',
    "py_function": "Functions of elements get NumPy values: call the function itself.",
    "ragged": "There are no ragged tensors: pad, with `dataset.padded_batch(n)`.",
    "scan": "`rx.scan(f, init, xs)` takes and returns other things than `tf.scan`.",
    "strings": "No device holds strings: use Python's, in the function of a dataset's `map`.",
    "while_loop": "`rx.while_loop(cond, body, value)` passes one value, not `*loop_vars`.",
}
_MODULES = {
    "image": "Write `rx.keras.ops.image`, or NumPy in the functions of a dataset's elements.",
    "math": "Math is JAX's here: write `jnp` for `tf.math`, after `import jax.numpy as jnp`.",
    "strings": "The functions of a dataset's elements are plain Python: strings are bytes there.",
}
METHODS = {
    "as_list": "Shapes are tuples: write `list(x.shape)`.",
    "reset_states": "If this is a metric of Keras: write `reset_state()`.",
    "get_shape": "Write `x.shape`, which is a tuple.",
    "set_shape": "Shapes are known: remove this line.",
}


@dataclass(frozen=True)
class Same:
    """A replicax name, or another expression with the same meaning, such as ``jnp.float32``.

    Attributes:
        text: The expression.
        value: The object, to check the arguments of calls; None if it is unknown.
        caveat: Where its meaning differs.
    """

    text: str
    value: Any = None
    caveat: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        parameters: TensorFlow's parameters, and the source text of their defaults.
        target: The JAX expression, in which the parameters are names.
        caveat: Where its meaning differs.
        rest: The name of the ``*args`` parameter, if there is one.
    """

    parameters: Mapping[str, str | None]
    target: str
    caveat: str = ""
    rest: str = ""

    @property
    def bare(self) -> str | None:
        """The function's name, if it takes the same positional arguments; else None."""
        call = ast.parse(self.target, mode="eval").body
        assert isinstance(call, ast.Call)
        positional = [a.id for a in call.args if isinstance(a, ast.Name)]
        needed = [name for name, default in self.parameters.items() if default is None]
        plain = positional == needed == list(self.parameters)[: len(needed)] and len(
            positional
        ) == len(call.args)
        no_more = all(isinstance(k.value, ast.Name) and k.arg == k.value.id for k in call.keywords)
        return ast.unparse(call.func) if plain and no_more and not self.rest else None


@dataclass(frozen=True)
class Untranslated:
    """A name without a translation, and advice on a replacement."""

    words: str


@dataclass
class Rules:
    """A cache of the translations of TensorFlow names."""

    _known: dict[str, Same | Row | Untranslated] = field(default_factory=dict)

    def of(self, path: str) -> Same | Row | Untranslated:
        """Return the translation of ``tf.<path>``."""
        if path not in self._known:
            self._known[path] = _translate(path)
        return self._known[path]


def advice(path: str) -> str:
    """Return advice on a replacement for ``tf.<path>``, which replicax leaves out, or ""."""
    if path in _DTYPES:
        return f"Write `{_DTYPES[path]}`."
    if path in ROWS:
        row = ROWS[path]
        caveat = f" It is {row.caveat}" if row.caveat else ""
        return f"Math is JAX's here: write `{row.target}`.{caveat}"
    return _ADVICE.get(path) or _MODULES.get(path) or _like(path)


def left_out_methods() -> dict[str, str]:
    """Return the methods that replicax's classes leave out, with the text of their errors."""
    found = dict(METHODS)
    for kind in _subclasses(LeavesOut):
        for name, words in kind.left_out.items():
            if "_" in name:  # short names such as `group` are methods of many unrelated classes
                found.setdefault(name, f"If this is a {kind.__name__.lstrip('_')}: {words}")
    return found


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    return [c for child in kind.__subclasses__() for c in (child, *_subclasses(child))]


def _translate(path: str) -> Same | Row | Untranslated:
    """Return the translation of ``tf.<path>``, without the cache."""
    if path.split(".")[0] in _KERAS_MODULES:
        path = f"keras.{path}"
    if path in _DTYPES:
        return Same(_DTYPES[path], caveat=WIDE if path in _WIDE else "")
    if path in ROWS:
        return ROWS[path]
    words = next((w for name, w in _ADVICE.items() if f"{path}.".startswith(f"{name}.")), None)
    if words is not None:
        return Untranslated(words)
    if path.split(".")[0] in _SHARED:
        return _shared(path)
    return Untranslated(_unknown(path))


def _shared(path: str) -> Same | Untranslated:
    """Look up a name that replicax shares with TensorFlow."""
    found: Any = importlib.import_module("replicax")
    parts = path.split(".")
    for place, part in enumerate(parts):
        try:
            found = getattr(found, part)
        except ModuleNotFoundError:  # Keras is not installed; its names are the same
            break
        except AttributeError as error:
            message = str(error)
            is_ours = "has no attribute" not in message and isinstance(found, ModuleType)
            return Untranslated(message if is_ours else _unknown(".".join(parts[: place + 1])))
    caveat = (
        _BOARD if path == "keras.callbacks.TensorBoard" else RANDOM if _is_random(parts) else ""
    )
    return Same(f"rx.{path}", found, caveat)


def _is_random(parts: list[str]) -> bool:
    quiet = ("set_seed", "Algorithm", "get_global_generator", "set_global_generator")
    return parts[0] == "random" and len(parts) > 1 and parts[-1] not in quiet


def _unknown(path: str) -> str:
    return f"replicax has no {path}. {_like(path) or 'Write it with jax.numpy or rx.keras.ops.'}"


def _like(path: str) -> str:
    """Return advice on a JAX function of the same name; "" if there is none."""
    name = path.rpartition(".")[2]
    homes = {"jnp": "jax.numpy", "jax.nn": "jax.nn", "jax.lax": "jax.lax"}
    like = [a for a, home in homes.items() if hasattr(importlib.import_module(home), name)]
    return f"`{like[0]}.{name}` may be what you need; it was not compared." if like else ""


def _parse_row(line: str) -> dict[str, Row]:
    """Parse a line of the table into rows by name."""
    left, _, right = line.partition(" -> ")
    names, _, arguments = left.partition("(")
    target, _, caveat = right.partition(" ; ")
    declared = ast.parse(f"def f({arguments}: ...").body[0]
    assert isinstance(declared, ast.FunctionDef)
    order = [a.arg for a in declared.args.args]
    defaults = [ast.unparse(value) for value in declared.args.defaults]
    texts: list[str | None] = [None] * (len(order) - len(defaults)) + [*defaults]
    rest = declared.args.vararg.arg if declared.args.vararg else ""
    row = Row(dict(zip(order, texts, strict=True)), target, _CAVEATS.get(caveat, ""), rest)
    assert not any(keyword.iskeyword(name) for name in order)
    return dict.fromkeys(names.split("|"), row)


ROWS: dict[str, Row] = {
    name: row
    for line in _TABLE.replace("\n    ", " ").strip().splitlines()
    for name, row in _parse_row(line).items()
}
