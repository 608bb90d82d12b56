"""Functions of `tf.linalg`, with TensorFlow's signatures.

Example:
    >>> tf.linalg.trace(jnp.eye(2))
    Array(2., dtype=float32)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.arrays import eye
from replicax._src.tf_ops.linalg import (
    adjoint,
    band_part,
    cholesky,
    cholesky_solve,
    cross,
    det,
    diag,
    diag_part,
    eigh,
    eigvalsh,
    einsum,
    expm,
    inv,
    logdet,
    lstsq,
    matmul,
    matrix_rank,
    matrix_transpose,
    matvec,
    norm,
    normalize,
    pinv,
    qr,
    set_diag,
    slogdet,
    solve,
    sqrtm,
    svd,
    tensor_diag,
    tensor_diag_part,
    tensordot,
    trace,
    triangular_solve,
)
from replicax._src.tf_ops.math import global_norm, l2_normalize
from replicax._src.tf_ops.symbolic import accept_symbolic

__all__ = [
    "adjoint",
    "band_part",
    "cholesky",
    "cholesky_solve",
    "cross",
    "det",
    "diag",
    "diag_part",
    "eigh",
    "eigvalsh",
    "einsum",
    "expm",
    "eye",
    "global_norm",
    "inv",
    "l2_normalize",
    "logdet",
    "lstsq",
    "matmul",
    "matrix_rank",
    "matrix_transpose",
    "matvec",
    "norm",
    "normalize",
    "pinv",
    "qr",
    "set_diag",
    "slogdet",
    "solve",
    "sqrtm",
    "svd",
    "tensor_diag",
    "tensor_diag_part",
    "tensordot",
    "trace",
    "triangular_solve",
]

__dir__ = __all__.copy

accept_symbolic(__name__)

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
