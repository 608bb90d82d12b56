"""The table of TensorFlow calls and their JAX equivalents."""

import ast
import keyword
from collections.abc import Mapping
from dataclasses import dataclass

# A TensorFlow call -> its JAX equivalent, and after `;` a caveat. A missing argument is omitted if
# the right side passes it by keyword (`axis=axis`), else its default is written. Parameters behind
# `*` stand at other places in TensorFlow, so that only keywords bind them. In functions that
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
compat.v1.where(condition, x, y) -> jnp.where(condition, x, y) ; ROWS
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
eye|linalg.eye(num_rows, *, dtype=jnp.float32) -> jnp.eye(num_rows, dtype=dtype)
fill(dims, value) -> jax.numpy.full(dims, value)
floor|math.floor(x) -> jnp.floor(x)
gather(params, indices, *, axis=0) -> jnp.take(params, indices, axis) ; NEGATIVE
greater|math.greater(x, y) -> jnp.greater(x, y)
greater_equal|math.greater_equal(x, y) -> jnp.greater_equal(x, y)
keras.backend.abs(x) -> rx.keras.ops.abs(x)
keras.backend.all(x, axis=None, keepdims=False) -> rx.keras.ops.all(x, axis=axis, keepdims=keepdims)
keras.backend.any(x, axis=None, keepdims=False) -> rx.keras.ops.any(x, axis=axis, keepdims=keepdims)
keras.backend.arange(start) -> rx.keras.ops.arange(start)
keras.backend.argmax(x, axis=-1) -> rx.keras.ops.argmax(x, axis)
keras.backend.argmin(x, axis=-1) -> rx.keras.ops.argmin(x, axis)
keras.backend.batch_flatten(x) -> rx.keras.layers.Flatten()(x)
keras.backend.binary_crossentropy(target, output, from_logits=False)
    -> rx.keras.ops.binary_crossentropy(target, output, from_logits=from_logits)
keras.backend.cast(x, dtype) -> rx.keras.ops.cast(x, dtype)
keras.backend.categorical_crossentropy(target, output, from_logits=False, axis=-1)
    -> rx.keras.ops.categorical_crossentropy(target, output, from_logits=from_logits, axis=axis)
keras.backend.clip(x, min_value, max_value) -> rx.keras.ops.clip(x, min_value, max_value)
keras.backend.concatenate(tensors, axis=-1) -> rx.keras.ops.concatenate(tensors, axis)
keras.backend.cos(x) -> rx.keras.ops.cos(x)
keras.backend.cumsum(x, axis=0) -> rx.keras.ops.cumsum(x, axis)
keras.backend.dot(x, y) -> rx.keras.ops.dot(x, y)
keras.backend.equal(x, y) -> rx.keras.ops.equal(x, y)
keras.backend.exp(x) -> rx.keras.ops.exp(x)
keras.backend.expand_dims(x, axis=-1) -> rx.keras.ops.expand_dims(x, axis)
keras.backend.eye(size) -> rx.keras.ops.eye(size)
keras.backend.flatten(x) -> rx.keras.ops.ravel(x)
keras.backend.gather(reference, indices) -> rx.keras.ops.take(reference, indices, axis=0)
keras.backend.get_value(x) -> np.asarray(x)
keras.backend.greater(x, y) -> rx.keras.ops.greater(x, y)
keras.backend.greater_equal(x, y) -> rx.keras.ops.greater_equal(x, y)
keras.backend.hard_sigmoid(x) -> rx.keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)
keras.backend.int_shape(x) -> rx.keras.ops.shape(x)
keras.backend.l2_normalize(x, axis) -> rx.keras.ops.normalize(x, axis)
keras.backend.less(x, y) -> rx.keras.ops.less(x, y)
keras.backend.less_equal(x, y) -> rx.keras.ops.less_equal(x, y)
keras.backend.log(x) -> rx.keras.ops.log(x)
keras.backend.max(x, axis=None, keepdims=False) -> rx.keras.ops.max(x, axis=axis, keepdims=keepdims)
keras.backend.maximum(x, y) -> rx.keras.ops.maximum(x, y)
keras.backend.mean(x, axis=None, keepdims=False)
    -> rx.keras.ops.mean(x, axis=axis, keepdims=keepdims) ; FLOATS
keras.backend.min(x, axis=None, keepdims=False) -> rx.keras.ops.min(x, axis=axis, keepdims=keepdims)
keras.backend.minimum(x, y) -> rx.keras.ops.minimum(x, y)
keras.backend.ndim(x) -> rx.keras.ops.ndim(x)
keras.backend.not_equal(x, y) -> rx.keras.ops.not_equal(x, y)
keras.backend.one_hot(indices, num_classes) -> rx.keras.ops.one_hot(indices, num_classes)
keras.backend.ones_like(x, dtype=None) -> rx.keras.ops.ones_like(x, dtype=dtype)
keras.backend.permute_dimensions(x, pattern) -> rx.keras.ops.transpose(x, pattern)
keras.backend.pow(x, a) -> rx.keras.ops.power(x, a)
keras.backend.prod(x, axis=None, keepdims=False)
    -> rx.keras.ops.prod(x, axis=axis, keepdims=keepdims)
keras.backend.relu(x, alpha=0.0, max_value=None, threshold=0.0)
    -> rx.keras.activations.relu(
    x, negative_slope=alpha, max_value=max_value, threshold=threshold)
keras.backend.repeat_elements(x, rep, axis) -> rx.keras.ops.repeat(x, rep, axis)
keras.backend.reshape(x, shape) -> rx.keras.ops.reshape(x, shape)
keras.backend.round(x) -> rx.keras.ops.round(x)
keras.backend.shape(x) -> rx.keras.ops.shape(x)
keras.backend.sigmoid(x) -> rx.keras.ops.sigmoid(x)
keras.backend.sign(x) -> rx.keras.ops.sign(x)
keras.backend.sin(x) -> rx.keras.ops.sin(x)
keras.backend.softmax(x, axis=-1) -> rx.keras.ops.softmax(x, axis=axis)
keras.backend.softplus(x) -> rx.keras.ops.softplus(x)
keras.backend.sparse_categorical_crossentropy(target, output, from_logits=False)
    -> rx.keras.ops.sparse_categorical_crossentropy(target, output, from_logits=from_logits)
keras.backend.sqrt(x) -> rx.keras.ops.sqrt(rx.keras.ops.maximum(x, 0.0))
keras.backend.square(x) -> rx.keras.ops.square(x)
keras.backend.squeeze(x, axis) -> rx.keras.ops.squeeze(x, axis)
keras.backend.stack(x, axis=0) -> rx.keras.ops.stack(x, axis=axis)
keras.backend.std(x, axis=None, keepdims=False) -> rx.keras.ops.std(x, axis=axis, keepdims=keepdims)
keras.backend.stop_gradient(variables) -> rx.keras.ops.stop_gradient(variables)
keras.backend.sum(x, axis=None, keepdims=False) -> rx.keras.ops.sum(x, axis=axis, keepdims=keepdims)
keras.backend.switch(condition, then_expression, else_expression)
    -> rx.keras.ops.where(condition, then_expression, else_expression) ; CHOICE
keras.backend.tanh(x) -> rx.keras.ops.tanh(x)
keras.backend.tile(x, n) -> rx.keras.ops.tile(x, n)
keras.backend.transpose(x) -> rx.keras.ops.transpose(x)
keras.backend.var(x, axis=None, keepdims=False) -> rx.keras.ops.var(x, axis=axis, keepdims=keepdims)
keras.backend.variable(value) -> rx.Variable(jnp.asarray(value, jnp.float32))
keras.backend.zeros_like(x, dtype=None) -> rx.keras.ops.zeros_like(x, dtype=dtype)
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
one_hot(indices, depth, *, dtype=jnp.float32) -> jax.nn.one_hot(indices, depth, dtype=dtype)
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
    "ROWS": (
        "the same for a condition of the shape of `x`. In version 1 a vector chooses whole rows:"
        " write `condition[:, None]` for it."
    ),
    "FLOATS": "the same for floats. Of integers TensorFlow's mean is an integer, JAX's a float.",
    "CHOICE": ("the same for arrays. Of functions and one condition, write `rx.cond`."),
    "GRADIENT": (
        "the same values. Where two are equal, TensorFlow's gradient is all of one's, and JAX's is"
        " shared by both."
    ),
    "NEGATIVE": (
        "the same for indices in bounds. Those below zero count from the end, where TensorFlow"
        " raises or gives zeros."
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        parameters: TensorFlow's parameters, and the source text of their defaults.
        target: The JAX expression, in which the parameters are names.
        caveat: Where its meaning differs.
        rest: The name of the ``*args`` parameter, if there is one.
        by_keyword: The parameters that have no place.
    """

    parameters: Mapping[str, str | None]
    target: str
    caveat: str = ""
    rest: str = ""
    by_keyword: frozenset[str] = frozenset()

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


def _parse_row(line: str) -> dict[str, Row]:
    """Parse a line of the table into rows by name."""
    left, _, right = line.partition(" -> ")
    names, _, arguments = left.partition("(")
    target, _, caveat = right.partition(" ; ")
    declared = ast.parse(f"def f({arguments}: ...").body[0]
    assert isinstance(declared, ast.FunctionDef)
    by_keyword = [a.arg for a in declared.args.kwonlyargs]
    order = [a.arg for a in declared.args.args] + by_keyword
    values = [*declared.args.defaults, *declared.args.kw_defaults]
    defaults = [ast.unparse(value) for value in values if value is not None]
    texts: list[str | None] = [None] * (len(order) - len(defaults)) + [*defaults]
    rest = declared.args.vararg.arg if declared.args.vararg else ""
    parameters = dict(zip(order, texts, strict=True))
    row = Row(parameters, target, _CAVEATS.get(caveat, ""), rest, frozenset(by_keyword))
    assert not any(keyword.iskeyword(name) for name in order)
    return dict.fromkeys(names.split("|"), row)


ROWS: dict[str, Row] = {
    name: row
    for line in _TABLE.replace("\n    ", " ").strip().splitlines()
    for name, row in _parse_row(line).items()
}
