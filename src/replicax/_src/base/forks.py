"""Detection of processes that were forked after JAX had started, in which JAX would hang."""

import os
from typing import NoReturn

from replicax._src.base.errors import ScopeError
from replicax._src.compat.jax import backend_is_initialized

is_forked = [False]


def _note_fork() -> None:
    is_forked[0] = backend_is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def refuse_fork() -> NoReturn:
    """Raise `ScopeError`: JAX's threads do not exist in this process."""
    raise ScopeError(
        "This process was forked after JAX had started: JAX's threads are not in it, and a"
        " computation would wait forever. Start processes by spawning,"
        ' `multiprocessing.get_context("spawn")`, with `rx.testing.run_in_processes`, or with'
        " `replicax launch`; or fork before the first computation."
    )
