"""Functions of `tf.bitwise`.

Example:
    >>> tf.bitwise.bitwise_and(6, 3)
    Array(2, dtype=int32)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.bitwise import (
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    invert,
    left_shift,
    right_shift,
)
from replicax._src.tf_ops.symbolic import accept_symbolic

__all__ = [
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "invert",
    "left_shift",
    "right_shift",
]

__dir__ = __all__.copy

accept_symbolic(__name__)

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
