"""The registry of the strategies in whose scope Keras models were created."""

import weakref
from typing import Any

from replicax._src.context.current import get_strategy
from replicax._src.strategy.base import StrategyBase, live_strategies

# Not an attribute of the model, because Keras would track, copy and save it.
_homes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# Of models made outside of every scope before any was used: the strategies of several replicas.
_idle: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def home_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was created, or None."""
    return _homes.get(model)


def idle_beside(model: Any) -> list[Any]:
    """Return the live strategies of several replicas that were made, unused, before a model."""
    return list(_idle.get(model, ()))


def remembering(original: Any) -> Any:
    """Wrap ``Model.__new__`` to record the strategy in whose scope a model is created."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        if get_strategy().topology is not None:
            _homes[model] = get_strategy()
        elif not StrategyBase.is_any_used:
            several = [s for s in list(live_strategies) if s.num_replicas_in_sync > 1]
            _idle[model] = weakref.WeakSet(several)
        return model

    return new
