"""The strategy that a Keras model belongs to."""

import weakref
from typing import Any

from replicax.context._current import get_strategy

# Not an attribute of the model, which Keras would track, copy and save.
_homes: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def home_of(model: Any) -> Any:
    """Return the strategy in whose scope a model was made, or None."""
    return _homes.get(model)


def remembering(original: Any) -> Any:
    """Wrap ``Model.__new__`` so that a model made in a scope is remembered with its strategy."""

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        if get_strategy().topology is not None:
            _homes[model] = get_strategy()
        return model

    return new
