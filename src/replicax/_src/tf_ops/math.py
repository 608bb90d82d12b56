"""Functions of `tf.math`, and those of `tf` with the same names."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.tf_ops.core import as_tensor, as_tensors, axes, library, result_dtype, shaped


def _unary(name: str, x: Any) -> Any:
    value = as_tensor(x)
    xp = library(value)
    if hasattr(xp, name):
        return shaped(getattr(xp, name)(value), x)
    result = getattr(jsp, name)(value)
    return np.asarray(result, value.dtype) if xp is np else result


def _binary(name: str, x: Any, y: Any) -> Any:
    first, second = as_tensors(x, y)
    return shaped(getattr(library(first, second), name)(first, second), x, y)


def abs(x: Any, name: str | None = None) -> Any:
    """Return the absolute value.

    Example:
        >>> tf.math.abs(-1.5)
        Array(1.5, dtype=float32)
    """
    return _unary("abs", x)


def acos(x: Any, name: str | None = None) -> Any:
    """Return the inverse cosine.

    Example:
        >>> tf.math.acos(1.0)
        Array(0., dtype=float32)
    """
    return _unary("arccos", x)


def acosh(x: Any, name: str | None = None) -> Any:
    """Return the inverse hyperbolic cosine.

    Example:
        >>> tf.math.acosh(1.0)
        Array(0., dtype=float32)
    """
    return _unary("arccosh", x)


def angle(input: Any, name: str | None = None) -> Any:
    """Return the angle of complex numbers.

    Example:
        >>> tf.math.angle(1.0)
        Array(0., dtype=float32)
    """
    return _unary("angle", input)


def asin(x: Any, name: str | None = None) -> Any:
    """Return the inverse sine.

    Example:
        >>> tf.math.asin(0.0)
        Array(0., dtype=float32)
    """
    return _unary("arcsin", x)


def asinh(x: Any, name: str | None = None) -> Any:
    """Return the inverse hyperbolic sine.

    Example:
        >>> tf.math.asinh(0.0)
        Array(0., dtype=float32)
    """
    return _unary("arcsinh", x)


def atan(x: Any, name: str | None = None) -> Any:
    """Return the inverse tangent.

    Example:
        >>> tf.math.atan(0.0)
        Array(0., dtype=float32)
    """
    return _unary("arctan", x)


def atanh(x: Any, name: str | None = None) -> Any:
    """Return the inverse hyperbolic tangent.

    Example:
        >>> tf.math.atanh(0.0)
        Array(0., dtype=float32)
    """
    return _unary("arctanh", x)


def ceil(x: Any, name: str | None = None) -> Any:
    """Round up to an integer.

    Example:
        >>> tf.math.ceil(1.2)
        Array(2., dtype=float32)
    """
    return _unary("ceil", x)


def conj(x: Any, name: str | None = None) -> Any:
    """Return the complex conjugate.

    Example:
        >>> tf.math.conj(1.0)
        Array(1., dtype=float32)
    """
    return _unary("conj", x)


def cos(x: Any, name: str | None = None) -> Any:
    """Return the cosine.

    Example:
        >>> tf.math.cos(0.0)
        Array(1., dtype=float32)
    """
    return _unary("cos", x)


def cosh(x: Any, name: str | None = None) -> Any:
    """Return the hyperbolic cosine.

    Example:
        >>> tf.math.cosh(0.0)
        Array(1., dtype=float32)
    """
    return _unary("cosh", x)


def digamma(x: Any, name: str | None = None) -> Any:
    """Return the derivative of the logarithm of the gamma function.

    Example:
        >>> tf.math.digamma(1.0)
        Array(-0.5772154, dtype=float32)
    """
    return _unary("digamma", x)


def erf(x: Any, name: str | None = None) -> Any:
    """Return the error function.

    Example:
        >>> tf.math.erf(0.0)
        Array(0., dtype=float32)
    """
    return _unary("erf", x)


def erfc(x: Any, name: str | None = None) -> Any:
    """Return the complementary error function.

    Example:
        >>> tf.math.erfc(0.0)
        Array(1., dtype=float32)
    """
    return _unary("erfc", x)


def erfinv(x: Any, name: str | None = None) -> Any:
    """Return the inverse error function.

    Example:
        >>> tf.math.erfinv(0.0)
        Array(0., dtype=float32)
    """
    return _unary("erfinv", x)


def exp(x: Any, name: str | None = None) -> Any:
    """Return the exponential.

    Example:
        >>> tf.math.exp(0.0)
        Array(1., dtype=float32)
    """
    return _unary("exp", x)


def expm1(x: Any, name: str | None = None) -> Any:
    """Return exp(x) - 1.

    Example:
        >>> tf.math.expm1(0.0)
        Array(0., dtype=float32)
    """
    return _unary("expm1", x)


def floor(x: Any, name: str | None = None) -> Any:
    """Round down to an integer.

    Example:
        >>> tf.math.floor(1.7)
        Array(1., dtype=float32)
    """
    return _unary("floor", x)


def imag(input: Any, name: str | None = None) -> Any:
    """Return the imaginary part.

    Example:
        >>> tf.math.imag(1.0)
        Array(0., dtype=float32)
    """
    return _unary("imag", input)


def is_finite(x: Any, name: str | None = None) -> Any:
    """Return whether entries are finite.

    Example:
        >>> tf.math.is_finite(1.0)
        Array(True, dtype=bool)
    """
    return _unary("isfinite", x)


def is_inf(x: Any, name: str | None = None) -> Any:
    """Return whether entries are infinite.

    Example:
        >>> tf.math.is_inf(1.0)
        Array(False, dtype=bool)
    """
    return _unary("isinf", x)


def is_nan(x: Any, name: str | None = None) -> Any:
    """Return whether entries are not a number.

    Example:
        >>> tf.math.is_nan(1.0)
        Array(False, dtype=bool)
    """
    return _unary("isnan", x)


def lgamma(x: Any, name: str | None = None) -> Any:
    """Return the logarithm of the absolute value of the gamma function.

    Example:
        >>> f"{tf.math.lgamma(4.0):.3f}"
        '1.792'
    """
    return _unary("gammaln", x)


def log(x: Any, name: str | None = None) -> Any:
    """Return the natural logarithm.

    Example:
        >>> tf.math.log(1.0)
        Array(0., dtype=float32)
    """
    return _unary("log", x)


def log1p(x: Any, name: str | None = None) -> Any:
    """Return log(1 + x).

    Example:
        >>> tf.math.log1p(0.0)
        Array(0., dtype=float32)
    """
    return _unary("log1p", x)


def logical_not(x: Any, name: str | None = None) -> Any:
    """Return the negation of truth values.

    Example:
        >>> tf.math.logical_not(True)
        Array(False, dtype=bool)
    """
    return _unary("logical_not", x)


def ndtri(x: Any, name: str | None = None) -> Any:
    """Return the inverse of the normal distribution.

    Example:
        >>> tf.math.ndtri(0.5)
        Array(0., dtype=float32)
    """
    return _unary("ndtri", x)


def negative(x: Any, name: str | None = None) -> Any:
    """Return -x.

    Example:
        >>> tf.math.negative(1.0)
        Array(-1., dtype=float32)
    """
    return _unary("negative", x)


def real(input: Any, name: str | None = None) -> Any:
    """Return the real part.

    Example:
        >>> tf.math.real(1.0)
        Array(1., dtype=float32)
    """
    return _unary("real", input)


def reciprocal(x: Any, name: str | None = None) -> Any:
    """Return 1 / x.

    Example:
        >>> tf.math.reciprocal(2.0)
        Array(0.5, dtype=float32)
    """
    return _unary("reciprocal", x)


def rint(x: Any, name: str | None = None) -> Any:
    """Round to the nearest integer; halves round to even.

    Example:
        >>> tf.math.rint(2.5)
        Array(2., dtype=float32)
    """
    return _unary("rint", x)


def round(x: Any, name: str | None = None) -> Any:
    """Round to the nearest integer; halves round to even.

    Example:
        >>> tf.math.round(2.5)
        Array(2., dtype=float32)
    """
    return _unary("round", x)


def sign(x: Any, name: str | None = None) -> Any:
    """Return the sign of each entry: -1, 0 or 1.

    Example:
        >>> tf.math.sign(-3.0)
        Array(-1., dtype=float32)
    """
    return _unary("sign", x)


def sin(x: Any, name: str | None = None) -> Any:
    """Return the sine.

    Example:
        >>> tf.math.sin(0.0)
        Array(0., dtype=float32)
    """
    return _unary("sin", x)


def sinh(x: Any, name: str | None = None) -> Any:
    """Return the hyperbolic sine.

    Example:
        >>> tf.math.sinh(0.0)
        Array(0., dtype=float32)
    """
    return _unary("sinh", x)


def sqrt(x: Any, name: str | None = None) -> Any:
    """Return the square root.

    Example:
        >>> tf.math.sqrt(4.0)
        Array(2., dtype=float32)
    """
    return _unary("sqrt", x)


def square(x: Any, name: str | None = None) -> Any:
    """Return the square.

    Example:
        >>> tf.math.square(3.0)
        Array(9., dtype=float32)
    """
    return _unary("square", x)


def tan(x: Any, name: str | None = None) -> Any:
    """Return the tangent.

    Example:
        >>> tf.math.tan(0.0)
        Array(0., dtype=float32)
    """
    return _unary("tan", x)


def tanh(x: Any, name: str | None = None) -> Any:
    """Return the hyperbolic tangent.

    Example:
        >>> tf.math.tanh(0.0)
        Array(0., dtype=float32)
    """
    return _unary("tanh", x)


def bessel_i0(x: Any, name: str | None = None) -> Any:
    """Return the modified Bessel function of order 0.

    Example:
        >>> tf.math.bessel_i0(0.0)
        Array(1.0000001, dtype=float32)
    """
    return _unary("i0", x)


def bessel_i1(x: Any, name: str | None = None) -> Any:
    """Return the modified Bessel function of order 1.

    Example:
        >>> tf.math.bessel_i1(0.0)
        Array(0., dtype=float32)
    """
    return _unary("i1", x)


def bessel_i0e(x: Any, name: str | None = None) -> Any:
    """Return the scaled modified Bessel function of order 0.

    Example:
        >>> tf.math.bessel_i0e(0.0)
        Array(1.0000001, dtype=float32)
    """
    return _unary("i0e", x)


def bessel_i1e(x: Any, name: str | None = None) -> Any:
    """Return the scaled modified Bessel function of order 1.

    Example:
        >>> tf.math.bessel_i1e(0.0)
        Array(0., dtype=float32)
    """
    return _unary("i1e", x)


def atan2(y: Any, x: Any, name: str | None = None) -> Any:
    """Return the angle of the point (x, y).

    Example:
        >>> tf.math.atan2(0.0, 1.0)
        Array(0., dtype=float32)
    """
    return _binary("arctan2", y, x)


def divide(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x / y.

    Example:
        >>> tf.math.divide(1.0, 2.0)
        Array(0.5, dtype=float32)
    """
    return _binary("true_divide", x, y)


def equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether entries are equal.

    Example:
        >>> tf.math.equal(1.0, 1.0)
        Array(True, dtype=bool)
    """
    return _binary("equal", x, y)


def floormod(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the remainder, with the sign of the divisor.

    Example:
        >>> tf.math.floormod(-7, 3)
        Array(2, dtype=int32)
    """
    return _binary("remainder", x, y)


def greater(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether x > y.

    Example:
        >>> tf.math.greater(2.0, 1.0)
        Array(True, dtype=bool)
    """
    return _binary("greater", x, y)


def greater_equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether x >= y.

    Example:
        >>> tf.math.greater_equal(2.0, 1.0)
        Array(True, dtype=bool)
    """
    return _binary("greater_equal", x, y)


def less(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether x < y.

    Example:
        >>> tf.math.less(2.0, 1.0)
        Array(False, dtype=bool)
    """
    return _binary("less", x, y)


def less_equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether x <= y.

    Example:
        >>> tf.math.less_equal(2.0, 1.0)
        Array(False, dtype=bool)
    """
    return _binary("less_equal", x, y)


def logical_and(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the elementwise logical AND.

    Example:
        >>> tf.math.logical_and(True, False)
        Array(False, dtype=bool)
    """
    return _binary("logical_and", x, y)


def logical_or(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the elementwise logical OR.

    Example:
        >>> tf.math.logical_or(True, False)
        Array(True, dtype=bool)
    """
    return _binary("logical_or", x, y)


def logical_xor(x: Any, y: Any, name: str | None = "LogicalXor") -> Any:
    """Return the elementwise logical XOR.

    Example:
        >>> tf.math.logical_xor(True, False)
        Array(True, dtype=bool)
    """
    return _binary("logical_xor", x, y)


def maximum(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the elementwise maximum.

    Example:
        >>> tf.math.maximum(1.0, 2.0)
        Array(2., dtype=float32)
    """
    return _binary("maximum", x, y)


def minimum(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the elementwise minimum.

    Example:
        >>> tf.math.minimum(1.0, 2.0)
        Array(1., dtype=float32)
    """
    return _binary("minimum", x, y)


def mod(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the remainder, with the sign of the divisor.

    Example:
        >>> tf.math.mod(-7, 3)
        Array(2, dtype=int32)
    """
    return _binary("remainder", x, y)


def multiply(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the product.

    Example:
        >>> tf.math.multiply(2.0, 3.0)
        Array(6., dtype=float32)
    """
    return _binary("multiply", x, y)


def nextafter(x1: Any, x2: Any, name: str | None = None) -> Any:
    """Return the next representable number after x, towards y.

    Example:
        >>> tf.math.nextafter(0.0, 1.0)
        Array(1.e-45, dtype=float32)
    """
    return _binary("nextafter", x1, x2)


def not_equal(x: Any, y: Any, name: str | None = None) -> Any:
    """Return whether entries differ.

    Example:
        >>> tf.math.not_equal(1.0, 1.0)
        Array(False, dtype=bool)
    """
    return _binary("not_equal", x, y)


def pow(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x to the power of y.

    Example:
        >>> tf.math.pow(2.0, 3.0)
        Array(8., dtype=float32)
    """
    return _binary("power", x, y)


def subtract(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the difference.

    Example:
        >>> tf.math.subtract(2.0, 3.0)
        Array(-1., dtype=float32)
    """
    return _binary("subtract", x, y)


def truediv(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x / y.

    Example:
        >>> tf.math.truediv(1.0, 2.0)
        Array(0.5, dtype=float32)
    """
    return _binary("true_divide", x, y)


def truncatemod(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the remainder, with the sign of the dividend.

    Example:
        >>> tf.truncatemod(-7, 3)
        Array(-1, dtype=int32)
    """
    return _binary("fmod", x, y)


def add_n(inputs: Any, name: str | None = None) -> Any:
    """Return the sum of several arrays.

    Example:
        >>> tf.add_n([1.0, 2.0])
        Array(3., dtype=float32)
    """
    return sum(as_tensor(each) for each in inputs)


def accumulate_n(
    inputs: Any, shape: Any = None, tensor_dtype: Any = None, name: str | None = None
) -> Any:
    """Return the sum of several arrays.

    Example:
        >>> tf.math.accumulate_n([1.0, 2.0])
        Array(3., dtype=float32)
    """
    return add_n(inputs)


def floordiv(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the quotient, rounded down.

    Example:
        >>> tf.math.floordiv(7, 2)
        Array(3, dtype=int32)
    """
    return _binary("floor_divide", x, y)


def divide_no_nan(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the quotient; 0 where the divisor is 0.

    Example:
        >>> tf.math.divide_no_nan(1.0, 0.0)
        Array(0., dtype=float32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    is_zero = b == 0
    return xp.where(is_zero, xp.zeros_like(a * b), a / xp.where(is_zero, xp.ones_like(b), b))


def multiply_no_nan(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the product; 0 where y is 0, also for infinite or NaN x.

    Example:
        >>> tf.math.multiply_no_nan(jnp.inf, 0.0)
        Array(0., dtype=float32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    return xp.where(b == 0, xp.zeros_like(b), a * b)


def reciprocal_no_nan(x: Any, name: str | None = None) -> Any:
    """Return 1 / x; 0 where x is 0.

    Example:
        >>> tf.math.reciprocal_no_nan(0.0)
        Array(0., dtype=float32)
    """
    value = as_tensor(x)
    return divide_no_nan(library(value).ones_like(value), value)


def truncatediv(x: Any, y: Any, name: str | None = None) -> Any:
    """Divide integers and round towards zero.

    Example:
        >>> tf.truncatediv(-7, 2)
        Array(-3, dtype=int32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    return (xp.sign(a) * xp.sign(b) * (xp.abs(a) // xp.abs(b))).astype(a.dtype)


def scalar_mul(scalar: Any, x: Any, name: str | None = None) -> Any:
    """Return the product of a number and an array.

    Example:
        >>> tf.scalar_mul(2.0, jnp.ones(2))
        Array([2., 2.], dtype=float32)
    """
    value = as_tensor(x)
    return library(value).multiply(as_tensor(scalar, value.dtype), value)


def squared_difference(x: Any, y: Any, name: str | None = None) -> Any:
    """Return the square of the difference.

    Example:
        >>> tf.math.squared_difference(1.0, 3.0)
        Array(4., dtype=float32)
    """
    a, b = as_tensors(x, y)
    return library(a, b).square(a - b)


def rsqrt(x: Any, name: str | None = None) -> Any:
    """Return 1 / sqrt(x).

    Example:
        >>> tf.math.rsqrt(4.0)
        Array(0.5, dtype=float32)
    """
    value = as_tensor(x)
    return (1 / library(value).sqrt(value)).astype(value.dtype)


def sigmoid(x: Any, name: str | None = None) -> Any:
    """Return 1 / (1 + exp(-x)).

    Example:
        >>> tf.sigmoid(0.0)
        Array(0.5, dtype=float32)
    """
    return _through_jax(jax.nn.sigmoid, x)


def log_sigmoid(x: Any, name: str | None = None) -> Any:
    """Return the logarithm of the sigmoid.

    Example:
        >>> tf.math.log_sigmoid(0.0)
        Array(-0.6931472, dtype=float32)
    """
    return _through_jax(jax.nn.log_sigmoid, x)


def softplus(features: Any, name: str | None = None) -> Any:
    """Return log(1 + exp(x)).

    Example:
        >>> tf.math.softplus(0.0)
        Array(0.6931472, dtype=float32)
    """
    return _through_jax(jax.nn.softplus, features)


def softsign(features: Any, name: str | None = None) -> Any:
    """Return ``x / (1 + |x|)``.

    Example:
        >>> tf.math.softsign(1.0)
        Array(0.5, dtype=float32)
    """
    return _through_jax(jax.nn.soft_sign, features)


def softmax(logits: Any, axis: Any = None, name: str | None = None) -> Any:
    """Return the softmax along an axis.

    Example:
        >>> tf.nn.softmax(jnp.zeros(2))
        Array([0.5, 0.5], dtype=float32)
    """
    return _through_jax(lambda x: jax.nn.softmax(x, -1 if axis is None else axis), logits)


def log_softmax(logits: Any, axis: Any = None, name: str | None = None) -> Any:
    """Return the logarithm of the softmax.

    Example:
        >>> tf.nn.log_softmax(jnp.zeros(2))
        Array([-0.6931472, -0.6931472], dtype=float32)
    """
    return _through_jax(lambda x: jax.nn.log_softmax(x, -1 if axis is None else axis), logits)


def _through_jax(function: Any, x: Any) -> Any:
    """Apply a function of JAX; on the host, to NumPy values."""
    value = as_tensor(x)
    result = function(value)
    return np.asarray(result) if library(value) is np else result


def xlogy(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x * log(y); 0 where x is 0.

    Example:
        >>> tf.math.xlogy(0.0, 0.0)
        Array(0., dtype=float32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    return xp.where(a == 0, xp.zeros_like(a * b), a * xp.log(xp.where(a == 0, xp.ones_like(b), b)))


def xlog1py(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x * log(1 + y); 0 where x is 0.

    Example:
        >>> tf.math.xlog1py(0.0, -1.0)
        Array(0., dtype=float32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    return xp.where(
        a == 0, xp.zeros_like(a * b), a * xp.log1p(xp.where(a == 0, xp.ones_like(b), b))
    )


def xdivy(x: Any, y: Any, name: str | None = None) -> Any:
    """Return x / y; 0 where x is 0.

    Example:
        >>> tf.math.xdivy(0.0, 0.0)
        Array(0., dtype=float32)
    """
    a, b = as_tensors(x, y)
    xp = library(a, b)
    return xp.where(a == 0, xp.zeros_like(a * b), a / xp.where(a == 0, xp.ones_like(b), b))


def igamma(a: Any, x: Any, name: str | None = None) -> Any:
    """Return the lower regularized incomplete gamma function.

    Example:
        >>> f"{tf.math.igamma(1.0, 1.0):.3f}"
        '0.632'
    """
    return jsp.gammainc(as_tensor(a), as_tensor(x))


def igammac(a: Any, x: Any, name: str | None = None) -> Any:
    """Return the upper regularized incomplete gamma function.

    Example:
        >>> f"{tf.math.igammac(1.0, 1.0):.3f}"
        '0.368'
    """
    return jsp.gammaincc(as_tensor(a), as_tensor(x))


def betainc(a: Any, b: Any, x: Any, name: str | None = None) -> Any:
    """Return the regularized incomplete beta function.

    Example:
        >>> f"{tf.math.betainc(1.0, 1.0, 0.5):.3f}"
        '0.500'
    """
    return jsp.betainc(as_tensor(a), as_tensor(b), as_tensor(x))


def zeta(x: Any, q: Any, name: str | None = None) -> Any:
    """Return the Hurwitz zeta function.

    Example:
        >>> tf.math.zeta(2.0, 1.0)
        Array(1.644934, dtype=float32)
    """
    return jsp.zeta(as_tensor(x), as_tensor(q))


def polygamma(a: Any, x: Any, name: str | None = None) -> Any:
    """Return a derivative of the digamma function.

    Example:
        >>> tf.math.polygamma(1.0, 1.0)
        Array(1.64493, dtype=float32)
    """
    return jsp.polygamma(as_tensor(a).astype(np.int32), as_tensor(x))


def polyval(coeffs: Any, x: Any, name: str | None = None) -> Any:
    """Evaluate a polynomial; the first coefficient is that of the highest power.

    Example:
        >>> tf.math.polyval([2.0, 1.0], 3.0)
        Array(7., dtype=float32)
    """
    value = as_tensor(x)
    result = library(value).zeros_like(value)
    for coefficient in coeffs:
        result = result * value + coefficient
    return result


def clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: str | None = None) -> Any:
    """Clip entries to a range.

    Example:
        >>> tf.clip_by_value(5.0, 0.0, 1.0)
        Array(1., dtype=float32)
    """
    value = as_tensor(t)
    low, high = (as_tensor(v, value.dtype) for v in (clip_value_min, clip_value_max))
    return library(value).clip(value, low, high)


def clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: str | None = None) -> Any:
    """Scale an array so that its norm is at most ``clip_norm``.

    Example:
        >>> tf.clip_by_norm(jnp.array([3.0, 4.0]), 1.0)
        Array([0.6, 0.8], dtype=float32)
    """
    value = as_tensor(t)
    xp = library(value)
    squares = xp.sum(value * value, axis=_axes(axes), keepdims=True)
    positive = squares > 0
    norm = xp.where(positive, xp.sqrt(xp.where(positive, squares, xp.ones_like(squares))), squares)
    limit = as_tensor(clip_norm, value.dtype)
    return value * limit / xp.maximum(norm, limit)


_axes = axes


def global_norm(t_list: Any, name: str | None = None) -> Any:
    """Return the global norm of several arrays, ignoring None.

    Example:
        >>> tf.linalg.global_norm([jnp.array([3.0]), jnp.array([4.0])])
        Array(5., dtype=float32)
    """
    parts = [_dense(t) for t in t_list if t is not None]
    return jnp.sqrt(sum(jnp.sum(jnp.square(p)) for p in parts))


def _dense(value: Any) -> Any:
    return as_tensor(
        value.values if hasattr(value, "values") and hasattr(value, "indices") else value
    )


def clip_by_global_norm(
    t_list: Any, clip_norm: Any, use_norm: Any = None, name: str | None = None
) -> Any:
    """Scale arrays so that their global norm is at most ``clip_norm``; also return that norm.

    Example:
        >>> tf.clip_by_global_norm([jnp.array([3.0]), None, jnp.array([4.0])], 1.0)
        ([Array([0.6], dtype=float32), None, Array([0.8], dtype=float32)], Array(5., dtype=float32))
    """
    norm = global_norm(t_list) if use_norm is None else as_tensor(use_norm)
    limit = as_tensor(clip_norm, norm.dtype)
    scale = limit * jnp.minimum(1 / norm, 1 / limit)
    scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan).astype(norm.dtype)
    return [
        None if t is None else as_tensor(t) * scale.astype(as_tensor(t).dtype) for t in t_list
    ], norm


def _reduction(name: str, x: Any, axis: Any, keepdims: Any) -> Any:
    value = as_tensor(x)
    result = getattr(library(value), name)(value, axis=axes(axis), keepdims=keepdims)
    return result.astype(value.dtype) if hasattr(result, "astype") else result


def reduce_max(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the largest entry over axes.

    Example:
        >>> tf.math.reduce_max(jnp.array([1.0, 3.0]))
        Array(3., dtype=float32)
    """
    return _reduction("max", input_tensor, axis, keepdims)


def reduce_min(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the smallest entry over axes.

    Example:
        >>> tf.math.reduce_min(jnp.array([1.0, 3.0]))
        Array(1., dtype=float32)
    """
    return _reduction("min", input_tensor, axis, keepdims)


def reduce_prod(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the product over axes.

    Example:
        >>> tf.math.reduce_prod(jnp.array([2.0, 3.0]))
        Array(6., dtype=float32)
    """
    return _reduction("prod", input_tensor, axis, keepdims)


def reduce_sum(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the sum over axes.

    Example:
        >>> tf.math.reduce_sum(jnp.array([2.0, 3.0]))
        Array(5., dtype=float32)
    """
    return _reduction("sum", input_tensor, axis, keepdims)


def reduce_std(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the standard deviation over axes.

    Example:
        >>> tf.math.reduce_std(jnp.array([1.0, 3.0]))
        Array(1., dtype=float32)
    """
    return _reduction("std", input_tensor, axis, keepdims)


def reduce_variance(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the variance over axes.

    Example:
        >>> tf.math.reduce_variance(jnp.array([1.0, 3.0]))
        Array(1., dtype=float32)
    """
    return _reduction("var", input_tensor, axis, keepdims)


def reduce_mean(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the mean over axes; the mean of integers is rounded towards zero.

    Example:
        >>> tf.reduce_mean(jnp.array([1.0, 3.0]))
        Array(2., dtype=float32)
    """
    value = as_tensor(input_tensor)
    xp = library(value)
    if value.dtype.kind not in "iu":
        return xp.mean(value, axis=axes(axis), keepdims=keepdims)
    total = xp.sum(value, axis=axes(axis), keepdims=keepdims, dtype=value.dtype)
    count = value.size // max(int(np.prod(np.shape(total))), 1)
    return truncatediv(total, xp.asarray(count, value.dtype))


def reduce_all(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Whether all entries along axes are true.

    Example:
        >>> tf.reduce_all(jnp.array([True, False]))
        Array(False, dtype=bool)
    """
    return library(input_tensor).all(as_tensor(input_tensor), axis=axes(axis), keepdims=keepdims)


def reduce_any(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Whether any entry along axes is true.

    Example:
        >>> tf.reduce_any(jnp.array([True, False]))
        Array(True, dtype=bool)
    """
    return library(input_tensor).any(as_tensor(input_tensor), axis=axes(axis), keepdims=keepdims)


def reduce_logsumexp(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return log(sum(exp(x))) over axes.

    Example:
        >>> tf.reduce_logsumexp(jnp.zeros(2))
        Array(0.6931472, dtype=float32)
    """
    return _through_jax(
        lambda x: jax.nn.logsumexp(x, axis=axes(axis), keepdims=keepdims), input_tensor
    )


def reduce_euclidean_norm(
    input_tensor: Any, axis: Any = None, keepdims: Any = False, name: str | None = None
) -> Any:
    """Return the square root of the sum of squares over axes.

    Example:
        >>> tf.math.reduce_euclidean_norm(jnp.array([3.0, 4.0]))
        Array(5., dtype=float32)
    """
    value = as_tensor(input_tensor)
    xp = library(value)
    return xp.sqrt(xp.sum(value * value, axis=axes(axis), keepdims=keepdims))


def count_nonzero(
    input: Any,
    axis: Any = None,
    keepdims: Any = None,
    dtype: Any = np.int64,
    name: str | None = None,
) -> Any:
    """Return the number of entries that are not zero.

    Example:
        >>> tf.math.count_nonzero(jnp.array([0, 5]))
        Array(1, dtype=int32)
    """
    value = as_tensor(input)
    result = library(value).sum(value != 0, axis=axes(axis), keepdims=bool(keepdims))
    return result.astype(result_dtype(dtype))


def zero_fraction(value: Any, name: str | None = None) -> Any:
    """Return the fraction of entries that are zero.

    Example:
        >>> tf.math.zero_fraction(jnp.array([0.0, 5.0]))
        Array(0.5, dtype=float32)
    """
    x = as_tensor(value)
    return library(x).mean(x == 0, dtype=np.float32)


def argmax(
    input: Any, axis: Any = None, output_type: Any = np.int64, name: str | None = None
) -> Any:
    """Return the index of the largest entry along an axis.

    Example:
        >>> tf.argmax(jnp.array([1, 5, 2]))
        Array(1, dtype=int32)
    """
    return (
        library(input)
        .argmax(as_tensor(input), 0 if axis is None else axis)
        .astype(result_dtype(output_type))
    )


def argmin(
    input: Any, axis: Any = None, output_type: Any = np.int64, name: str | None = None
) -> Any:
    """Return the index of the smallest entry along an axis.

    Example:
        >>> tf.argmin(jnp.array([1, 5, 2]))
        Array(0, dtype=int32)
    """
    return (
        library(input)
        .argmin(as_tensor(input), 0 if axis is None else axis)
        .astype(result_dtype(output_type))
    )


def _cumulative(name: str, x: Any, axis: Any, exclusive: Any, reverse: Any) -> Any:
    value = as_tensor(x)
    xp = library(value)
    start = xp.flip(value, axis) if reverse else value
    result = getattr(xp, name)(start, axis, dtype=value.dtype)
    if exclusive:
        first = [slice(None)] * value.ndim
        first[axis] = slice(0, -1)
        widths = [(0, 0)] * value.ndim
        widths[axis] = (1, 0)
        result = xp.pad(result[tuple(first)], widths, constant_values=int(name == "cumprod"))
    return xp.flip(result, axis) if reverse else result


def cumsum(
    x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False, name: str | None = None
) -> Any:
    """Return the cumulative sum along an axis.

    Example:
        >>> tf.cumsum(jnp.array([1, 2, 3]), exclusive=True)
        Array([0, 1, 3], dtype=int32)
    """
    return _cumulative("cumsum", x, axis, exclusive, reverse)


def cumprod(
    x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False, name: str | None = None
) -> Any:
    """Return the cumulative product along an axis.

    Example:
        >>> tf.math.cumprod(jnp.array([1, 2, 3]), reverse=True)
        Array([6, 6, 3], dtype=int32)
    """
    return _cumulative("cumprod", x, axis, exclusive, reverse)


class TopK(NamedTuple):
    """The largest entries along the last axis, and their indices.

    Example:
        >>> tf.math.top_k(jnp.array([1, 5, 2])).values
        Array([5], dtype=int32)
    """

    values: Any
    indices: Any


def top_k(
    input: Any, k: Any = 1, sorted: Any = True, index_type: Any = np.int32, name: str | None = None
) -> Any:
    """Return the largest entries along the last axis, and their indices.

    Example:
        >>> tf.math.top_k(jnp.array([1, 5, 2]), 2).indices
        Array([1, 2], dtype=int32)
    """
    value = as_tensor(input)
    if library(value) is np:
        # Reversed twice: equal entries keep their order, and no sign changes, which uint8 has not.
        rising = np.argsort(value[..., ::-1], -1, stable=True)
        order = (value.shape[-1] - 1 - rising[..., ::-1])[..., : int(k)]
        return TopK(np.take_along_axis(value, order, -1), order.astype(index_type))
    values, indices = jax.lax.top_k(value, int(k))
    return TopK(values, indices.astype(result_dtype(index_type)))


def in_top_k(targets: Any, predictions: Any, k: Any, name: str | None = None) -> Any:
    """Whether each target is among the k largest predictions.

    Example:
        >>> tf.math.in_top_k([1], [[0.1, 0.9]], 1)
        Array([ True], dtype=bool)
    """
    scores, index = as_tensor(predictions), as_tensor(targets)
    xp = library(scores)
    own = xp.take_along_axis(scores, index[:, None], 1)
    return xp.isfinite(own[:, 0]) & (xp.sum(scores > own, 1) < k)


def bincount(
    arr: Any,
    weights: Any = None,
    minlength: Any = None,
    maxlength: Any = None,
    dtype: Any = np.int32,
    name: str | None = None,
    axis: Any = None,
    binary_output: Any = False,
) -> Any:
    """Count occurrences of each integer; compiled functions must pass ``minlength``.

    Example:
        >>> tf.math.bincount(jnp.array([1, 1, 3]))
        Array([0, 2, 0, 1], dtype=int32)
    """
    value = as_tensor(arr)
    if axis is not None:
        raise InvalidArgumentError("bincount: axis is not supported. Map over the rows.")
    length = int(np.max(np.asarray(value))) + 1 if value.size and not _is_traced(value) else 0
    length = max(length, int(minlength or 0))
    if maxlength is not None:
        length = min(length, int(maxlength)) if length else int(maxlength)
    known = library(value).where(value < length, value, length).reshape(-1)
    counted: Any = None if weights is None else as_tensor(weights).reshape(-1)
    result = library(value).bincount(known, counted, minlength=length + 1)[:length]
    result = (result > 0) if binary_output else result
    return result.astype(result_dtype(dtype) if weights is None else counted.dtype)


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def confusion_matrix(
    labels: Any,
    predictions: Any,
    num_classes: Any = None,
    weights: Any = None,
    dtype: Any = np.int32,
    name: str | None = None,
) -> Any:
    """Return a matrix that counts the pairs of label (row) and prediction (column).

    Example:
        >>> tf.math.confusion_matrix([0, 1], [1, 1])
        Array([[0, 1],
               [0, 1]], dtype=int32)
    """
    real, predicted = as_tensor(labels).reshape(-1), as_tensor(predictions).reshape(-1)
    if num_classes is None:
        num_classes = int(max(np.max(np.asarray(real)), np.max(np.asarray(predicted)))) + 1
    xp, size = library(real), int(num_classes)
    each = (
        xp.ones(real.shape, result_dtype(dtype)) if weights is None else as_tensor(weights, dtype)
    )
    if xp is np:
        matrix = np.zeros((size, size), dtype)
        np.add.at(matrix, (real, predicted), each)
        return matrix
    return jnp.zeros((size, size), result_dtype(dtype)).at[real, predicted].add(each)


def invert_permutation(x: Any, name: str | None = None) -> Any:
    """Return the inverse of a permutation.

    Example:
        >>> tf.math.invert_permutation(jnp.array([2, 0, 1]))
        Array([1, 2, 0], dtype=int32)
    """
    return library(x).argsort(as_tensor(x)).astype(as_tensor(x).dtype)


def l2_normalize(
    x: Any, axis: Any = None, epsilon: Any = 1e-12, name: str | None = None, dim: Any = None
) -> Any:
    """Scale an array to norm 1 along axes.

    Example:
        >>> tf.math.l2_normalize(jnp.array([3.0, 4.0]))
        Array([0.6, 0.8], dtype=float32)
    """
    value = as_tensor(x)
    xp = library(value)
    squares = xp.sum(xp.square(value), axis=axes(dim if axis is None else axis), keepdims=True)
    return value * rsqrt(xp.maximum(squares, xp.asarray(epsilon, value.dtype)))


def lbeta(x: Any, name: str | None = None) -> Any:
    """Return the logarithm of the beta function along the last axis.

    Example:
        >>> f"{tf.math.lbeta(jnp.array([2.0, 3.0])):.3f}"
        '-2.485'
    """
    value = as_tensor(x)
    return jsp.gammaln(value).sum(-1) - jsp.gammaln(value.sum(-1))


def cumulative_logsumexp(
    x: Any, axis: Any = 0, exclusive: Any = False, reverse: Any = False, name: str | None = None
) -> Any:
    """Return the cumulative log-sum-exp along an axis.

    Example:
        >>> tf.math.cumulative_logsumexp(jnp.zeros(2))
        Array([0.       , 0.6931472], dtype=float32)
    """
    value = as_tensor(x)
    result = jax.lax.cumlogsumexp(value, axis % value.ndim, reverse=reverse)
    if not exclusive:
        return result
    moved = jnp.roll(result, -1 if reverse else 1, axis)
    edge: list[Any] = [slice(None)] * value.ndim
    edge[axis] = -1 if reverse else 0
    return moved.at[tuple(edge)].set(jnp.finfo(value.dtype).min)


def _segments(method: Any, data: Any, ids: Any, count: Any, start: Any) -> Any:
    value, place = as_tensor(data), as_tensor(ids)
    value = value.reshape(-1, *value.shape[place.ndim :])
    result = jnp.full((int(count), *value.shape[1:]), start, value.dtype)
    return getattr(result.at[place.reshape(-1)], method)(value)


def _number_of(ids: Any) -> int:
    return int(np.asarray(ids)[-1]) + 1


def unsorted_segment_sum(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Add up the rows of each segment.

    Example:
        >>> tf.math.unsorted_segment_sum(jnp.arange(3), [1, 0, 1], 2)
        Array([1, 2], dtype=int32)
    """
    return _segments("add", data, segment_ids, num_segments, 0)


def unsorted_segment_prod(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Multiply the rows of each segment.

    Example:
        >>> tf.math.unsorted_segment_prod(jnp.arange(3), [1, 0, 1], 2)
        Array([1, 0], dtype=int32)
    """
    return _segments("multiply", data, segment_ids, num_segments, 1)


def _least(dtype: Any) -> Any:
    return np.finfo(dtype).min if np.dtype(dtype).kind == "f" else np.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    return np.finfo(dtype).max if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max


def unsorted_segment_max(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Return the largest row of each segment.

    Example:
        >>> tf.math.unsorted_segment_max(jnp.arange(3), [1, 0, 1], 2)
        Array([1, 2], dtype=int32)
    """
    return _segments("max", data, segment_ids, num_segments, _least(as_tensor(data).dtype))


def unsorted_segment_min(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Return the smallest row of each segment.

    Example:
        >>> tf.math.unsorted_segment_min(jnp.arange(3), [1, 0, 1], 2)
        Array([1, 0], dtype=int32)
    """
    return _segments("min", data, segment_ids, num_segments, _most(as_tensor(data).dtype))


def unsorted_segment_mean(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Return the mean of the rows of each segment.

    Example:
        >>> tf.math.unsorted_segment_mean(jnp.arange(3.0), [1, 0, 1], 2)
        Array([1., 1.], dtype=float32)
    """
    value = as_tensor(data)
    total = unsorted_segment_sum(value, segment_ids, num_segments)
    count = unsorted_segment_sum(jnp.ones_like(value), segment_ids, num_segments)
    return total / jnp.maximum(count, 1)


def unsorted_segment_sqrt_n(
    data: Any, segment_ids: Any, num_segments: Any, name: str | None = None
) -> Any:
    """Return the sums of segments, each divided by the root of its size.

    Example:
        >>> tf.math.unsorted_segment_sqrt_n(jnp.arange(3.0), [1, 0, 1], 2)
        Array([1.       , 1.4142135], dtype=float32)
    """
    value = as_tensor(data)
    total = unsorted_segment_sum(value, segment_ids, num_segments)
    count = unsorted_segment_sum(jnp.ones_like(value), segment_ids, num_segments)
    return total / jnp.sqrt(jnp.maximum(count, 1))


def segment_sum(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Add up the rows of each segment; not in compiled functions.

    Example:
        >>> tf.math.segment_sum(jnp.arange(3), [0, 0, 1])
        Array([1, 2], dtype=int32)
    """
    return unsorted_segment_sum(data, segment_ids, _number_of(segment_ids))


def segment_prod(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Multiply the rows of each segment; not in compiled functions.

    Example:
        >>> tf.math.segment_prod(jnp.arange(3), [0, 0, 1])
        Array([0, 2], dtype=int32)
    """
    return unsorted_segment_prod(data, segment_ids, _number_of(segment_ids))


def segment_mean(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Return the mean of the rows of each segment; not in compiled functions.

    Example:
        >>> tf.math.segment_mean(jnp.arange(3.0), [0, 0, 1])
        Array([0.5, 2. ], dtype=float32)
    """
    return unsorted_segment_mean(data, segment_ids, _number_of(segment_ids))


def segment_max(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Return the largest row of each segment; not in compiled functions.

    Example:
        >>> tf.math.segment_max(jnp.arange(3), [0, 0, 1])
        Array([1, 2], dtype=int32)
    """
    return unsorted_segment_max(data, segment_ids, _number_of(segment_ids))


def segment_min(data: Any, segment_ids: Any, name: str | None = None) -> Any:
    """Return the smallest row of each segment; not in compiled functions.

    Example:
        >>> tf.math.segment_min(jnp.arange(3), [0, 0, 1])
        Array([0, 2], dtype=int32)
    """
    return unsorted_segment_min(data, segment_ids, _number_of(segment_ids))


def approx_max_k(
    operand: Any,
    k: Any,
    reduction_dimension: Any = -1,
    recall_target: Any = 0.95,
    reduction_input_size_override: Any = -1,
    aggregate_to_topk: Any = True,
    name: str | None = None,
) -> Any:
    """Return approximately the k largest entries, and their indices.

    Example:
        >>> tf.math.approx_max_k(jnp.array([1.0, 5.0]), 1)[0]
        Array([5.], dtype=float32)
    """
    return jax.lax.approx_max_k(
        as_tensor(operand),
        k,
        reduction_dimension,
        recall_target,
        reduction_input_size_override,
        aggregate_to_topk,
    )


def complex(real: Any, imag: Any, name: str | None = None) -> Any:
    """Return complex numbers with the given real and imaginary parts.

    Example:
        >>> tf.complex(1.0, 2.0)
        Array(1.+2.j, dtype=complex64)
    """
    a, b = as_tensors(real, imag)
    return a + 1j * b


def histogram_fixed_width_bins(
    values: Any, value_range: Any, nbins: Any = 100, dtype: Any = np.int32, name: str | None = None
) -> Any:
    """Return the bin index of each value, for bins of equal width.

    Example:
        >>> tf.histogram_fixed_width_bins([0.1, 0.9], [0.0, 1.0], 2)
        Array([0, 1], dtype=int32)
    """
    value = as_tensor(values)
    low, high = (as_tensor(v, value.dtype) for v in value_range)
    xp = library(value)
    bins = xp.floor((value - low) / (high - low) * nbins)
    return xp.clip(bins, 0, nbins - 1).astype(result_dtype(dtype))


def histogram_fixed_width(
    values: Any, value_range: Any, nbins: Any = 100, dtype: Any = np.int32, name: str | None = None
) -> Any:
    """Count values in bins of equal width.

    Example:
        >>> tf.histogram_fixed_width([0.1, 0.9], [0.0, 1.0], 2)
        Array([1, 1], dtype=int32)
    """
    bins = histogram_fixed_width_bins(values, value_range, nbins)
    xp = library(bins)
    return xp.bincount(bins.reshape(-1), minlength=int(nbins)).astype(result_dtype(dtype))
