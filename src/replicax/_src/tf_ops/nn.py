"""Functions of `tf.nn`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.random.random import uniform
from replicax._src.random.stateless import stateless_uniform
from replicax._src.tf_ops.arrays import gather
from replicax._src.tf_ops.core import as_tensor, ints, library
from replicax._src.tf_ops.math import rsqrt


def relu(features: Any, name: str | None = None) -> Any:
    """Return max(x, 0).

    Example:
        >>> tf.nn.relu(-1.0)
        Array(0., dtype=float32)
    """
    return jax.nn.relu(as_tensor(features))


def relu6(features: Any, name: str | None = None) -> Any:
    """Return min(max(x, 0), 6).

    Example:
        >>> tf.nn.relu6(8.0)
        Array(6., dtype=float32)
    """
    return jax.nn.relu6(as_tensor(features))


def elu(features: Any, name: str | None = None) -> Any:
    """Return x, or exp(x) - 1 for negative x.

    Example:
        >>> tf.nn.elu(1.0)
        Array(1., dtype=float32)
    """
    return jax.nn.elu(as_tensor(features))


def selu(features: Any, name: str | None = None) -> Any:
    """Return the scaled exponential linear unit.

    Example:
        >>> tf.nn.selu(0.0)
        Array(0., dtype=float32)
    """
    return jax.nn.selu(as_tensor(features))


def leaky_relu(features: Any, alpha: Any = 0.2, name: str | None = None) -> Any:
    """Return x, or alpha * x for negative x.

    Example:
        >>> tf.nn.leaky_relu(-1.0)
        Array(-0.2, dtype=float32)
    """
    return jax.nn.leaky_relu(as_tensor(features), alpha)


def gelu(features: Any, approximate: Any = False, name: str | None = None) -> Any:
    """Return the Gaussian error linear unit.

    Example:
        >>> tf.nn.gelu(0.0)
        Array(0., dtype=float32)
    """
    return jax.nn.gelu(as_tensor(features), approximate)


def silu(features: Any, beta: Any = 1.0) -> Any:
    """Return x * sigmoid(beta * x).

    Example:
        >>> tf.nn.silu(0.0)
        Array(0., dtype=float32)
    """
    x = as_tensor(features)
    return x * jax.nn.sigmoid(jnp.asarray(beta, x.dtype) * x)


swish = silu


def crelu(features: Any, axis: Any = -1, name: str | None = None) -> Any:
    """Concatenate the positive parts of x and of -x.

    Example:
        >>> tf.nn.crelu(jnp.array([1.0, -2.0]))
        Array([1., 0., 0., 2.], dtype=float32)
    """
    x = as_tensor(features)
    return jax.nn.relu(jnp.concatenate([x, -x], axis))


def bias_add(value: Any, bias: Any, data_format: Any = None, name: str | None = None) -> Any:
    """Add a bias to each channel.

    Example:
        >>> tf.nn.bias_add(jnp.ones((1, 2)), [1.0, 2.0])
        Array([[2., 3.]], dtype=float32)
    """
    x, b = as_tensor(value), as_tensor(bias)
    if data_format is not None and data_format.startswith("NC"):
        b = b.reshape(-1, *[1] * (x.ndim - 2))
    return x + b


def l2_loss(t: Any, name: str | None = None) -> Any:
    """Return half the sum of squares.

    Example:
        >>> tf.nn.l2_loss(jnp.array([3.0, 4.0]))
        Array(12.5, dtype=float32)
    """
    x = as_tensor(t)
    return library(x).sum(library(x).square(x)) / 2


def moments(
    x: Any, axes: Any, shift: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return mean and variance over axes.

    Example:
        >>> tf.nn.moments(jnp.array([1.0, 3.0]), [0])
        (Array(2., dtype=float32), Array(1., dtype=float32))
    """
    value = as_tensor(x)
    dims = ints(axes)
    wide = value.astype(np.float32) if value.dtype == np.float16 else value
    mean = wide.mean(dims, keepdims=True)
    variance = jnp.square(wide - jax.lax.stop_gradient(mean)).mean(dims, keepdims=True)
    if not keepdims:
        mean, variance = mean.squeeze(dims), variance.squeeze(dims)
    return mean.astype(value.dtype), variance.astype(value.dtype)


def weighted_moments(
    x: Any, axes: Any, frequency_weights: Any, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return weighted mean and variance over axes.

    Example:
        >>> tf.nn.weighted_moments(jnp.array([1.0, 3.0]), [0], jnp.array([1.0, 0.0]))
        (Array(1., dtype=float32), Array(0., dtype=float32))
    """
    value, weight = as_tensor(x), as_tensor(frequency_weights)
    dims = ints(axes)
    weight = jnp.broadcast_to(weight, value.shape).astype(value.dtype)
    total = weight.sum(dims, keepdims=True)
    mean = (value * weight).sum(dims, keepdims=True) / total
    variance = (weight * jnp.square(value - mean)).sum(dims, keepdims=True) / total
    return (mean, variance) if keepdims else (mean.squeeze(dims), variance.squeeze(dims))


def batch_normalization(
    x: Any,
    mean: Any,
    variance: Any,
    offset: Any,
    scale: Any,
    variance_epsilon: Any,
    name: str | None = None,
) -> Any:
    """Normalize by mean and variance, then scale and shift.

    Example:
        >>> tf.nn.batch_normalization(3.0, 1.0, 4.0, None, None, 0.0)
        Array(1., dtype=float32)
    """
    factor = rsqrt(as_tensor(variance) + variance_epsilon)
    factor = factor if scale is None else factor * scale
    value = as_tensor(x)
    shift = -as_tensor(mean) * factor
    shift = shift if offset is None else shift + offset
    return value * factor.astype(value.dtype) + jnp.asarray(shift, value.dtype)


def dropout(
    x: Any, rate: Any, noise_shape: Any = None, seed: Any = None, name: str | None = None
) -> Any:
    """Zero entries at random and scale the others to keep the mean.

    Example:
        >>> tf.nn.dropout(jnp.ones(2), 0.0)
        Array([1., 1.], dtype=float32)
    """
    return _dropout(x, rate, noise_shape, lambda shape: uniform(shape, seed=seed))


def stateless_dropout(
    x: Any,
    rate: Any,
    seed: Any,
    rng_alg: Any = "auto_select",
    noise_shape: Any = None,
    name: str | None = None,
) -> Any:
    """Zero entries at random, determined by a seed, and scale the others to keep the mean.

    Example:
        >>> tf.nn.stateless_dropout(jnp.ones(2), 0.0, [1, 2])
        Array([1., 1.], dtype=float32)
    """
    return _dropout(x, rate, noise_shape, lambda shape: stateless_uniform(shape, seed))


def _dropout(x: Any, rate: Any, noise_shape: Any, draw: Any) -> Any:
    value = as_tensor(x)
    if isinstance(rate, (int, float)):
        if not 0 <= rate < 1:
            raise InvalidArgumentError(f"dropout: rate={rate} is not in the range [0, 1).")
        if rate == 0:
            return value
    shape = (
        value.shape
        if noise_shape is None
        else tuple(
            n if s is None else int(s) for s, n in zip(noise_shape, value.shape, strict=True)
        )
    )
    is_kept = draw(shape) >= rate
    return jnp.where(
        is_kept,
        value * jnp.asarray(1 / (1 - jnp.asarray(rate)), value.dtype),
        jnp.zeros_like(value),
    )


def embedding_lookup(params: Any, ids: Any, max_norm: Any = None, name: str | None = None) -> Any:
    """Return the rows of an embedding table at the given ids.

    Example:
        >>> tf.nn.embedding_lookup(jnp.eye(2), [1])
        Array([[0., 1.]], dtype=float32)
    """
    if isinstance(params, (list, tuple)):
        if len(params) != 1:
            raise InvalidArgumentError("embedding_lookup: join the tables with tf.concat first.")
        params = params[0]
    rows = gather(params, ids)
    if max_norm is None:
        return rows
    norm = jnp.linalg.norm(rows, axis=tuple(range(jnp.ndim(ids), rows.ndim)), keepdims=True)
    return rows * max_norm / jnp.maximum(norm, max_norm)


def sigmoid_cross_entropy_with_logits(
    labels: Any = None, logits: Any = None, name: str | None = None
) -> Any:
    """Return the cross entropy of independent binary classes.

    Example:
        >>> tf.nn.sigmoid_cross_entropy_with_logits(labels=1.0, logits=0.0)
        Array(0.6931472, dtype=float32)
    """
    x = as_tensor(logits)
    z = as_tensor(labels, x.dtype if not hasattr(labels, "dtype") else None)
    return jnp.maximum(x, 0) - x * z + jnp.log1p(jnp.exp(-jnp.abs(x)))


def weighted_cross_entropy_with_logits(
    labels: Any = None, logits: Any = None, pos_weight: Any = None, name: str | None = None
) -> Any:
    """Return the cross entropy of independent binary classes, with positive ones weighted.

    Example:
        >>> tf.nn.weighted_cross_entropy_with_logits(1.0, 0.0, 2.0)
        Array(1.3862944, dtype=float32)
    """
    x, z = as_tensor(logits), as_tensor(labels)
    factor = 1 + (as_tensor(pos_weight, x.dtype) - 1) * z
    return (1 - z) * x + factor * (jnp.log1p(jnp.exp(-jnp.abs(x))) + jax.nn.relu(-x))


def softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, axis: Any = -1, name: str | None = None
) -> Any:
    """Return the cross entropy between each row of labels and the softmax of logits.

    Example:
        >>> tf.nn.softmax_cross_entropy_with_logits([[0.0, 1.0]], [[0.0, 0.0]])
        Array([0.6931472], dtype=float32)
    """
    x = as_tensor(logits)
    z = as_tensor(labels, x.dtype if not hasattr(labels, "dtype") else None)
    return -jnp.sum(z * jax.nn.log_softmax(x, axis), axis)


def sparse_softmax_cross_entropy_with_logits(
    labels: Any, logits: Any, name: str | None = None
) -> Any:
    """Return the cross entropy between class indices and the softmax of logits.

    Example:
        >>> tf.nn.sparse_softmax_cross_entropy_with_logits([1], [[0.0, 0.0]])
        Array([0.6931472], dtype=float32)
    """
    scores = jax.nn.log_softmax(as_tensor(logits), -1)
    return -jnp.take_along_axis(scores, as_tensor(labels)[..., None], -1)[..., 0]


def log_poisson_loss(
    targets: Any, log_input: Any, compute_full_loss: Any = False, name: str | None = None
) -> Any:
    """Return the negative log-likelihood of counts under a Poisson distribution.

    Example:
        >>> tf.nn.log_poisson_loss(1.0, 0.0)
        Array(1., dtype=float32)
    """
    z, x = as_tensor(targets), as_tensor(log_input)
    loss = jnp.exp(x) - x * z
    if not compute_full_loss:
        return loss
    stirling = z * jnp.log(z) - z + 0.5 * jnp.log(2 * jnp.pi * z)
    return loss + jnp.where((z >= 0) & (z <= 1), jnp.zeros_like(z), stirling)


def _letters(rank: Any, data_format: Any) -> Any:
    """Return JAX's names of the axes of inputs and filters."""
    space = "HWD"[: rank - 2] if rank < 5 else "DHW"
    is_first = data_format is not None and data_format.startswith("NC")
    return (f"NC{space}" if is_first else f"N{space}C", f"{space}IO")


def _per_axis(value: Any, rank: Any, data_format: Any) -> Any:
    """Return the strides or dilations of the spatial axes."""
    sizes = ints(1 if value is None else value)
    if len(sizes) == 1:
        return sizes * (rank - 2)
    if len(sizes) == rank - 2:
        return sizes
    is_first = data_format is not None and data_format.startswith("NC")
    return sizes[2:] if is_first else sizes[1:-1]


def _padding(padding: Any, rank: Any, data_format: Any) -> Any:
    if isinstance(padding, str):
        return padding.upper()
    pairs = [tuple(int(w) for w in pair) for pair in padding]
    if len(pairs) == rank - 2:
        return pairs
    is_first = data_format is not None and data_format.startswith("NC")
    return pairs[2:] if is_first else pairs[1:-1]


def convolution(
    input: Any,
    filters: Any,
    strides: Any = None,
    padding: Any = "VALID",
    data_format: Any = None,
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve over one, two or three axes.

    Example:
        >>> tf.nn.convolution(jnp.ones((1, 3, 1)), jnp.ones((2, 1, 1)))[0, :, 0]
        Array([2., 2.], dtype=float32)
    """
    x, kernel = as_tensor(input), as_tensor(filters)
    inner, outer = _letters(x.ndim, data_format)
    groups = x.shape[inner.index("C")] // kernel.shape[-2]
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        _per_axis(strides, x.ndim, data_format),
        _padding(padding, x.ndim, data_format),
        rhs_dilation=_per_axis(dilations, x.ndim, data_format),
        dimension_numbers=(inner, outer, inner),
        feature_group_count=groups,
    )


def conv1d(
    input: Any,
    filters: Any,
    stride: Any,
    padding: Any,
    data_format: Any = "NWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve over one axis.

    Example:
        >>> tf.nn.conv1d(jnp.ones((1, 3, 1)), jnp.ones((2, 1, 1)), 1, "VALID")[0, :, 0]
        Array([2., 2.], dtype=float32)
    """
    return convolution(input, filters, stride, padding, data_format, dilations)


def conv2d(
    input: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: Any = "NHWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve over two axes.

    Example:
        >>> tf.nn.conv2d(jnp.ones((1, 2, 2, 1)), jnp.ones((2, 2, 1, 1)), 1, "VALID").item()
        4.0
    """
    return convolution(input, filters, strides, padding, data_format, dilations)


def conv3d(
    input: Any,
    filters: Any,
    strides: Any,
    padding: Any,
    data_format: Any = "NDHWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve over three axes.

    Example:
        >>> tf.nn.conv3d(jnp.ones((1, 2, 2, 2, 1)), jnp.ones((2, 2, 2, 1, 1)), [1, 1, 1, 1, 1], "VALID").item()
        8.0
    """
    return convolution(input, filters, strides, padding, data_format, dilations)


def depthwise_conv2d(
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve each channel with its own filters.

    Example:
        >>> tf.nn.depthwise_conv2d(jnp.ones((1, 2, 2, 1)), jnp.ones((2, 2, 1, 1)), [1, 1, 1, 1], "VALID").item()
        4.0
    """
    kernel = as_tensor(filter)
    height, width, channels, multiplier = kernel.shape
    kernel = kernel.reshape(height, width, 1, channels * multiplier)
    return convolution(input, kernel, strides, padding, data_format, dilations)


def separable_conv2d(
    input: Any,
    depthwise_filter: Any,
    pointwise_filter: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Convolve each channel, then mix the channels.

    Example:
        >>> tf.nn.separable_conv2d(jnp.ones((1, 2, 2, 1)), jnp.ones((2, 2, 1, 1)), jnp.ones((1, 1, 1, 1)), [1, 1, 1, 1], "VALID").item()
        4.0
    """
    x = depthwise_conv2d(input, depthwise_filter, strides, padding, data_format, dilations)
    return convolution(x, pointwise_filter, 1, "VALID", data_format)


def atrous_conv2d(
    value: Any, filters: Any, rate: Any, padding: Any, name: str | None = None
) -> Any:
    """Convolve with dilated filters.

    Example:
        >>> tf.nn.atrous_conv2d(jnp.ones((1, 3, 3, 1)), jnp.ones((2, 2, 1, 1)), 2, "VALID").item()
        4.0
    """
    return convolution(value, filters, 1, padding, None, rate)


def conv2d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: Any = "NHWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Apply the transpose of `conv2d`, which is its gradient (a "deconvolution").

    Example:
        >>> tf.nn.conv2d_transpose(jnp.ones((1, 2, 2, 1)), jnp.ones((2, 2, 1, 1)), [1, 4, 4, 1], 2)[0, :, :, 0]
        Array([[1., 1., 1., 1.],
               [1., 1., 1., 1.],
               [1., 1., 1., 1.],
               [1., 1., 1., 1.]], dtype=float32)
    """
    x, kernel = as_tensor(input), as_tensor(filters)
    zeros = jax.ShapeDtypeStruct(ints(output_shape), x.dtype)

    def forward(y: Any) -> Any:
        return convolution(y, kernel, strides, padding, data_format, dilations)

    [result] = jax.linear_transpose(forward, zeros)(x)
    return result


def conv1d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: Any = "NWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Apply the transpose of `conv1d`.

    Example:
        >>> tf.nn.conv1d_transpose(jnp.ones((1, 2, 1)), jnp.ones((2, 1, 1)), [1, 4, 1], 2)[0, :, 0]
        Array([1., 1., 1., 1.], dtype=float32)
    """
    return conv2d_transpose(input, filters, output_shape, strides, padding, data_format, dilations)


def conv3d_transpose(
    input: Any,
    filters: Any,
    output_shape: Any,
    strides: Any,
    padding: Any = "SAME",
    data_format: Any = "NDHWC",
    dilations: Any = None,
    name: str | None = None,
) -> Any:
    """Apply the transpose of `conv3d`.

    Example:
        >>> tf.nn.conv3d_transpose(jnp.ones((1, 1, 1, 1, 1)), jnp.ones((2, 2, 2, 1, 1)), [1, 2, 2, 2, 1], 2).shape
        (1, 2, 2, 2, 1)
    """
    return conv2d_transpose(input, filters, output_shape, strides, padding, data_format, dilations)


def _window(value: Any, rank: Any, data_format: Any) -> Any:
    """Return a window size for every axis of the input."""
    sizes = ints(value)
    if len(sizes) == rank:
        return sizes
    space = sizes * (rank - 2) if len(sizes) == 1 else sizes
    is_first = data_format is not None and data_format.startswith("NC")
    return (1, 1, *space) if is_first else (1, *space, 1)


def max_pool(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    name: str | None = None,
) -> Any:
    """Return the maximum of each window.

    Example:
        >>> tf.nn.max_pool(jnp.arange(4.0).reshape(1, 4, 1), 2, 2, "VALID")[0, :, 0]
        Array([1., 3.], dtype=float32)
    """
    x = as_tensor(input)
    window, step = (_window(v, x.ndim, data_format) for v in (ksize, strides))
    low = -jnp.inf if x.dtype.kind == "f" else jnp.iinfo(x.dtype).min
    return jax.lax.reduce_window(
        x,
        jnp.asarray(low, x.dtype),
        jax.lax.max,
        window,
        step,
        _pool_padding(padding, x.ndim, data_format),
    )


def avg_pool(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: Any = None,
    name: str | None = None,
) -> Any:
    """Return the mean of each window.

    Example:
        >>> tf.nn.avg_pool(jnp.arange(4.0).reshape(1, 4, 1), 2, 2, "VALID")[0, :, 0]
        Array([0.5, 2.5], dtype=float32)
    """
    x = as_tensor(input)
    window, step = (_window(v, x.ndim, data_format) for v in (ksize, strides))
    pad = _pool_padding(padding, x.ndim, data_format)
    total = jax.lax.reduce_window(x, jnp.zeros((), x.dtype), jax.lax.add, window, step, pad)
    count = jax.lax.reduce_window(
        jnp.ones_like(x), jnp.zeros((), x.dtype), jax.lax.add, window, step, pad
    )
    return total / count


def _pool_padding(padding: Any, rank: Any, data_format: Any) -> Any:
    if isinstance(padding, str):
        return padding.upper()
    pairs = [tuple(int(w) for w in pair) for pair in padding]
    if len(pairs) == rank:
        return pairs
    is_first = data_format is not None and data_format.startswith("NC")
    return [(0, 0), (0, 0), *pairs] if is_first else [(0, 0), *pairs, (0, 0)]


def max_pool1d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NWC",
    name: str | None = None,
) -> Any:
    """Return the maximum of each window of a 1-D input.

    Example:
        >>> tf.nn.max_pool1d(jnp.ones((1, 4, 1)), 2, 2, "VALID").size
        2
    """
    return max_pool(input, ksize, strides, padding, data_format)


def max_pool2d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> Any:
    """Return the maximum of each window of a 2-D input.

    Example:
        >>> tf.nn.max_pool2d(jnp.ones((1, 2, 2, 1)), 2, 2, "VALID").size
        1
    """
    return max_pool(input, ksize, strides, padding, data_format)


def max_pool3d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    name: str | None = None,
) -> Any:
    """Return the maximum of each window of a 3-D input.

    Example:
        >>> tf.nn.max_pool3d(jnp.ones((1, 2, 2, 2, 1)), 2, 2, "VALID").size
        1
    """
    return max_pool(input, ksize, strides, padding, data_format)


def avg_pool1d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NWC",
    name: str | None = None,
) -> Any:
    """Return the mean of each window of a 1-D input.

    Example:
        >>> tf.nn.avg_pool1d(jnp.ones((1, 4, 1)), 2, 2, "VALID").size
        2
    """
    return avg_pool(input, ksize, strides, padding, data_format)


def avg_pool2d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NHWC",
    name: str | None = None,
) -> Any:
    """Return the mean of each window of a 2-D input.

    Example:
        >>> tf.nn.avg_pool2d(jnp.ones((1, 2, 2, 1)), 2, 2, "VALID").size
        1
    """
    return avg_pool(input, ksize, strides, padding, data_format)


def avg_pool3d(
    input: Any,
    ksize: Any,
    strides: Any,
    padding: Any,
    data_format: str = "NDHWC",
    name: str | None = None,
) -> Any:
    """Return the mean of each window of a 3-D input.

    Example:
        >>> tf.nn.avg_pool3d(jnp.ones((1, 2, 2, 2, 1)), 2, 2, "VALID").size
        1
    """
    return avg_pool(input, ksize, strides, padding, data_format)


def depth_to_space(
    input: Any, block_size: Any, data_format: Any = "NHWC", name: str | None = None
) -> Any:
    """Rearrange channels into spatial blocks.

    Example:
        >>> tf.nn.depth_to_space(jnp.arange(4).reshape(1, 1, 1, 4), 2)[0, :, :, 0]
        Array([[0, 1],
               [2, 3]], dtype=int32)
    """
    x = as_tensor(input)
    xp = library(x)
    if data_format == "NCHW":
        return xp.moveaxis(depth_to_space(xp.moveaxis(x, 1, -1), block_size), -1, 1)
    batch, height, width, depth = x.shape
    x = x.reshape(batch, height, width, block_size, block_size, depth // block_size**2)
    return xp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(
        batch, height * block_size, width * block_size, -1
    )


def space_to_depth(
    input: Any, block_size: Any, data_format: Any = "NHWC", name: str | None = None
) -> Any:
    """Rearrange spatial blocks into channels.

    Example:
        >>> tf.nn.space_to_depth(jnp.arange(4).reshape(1, 2, 2, 1), 2)[0, 0, 0]
        Array([0, 1, 2, 3], dtype=int32)
    """
    x = as_tensor(input)
    xp = library(x)
    if data_format == "NCHW":
        return xp.moveaxis(space_to_depth(xp.moveaxis(x, 1, -1), block_size), -1, 1)
    batch, height, width, depth = x.shape
    x = x.reshape(batch, height // block_size, block_size, width // block_size, block_size, depth)
    return xp.transpose(x, (0, 1, 3, 2, 4, 5)).reshape(
        batch, height // block_size, width // block_size, -1
    )


def local_response_normalization(
    input: Any,
    depth_radius: Any = 5,
    bias: Any = 1,
    alpha: Any = 1,
    beta: Any = 0.5,
    name: str | None = None,
) -> Any:
    """Normalize each entry by the sum of squares of neighbouring channels.

    Example:
        >>> tf.nn.local_response_normalization(jnp.ones((1, 1, 1, 1))).item()
        0.7071067690849304
    """
    x = as_tensor(input)
    size = 2 * depth_radius + 1
    squares = jax.lax.reduce_window(
        jnp.square(x),
        jnp.zeros((), x.dtype),
        jax.lax.add,
        (1, 1, 1, size),
        (1, 1, 1, 1),
        [(0, 0), (0, 0), (0, 0), (depth_radius, depth_radius)],
    )
    return x / (bias + alpha * squares) ** beta


lrn = local_response_normalization


def normalize_moments(
    counts: Any, mean_ss: Any, variance_ss: Any, shift: Any, name: str | None = None
) -> Any:
    """Return the mean and the variance, given a count, sums and sums of squares.

    Example:
        >>> tf.nn.normalize_moments(2.0, 4.0, 10.0, None)
        (Array(2., dtype=float32), Array(1., dtype=float32))
    """
    count = as_tensor(counts)
    scaled = as_tensor(mean_ss) / count
    mean = scaled if shift is None else scaled + shift
    return mean, as_tensor(variance_ss) / count - jnp.square(scaled)
