"""Functions of `tf.linalg`."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.tf_ops.core import as_tensor, as_tensors, axes, ints, library


def matmul(
    a: Any,
    b: Any,
    transpose_a: Any = False,
    transpose_b: Any = False,
    adjoint_a: Any = False,
    adjoint_b: Any = False,
    a_is_sparse: Any = False,
    b_is_sparse: Any = False,
    output_type: Any = None,
    grad_a: Any = False,
    grad_b: Any = False,
    name: str | None = None,
) -> Any:
    """Multiply matrices, optionally transposed.

    Example:
        >>> tf.matmul([[1.0, 2.0]], [[3.0, 4.0]], transpose_b=True)
        Array([[11.]], dtype=float32)
    """
    x, y = as_tensors(a, b)
    xp = library(x, y)
    x = _swapped(x, transpose_a, adjoint_a)
    y = _swapped(y, transpose_b, adjoint_b)
    result = xp.matmul(x, y)
    return result if output_type is None else result.astype(output_type)


def _swapped(x: Any, is_transposed: Any, is_adjoint: Any) -> Any:
    if not (is_transposed or is_adjoint):
        return x
    x = library(x).swapaxes(x, -1, -2)
    return library(x).conj(x) if is_adjoint else x


def matvec(
    a: Any,
    b: Any,
    transpose_a: Any = False,
    adjoint_a: Any = False,
    a_is_sparse: Any = False,
    b_is_sparse: Any = False,
    name: str | None = None,
) -> Any:
    """Multiply matrices and vectors.

    Example:
        >>> tf.linalg.matvec([[1.0, 2.0]], [3.0, 4.0])
        Array([11.], dtype=float32)
    """
    x, y = as_tensors(a, b)
    return library(x).matmul(_swapped(x, transpose_a, adjoint_a), y[..., None])[..., 0]


def matrix_transpose(a: Any, name: str | None = "matrix_transpose", conjugate: Any = False) -> Any:
    """Swap the last two axes.

    Example:
        >>> tf.linalg.matrix_transpose(jnp.ones((2, 3))).shape
        (3, 2)
    """
    return _swapped(as_tensor(a), True, conjugate)


def adjoint(matrix: Any, name: str | None = None) -> Any:
    """Return the conjugate transpose.

    Example:
        >>> tf.linalg.adjoint(jnp.ones((2, 3))).shape
        (3, 2)
    """
    return _swapped(as_tensor(matrix), True, True)


def tensordot(a: Any, b: Any, axes: Any, name: str | None = None) -> Any:
    """Contract axes of two arrays.

    Example:
        >>> tf.tensordot(jnp.ones(2), jnp.ones(2), 1)
        Array(2., dtype=float32)
    """
    x, y = as_tensors(a, b)
    dims = int(axes) if np.ndim(axes) == 0 else [ints(each) for each in axes]
    return library(x).tensordot(x, y, dims)


def einsum(equation: Any, *inputs: Any, **kwargs: Any) -> Any:
    """Contract arrays along the axes that an equation such as ``"ij,jk->ik"`` names.

    Example:
        >>> tf.einsum("i,i->", jnp.ones(2), jnp.ones(2))
        Array(2., dtype=float32)
    """
    parts = as_tensors(*inputs)
    return library(parts).einsum(equation, *parts)


def norm(
    tensor: Any,
    ord: Any = "euclidean",
    axis: Any = None,
    keepdims: Any = None,
    name: str | None = None,
) -> Any:
    """Return the norm of vectors or matrices.

    Example:
        >>> tf.norm(jnp.array([3.0, 4.0]))
        Array(5., dtype=float32)
    """
    x = as_tensor(tensor)
    dims = axes(axis)
    xp = library(x)
    if ord in ("euclidean", "fro", 2) and not (isinstance(dims, tuple) and ord == 2):
        return xp.sqrt(xp.sum(xp.square(xp.abs(x)), dims, keepdims=bool(keepdims)))
    if dims is None:
        x = x.reshape(-1)
    return xp.linalg.norm(x, ord, dims, bool(keepdims))


def normalize(
    tensor: Any, ord: Any = "euclidean", axis: Any = None, name: str | None = None
) -> Any:
    """Divide an array by its norm; return the quotient and the norm.

    Example:
        >>> tf.linalg.normalize(jnp.array([3.0, 4.0]))
        (Array([0.6, 0.8], dtype=float32), Array([5.], dtype=float32))
    """
    size = norm(tensor, ord, axis, keepdims=True)
    x = as_tensor(tensor)
    return x / size.reshape(size.shape if axis is not None else (1,) * x.ndim), size


def diag(
    diagonal: Any,
    name: str | None = "diag",
    k: Any = 0,
    num_rows: Any = -1,
    num_cols: Any = -1,
    padding_value: Any = 0,
    align: Any = "RIGHT_LEFT",
) -> Any:
    """Return matrices with the given diagonal, and zeros elsewhere.

    Example:
        >>> tf.linalg.diag(jnp.array([1, 2]))
        Array([[1, 0],
               [0, 2]], dtype=int32)
    """
    x = as_tensor(diagonal)
    xp, k = library(x), operator.index(k)
    size = x.shape[-1] + abs(k)
    rows = size if num_rows < 0 else num_rows
    columns = size if num_cols < 0 else num_cols
    result = xp.full((*x.shape[:-1], rows, columns), padding_value, x.dtype)
    return set_diag(result, x, k=k)


def diag_part(
    input: Any,
    name: str | None = "diag_part",
    k: Any = 0,
    padding_value: Any = 0,
    align: Any = "RIGHT_LEFT",
) -> Any:
    """Return a diagonal of matrices.

    Example:
        >>> tf.linalg.diag_part(jnp.eye(2))
        Array([1., 1.], dtype=float32)
    """
    return library(input).diagonal(as_tensor(input), operator.index(k), -2, -1)


def set_diag(
    input: Any, diagonal: Any, name: str | None = "set_diag", k: Any = 0, align: Any = "RIGHT_LEFT"
) -> Any:
    """Return matrices with their diagonal replaced.

    Example:
        >>> tf.linalg.set_diag(jnp.zeros((2, 2)), jnp.array([1.0, 2.0]))
        Array([[1., 0.],
               [0., 2.]], dtype=float32)
    """
    x, values = as_tensor(input), as_tensor(diagonal)
    xp, k = library(x), operator.index(k)
    rows, columns = x.shape[-2:]
    i, j = np.arange(rows)[:, None], np.arange(columns)[None]
    place = np.clip(i if k >= 0 else j + 0 * i, 0, values.shape[-1] - 1) + 0 * j
    return xp.where(j - i == k, values[..., place], x)


def tensor_diag(diagonal: Any, name: str | None = None) -> Any:
    """Return an array of twice the rank with the given entries on its diagonal.

    Example:
        >>> tf.linalg.tensor_diag(jnp.array([1, 2]))
        Array([[1, 0],
               [0, 2]], dtype=int32)
    """
    x = as_tensor(diagonal)
    return library(x).diag(x.reshape(-1)).reshape(*x.shape, *x.shape)


def tensor_diag_part(input: Any, name: str | None = None) -> Any:
    """Return the diagonal of an array of even rank.

    Example:
        >>> tf.linalg.tensor_diag_part(jnp.eye(2))
        Array([1., 1.], dtype=float32)
    """
    x = as_tensor(input)
    shape = x.shape[: x.ndim // 2]
    return library(x).diag(x.reshape(int(np.prod(shape)), -1)).reshape(shape)


def band_part(input: Any, num_lower: Any, num_upper: Any, name: str | None = None) -> Any:
    """Keep a band around the diagonal; a negative bound keeps a whole triangle.

    Example:
        >>> tf.linalg.band_part(jnp.ones((2, 2)), -1, 0)
        Array([[1., 0.],
               [1., 1.]], dtype=float32)
    """
    x = as_tensor(input)
    i, j = np.arange(x.shape[-2])[:, None], np.arange(x.shape[-1])[None]
    low = (i - j <= num_lower) if num_lower >= 0 else np.bool_(True)
    high = (j - i <= num_upper) if num_upper >= 0 else np.bool_(True)
    return library(x).where(low & high, x, library(x).zeros_like(x))


def trace(x: Any, name: str | None = None) -> Any:
    """Return the sum of the diagonal.

    Example:
        >>> tf.linalg.trace(jnp.eye(2))
        Array(2., dtype=float32)
    """
    return library(x).trace(as_tensor(x), axis1=-2, axis2=-1)


def cross(a: Any, b: Any, name: str | None = None) -> Any:
    """Return the cross product of vectors.

    Example:
        >>> tf.linalg.cross([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
        Array([0., 0., 1.], dtype=float32)
    """
    x, y = as_tensors(a, b)
    return library(x).cross(x, y)


def inv(input: Any, adjoint: Any = False, name: str | None = None) -> Any:
    """Return the inverse of matrices.

    Example:
        >>> tf.linalg.inv(2 * jnp.eye(2))
        Array([[0.5, 0. ],
               [0. , 0.5]], dtype=float32)
    """
    return library(input).linalg.inv(_swapped(as_tensor(input), adjoint, adjoint))


def pinv(a: Any, rcond: Any = None, validate_args: Any = False, name: str | None = None) -> Any:
    """Return the pseudoinverse of matrices.

    Example:
        >>> tf.linalg.pinv(2 * jnp.eye(2))
        Array([[0.5, 0. ],
               [0. , 0.5]], dtype=float32)
    """
    x = as_tensor(a)
    limit = 10 * max(x.shape[-2:]) * np.finfo(x.dtype).eps if rcond is None else rcond
    return library(x).linalg.pinv(x, limit)


def det(input: Any, name: str | None = None) -> Any:
    """Return the determinant of matrices.

    Example:
        >>> tf.linalg.det(2 * jnp.eye(2))
        Array(4., dtype=float32)
    """
    return library(input).linalg.det(as_tensor(input))


def slogdet(input: Any, name: str | None = None) -> Any:
    """Return the sign of the determinant, and the logarithm of its absolute value.

    Example:
        >>> tf.linalg.slogdet(jnp.eye(2))[0]
        Array(1., dtype=float32)
    """
    return library(input).linalg.slogdet(as_tensor(input))


def logdet(matrix: Any, name: str | None = None) -> Any:
    """Return the logarithm of the determinant of positive definite matrices.

    Example:
        >>> tf.linalg.logdet(jnp.eye(2))
        Array(0., dtype=float32)
    """
    x = as_tensor(matrix)
    factor = library(x).linalg.cholesky(x)
    return 2 * library(x).log(library(x).diagonal(factor, 0, -2, -1)).sum(-1)


def cholesky(input: Any, name: str | None = None) -> Any:
    """Return the Cholesky factor of matrices.

    Example:
        >>> tf.linalg.cholesky(4 * jnp.eye(2))
        Array([[2., 0.],
               [0., 2.]], dtype=float32)
    """
    return library(input).linalg.cholesky(as_tensor(input))


def cholesky_solve(chol: Any, rhs: Any, name: str | None = None) -> Any:
    """Solve systems of linear equations, given the Cholesky factors of their matrices.

    Example:
        >>> tf.linalg.cholesky_solve(2 * jnp.eye(2), jnp.ones((2, 1)))
        Array([[0.25],
               [0.25]], dtype=float32)
    """
    return jax.scipy.linalg.cho_solve((as_tensor(chol), True), as_tensor(rhs))


def solve(matrix: Any, rhs: Any, adjoint: Any = False, name: str | None = None) -> Any:
    """Solve systems of linear equations.

    Example:
        >>> tf.linalg.solve(2 * jnp.eye(2), jnp.ones((2, 1)))
        Array([[0.5],
               [0.5]], dtype=float32)
    """
    x, y = as_tensors(matrix, rhs)
    return library(x).linalg.solve(_swapped(x, adjoint, adjoint), y)


def triangular_solve(
    matrix: Any, rhs: Any, lower: Any = True, adjoint: Any = False, name: str | None = None
) -> Any:
    """Solve systems of linear equations with triangular matrices.

    Example:
        >>> tf.linalg.triangular_solve(2 * jnp.eye(2), jnp.ones((2, 1)))
        Array([[0.5],
               [0.5]], dtype=float32)
    """
    x, y = as_tensors(matrix, rhs)
    return jax.lax.linalg.triangular_solve(
        x, y, left_side=True, lower=lower, transpose_a=adjoint, conjugate_a=adjoint
    )


def lstsq(
    matrix: Any, rhs: Any, l2_regularizer: Any = 0.0, fast: Any = True, name: str | None = None
) -> Any:
    """Return the least squares solutions of systems of linear equations.

    Example:
        >>> tf.linalg.lstsq(2 * jnp.eye(2), jnp.ones((2, 1)))
        Array([[0.5],
               [0.5]], dtype=float32)
    """
    x, y = as_tensors(matrix, rhs)
    left = _swapped(x, True, True)
    gram = left @ x + l2_regularizer * library(x).eye(x.shape[-1], dtype=x.dtype)
    return library(x).linalg.solve(gram, left @ y)


def qr(input: Any, full_matrices: Any = False, name: str | None = None) -> Any:
    """Return the QR decomposition.

    Example:
        >>> tf.linalg.qr(jnp.eye(2))[1].shape
        (2, 2)
    """
    return library(input).linalg.qr(as_tensor(input), "complete" if full_matrices else "reduced")


def svd(
    tensor: Any, full_matrices: Any = False, compute_uv: Any = True, name: str | None = None
) -> Any:
    """Return singular values, then left and right singular vectors in columns.

    Example:
        >>> tf.linalg.svd(jnp.eye(2))[0]
        Array([1., 1.], dtype=float32)
    """
    x = as_tensor(tensor)
    if not compute_uv:
        return library(x).linalg.svd(x, full_matrices, compute_uv=False)
    u, s, v = library(x).linalg.svd(x, full_matrices)
    return s, u, _swapped(v, True, True)


def eigh(tensor: Any, name: str | None = None) -> Any:
    """Return eigenvalues and eigenvectors of symmetric matrices.

    Example:
        >>> tf.linalg.eigh(jnp.eye(2))[0]
        Array([1., 1.], dtype=float32)
    """
    return tuple(library(tensor).linalg.eigh(as_tensor(tensor)))


def eigvalsh(tensor: Any, name: str | None = None) -> Any:
    """Return the eigenvalues of symmetric matrices.

    Example:
        >>> tf.linalg.eigvalsh(jnp.eye(2))
        Array([1., 1.], dtype=float32)
    """
    return library(tensor).linalg.eigvalsh(as_tensor(tensor))


def expm(input: Any, name: str | None = None) -> Any:
    """Return the exponential of matrices.

    Example:
        >>> tf.linalg.expm(jnp.zeros((2, 2)))
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
    """
    return jax.scipy.linalg.expm(as_tensor(input))


def sqrtm(input: Any, name: str | None = None) -> Any:
    """Return the matrix square root of a symmetric positive matrix.

    Example:
        >>> tf.linalg.sqrtm(4 * jnp.eye(2))
        Array([[2., 0.],
               [0., 2.]], dtype=float32)
    """
    values, vectors = jnp.linalg.eigh(as_tensor(input))
    return vectors * jnp.sqrt(values)[..., None, :] @ _swapped(vectors, True, True)


def matrix_rank(
    a: Any, tol: Any = None, validate_args: Any = False, name: str | None = None
) -> Any:
    """Return the rank of matrices.

    Example:
        >>> tf.linalg.matrix_rank(jnp.eye(2))
        Array(2, dtype=int32)
    """
    x = as_tensor(a)
    s = library(x).linalg.svd(x, compute_uv=False)
    limit = (
        max(x.shape[-2:]) * np.finfo(x.dtype).eps * s.max(-1, keepdims=True) if tol is None else tol
    )
    return (s > limit).sum(-1).astype(np.int32)
