"""Names that TensorFlow keeps under ``tf.random.experimental``.

Example:
    >>> rx.random.experimental.stateless_split([1, 2], num=3).shape
    (3, 2)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.random.generator import (
    Generator,
    create_rng_state,
    get_global_generator,
    set_global_generator,
)
from replicax._src.random.stateless import Algorithm, fold_in, split, stateless_shuffle

stateless_fold_in = fold_in
stateless_split = split

__all__ = [
    "Algorithm",
    "Generator",
    "create_rng_state",
    "get_global_generator",
    "set_global_generator",
    "stateless_fold_in",
    "stateless_shuffle",
    "stateless_split",
]

__dir__ = __all__.copy

_ABSENT = {"index_shuffle": "Write `jax.random.permutation(key, max_index + 1)[index]`."}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
