"""Random arrays from one seeded source, for programs that do not thread keys.

Example:
    >>> rx.random.set_seed(0)
    >>> rx.random.uniform([2]).shape
    (2,)
"""

from replicax.random._generator import Generator
from replicax.random._random import normal, set_seed, uniform

__all__ = ["Generator", "normal", "set_seed", "uniform"]

__dir__ = __all__.copy
