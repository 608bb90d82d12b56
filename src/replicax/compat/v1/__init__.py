"""TensorFlow 1 names that distributed programs still use.

Example:
    >>> rx.compat.v1.ConfigProto(allow_soft_placement=True).allow_soft_placement
    True
"""

from replicax._src.base.ops import enable_eager_execution
from replicax._src.strategy.v1 import ConfigProto, TensorInfo
from replicax.compat.v1 import distribute

__all__ = ["ConfigProto", "TensorInfo", "distribute", "enable_eager_execution"]

__dir__ = __all__.copy
