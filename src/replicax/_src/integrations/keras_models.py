"""The registry of the strategies in whose scope Keras models were created."""

import weakref
from typing import Any

from replicax._src.context.current import get_strategy

# Not an attribute of the model, because Keras would track, copy and save it.
_homes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def home_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was created, or None."""
    return _homes.get(model)


def remembering(original: Any) -> Any:
    """Wrap ``Model.__new__`` to record the strategy in whose scope a model is created."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        if get_strategy().topology is not None:
            _homes[model] = get_strategy()
        return model

    return new
