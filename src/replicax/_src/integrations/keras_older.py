"""`replicax.compat.preprocessing`: Keras 2's preprocessing classes and functions.

Keras 3 still has them, in the package from which TensorFlow takes its `tf.keras`.
"""

import importlib
from typing import Any

_HOME = "keras._tf_keras.keras.preprocessing"
_NAMES = {
    "image": (
        "DirectoryIterator ImageDataGenerator Iterator NumpyArrayIterator apply_affine_transform"
        " apply_brightness_shift apply_channel_shift random_brightness random_channel_shift"
        " random_rotation random_shear random_shift random_zoom"
    ),
    "sequence": "TimeseriesGenerator make_sampling_table skipgrams",
    "text": "Tokenizer hashing_trick one_hot text_to_word_sequence tokenizer_from_json",
}
NAMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def part(name: str) -> Any:
    """Return a class or function of Keras 2's preprocessing."""
    importlib.import_module("replicax._src.integrations.rx_keras")  # chooses the backend
    path = f"{_HOME}.{NAMES[name]}"
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise AttributeError(
            f"This release of Keras has no {name} any more ({error}). Write layers of"
            " `rx.keras.layers`, such as `RandomFlip` and `TextVectorization`."
        ) from error


def find(name: str) -> Any:
    """Return a class or function; the ``__getattr__`` of `replicax.compat.preprocessing`."""
    if name in NAMES:
        return part(name)
    raise AttributeError(f"module 'replicax.compat.preprocessing' has no attribute {name!r}")
