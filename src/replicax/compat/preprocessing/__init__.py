"""Keras 2's tools for images, texts and sequences, which Keras 3 keeps for TensorFlow's users.

New programs write layers of `rx.keras.layers` and functions of `rx.keras.utils`.

Example:
    >>> from replicax.compat import preprocessing
    >>> tokenizer = preprocessing.Tokenizer(num_words=3)
    >>> tokenizer.fit_on_texts(["a b a", "a"])
    >>> tokenizer.texts_to_sequences(["b a"])
    [[2, 1]]
"""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:
    from replicax._src.integrations.keras_older import find as __getattr__  # noqa: F401

__all__ = [
    "DirectoryIterator",
    "ImageDataGenerator",
    "Iterator",
    "NumpyArrayIterator",
    "TimeseriesGenerator",
    "Tokenizer",
    "apply_affine_transform",
    "apply_brightness_shift",
    "apply_channel_shift",
    "hashing_trick",
    "make_sampling_table",
    "one_hot",
    "random_brightness",
    "random_channel_shift",
    "random_rotation",
    "random_shear",
    "random_shift",
    "random_zoom",
    "skipgrams",
    "text_to_word_sequence",
    "tokenizer_from_json",
]

__dir__ = __all__.copy

if TYPE_CHECKING:  # so that type checkers refuse any other name
    DirectoryIterator: Any
    ImageDataGenerator: Any
    Iterator: Any
    NumpyArrayIterator: Any
    TimeseriesGenerator: Any
    Tokenizer: Any
    apply_affine_transform: Any
    apply_brightness_shift: Any
    apply_channel_shift: Any
    hashing_trick: Any
    make_sampling_table: Any
    one_hot: Any
    random_brightness: Any
    random_channel_shift: Any
    random_rotation: Any
    random_shear: Any
    random_shift: Any
    random_zoom: Any
    skipgrams: Any
    text_to_word_sequence: Any
    tokenizer_from_json: Any
