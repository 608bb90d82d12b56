"""JAX settings of the calling thread, for a new thread that would not inherit them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax

_SETTINGS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_transfer_guard": jax.transfer_guard,
}


def inherited_jax_state() -> Callable[[], AbstractContextManager[None]]:
    """The settings of this thread, as a context to enter in another one."""
    wanted = {name: getattr(jax.config, name) for name in _SETTINGS}

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for name, value in wanted.items():
                if getattr(jax.config, name) != value:
                    stack.enter_context(_SETTINGS[name](value))
            yield

    return enter
