"""Lookup of Keras 3 optimizer variables by the names in TensorFlow checkpoints of Keras 2."""

from typing import Any

import keras

from replicax._src.integrations import keras_private as private

# The slots of each optimizer under their Keras 2 names, in the order in which Keras 3 creates them:
# for each group, the slots of the group for the first weight, then for the second, and so on.
_SLOTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Adam": (("m", "v"), ("vhat",)),
    "Adamax": (("m", "v"),),
    "Adadelta": (("accum_grad", "accum_var"),),
    "Adagrad": (("accumulator",),),
    "Ftrl": (("accumulator", "linear"),),
    "RMSprop": (("rms",), ("momentum",)),
    "SGD": (("momentum",),),
}


def find_part(optimizer: Any, name: str) -> Any:
    """Return an optimizer's step counter (``iter``) or learning rate; None for other names."""
    if name == "iter":
        return optimizer.iterations
    if name == "learning_rate":
        private.CONTRACT.require(private.RESTORED_SLOTS)
        return optimizer._learning_rate
    return None


def find_slot(optimizer: Any, variable: Any, name: str) -> Any:
    """Return an optimizer's slot for ``variable`` by its Keras 2 name; None if there is none."""
    private.CONTRACT.require(private.RESTORED_SLOTS)
    places = [i for i, v in enumerate(optimizer._trainable_variables) if v is variable]
    # EMA weights and accumulated gradients would come before the slots, and shift their positions.
    is_plain = not (optimizer.use_ema or optimizer.gradient_accumulation_steps)
    if not places or not is_plain:
        return None
    made = optimizer._variables
    at = 1 + isinstance(optimizer._learning_rate, keras.Variable)
    for group in _SLOTS.get(type(optimizer).__name__, ()):
        if name in group:
            index = at + places[0] * len(group) + group.index(name)
            return made[index] if index < len(made) else None
        at += len(optimizer._trainable_variables) * len(group)
    return None
