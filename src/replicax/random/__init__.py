"""Random numbers under TensorFlow's names: global state, `Generator`, and stateless functions.

Example:
    >>> rx.random.set_seed(0)
    >>> rx.random.uniform([2]).shape
    (2,)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.random.generator import (
    Generator,
    create_rng_state,
    get_global_generator,
    set_global_generator,
)
from replicax._src.random.random import (
    categorical,
    gamma,
    normal,
    poisson,
    set_seed,
    shuffle,
    truncated_normal,
    uniform,
)
from replicax._src.random.stateless import (
    Algorithm,
    fold_in,
    split,
    stateless_binomial,
    stateless_categorical,
    stateless_gamma,
    stateless_normal,
    stateless_parameterized_truncated_normal,
    stateless_poisson,
    stateless_truncated_normal,
    stateless_uniform,
)
from replicax.random import experimental

__all__ = [
    "Algorithm",
    "Generator",
    "categorical",
    "create_rng_state",
    "experimental",
    "fold_in",
    "gamma",
    "get_global_generator",
    "normal",
    "poisson",
    "set_global_generator",
    "set_seed",
    "shuffle",
    "split",
    "stateless_binomial",
    "stateless_categorical",
    "stateless_gamma",
    "stateless_normal",
    "stateless_parameterized_truncated_normal",
    "stateless_poisson",
    "stateless_truncated_normal",
    "stateless_uniform",
    "truncated_normal",
    "uniform",
]

__dir__ = __all__.copy

_ABSENT = {
    **{
        f"{kind}_candidate_sampler": (
            "Sampled softmax is not part of this library: draw classes with `rx.random.uniform`"
            " or `rx.random.categorical`, or use the full softmax, `jax.nn.log_softmax`."
        )
        for kind in ("all", "fixed_unigram", "learned_unigram", "log_uniform", "uniform")
    },
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
