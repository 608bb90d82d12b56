"""The context in which a hook of an integration is called: a scope, a replica, a function."""

import functools
from typing import Any

from replicax._src.base.errors import ScopeError
from replicax._src.context.current import current


def replicas() -> Any:
    """Return the current replica context if the strategy has several replicas; else None."""
    replica = current().replica
    return replica if replica is not None and replica.num_replicas_in_sync > 1 else None


def is_inside(*_: Any, **__: Any) -> bool:
    """Whether the code runs in a scope, a replica function or an `rx.function`."""
    frame = current()
    is_scoped = frame.strategy is not None and frame.strategy.topology is not None
    return is_scoped or frame.replica is not None or frame.level is not None


def in_replicas(*_: Any, **__: Any) -> bool:
    """Whether the code runs in replica context with several replicas."""
    return replicas() is not None


def refuse_in_scopes(original: Any, what: str, why: str) -> Any:
    """Wrap a variable's constructor ``original`` to raise `ScopeError` in a strategy's scope."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        strategy = current().strategy
        if strategy is not None and strategy.topology is not None:
            raise ScopeError(f"{what} cannot be made in the scope of {strategy}: {why}.")
        original(self, *args, **kwargs)

    return init
