"""Random arrays from one seeded source, for programs that do not thread keys.

Example:
    >>> rx.random.set_seed(0)
    >>> rx.random.uniform([2]).shape
    (2,)
"""

from replicax.random._random import normal, set_seed, uniform

__all__ = ["normal", "set_seed", "uniform"]
