"""The Keras models of the table, for whichever Keras: on JAX here, on TensorFlow in its process."""

from typing import Any

import numpy as np

BATCH = 64  # rows of all replicas
STEPS = 20  # of an epoch
_WORDS, _LENGTH, _WIDTH = 1000, 32, 64


def mlp(keras: Any) -> Any:
    """784-512-512-10."""
    layers = keras.layers
    hidden = [layers.Dense(512, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])


def transformer(keras: Any) -> Any:
    """Two blocks of attention and feed-forward on 32 words."""
    layers = keras.layers
    words = keras.Input((_LENGTH,), dtype="int32")
    x = layers.Embedding(_WORDS, _WIDTH)(words)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, _WIDTH // 4)(x, x))
        hidden = layers.Dense(4 * _WIDTH, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(_WIDTH)(hidden))
    return keras.Model(words, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def resnet(keras: Any, *, small: bool) -> Any:
    """ResNet50 for 10 classes; small: its first group of blocks, to try the table out."""
    blocks = (2,) if small else (3, 4, 6, 3)
    layers = keras.layers
    inputs = keras.Input((64, 64, 3))
    x = _normalized(layers, layers.Conv2D(64, 7, strides=2, padding="same")(inputs))
    x = layers.MaxPooling2D(3, strides=2, padding="same")(layers.ReLU()(x))
    for group, count in enumerate(blocks):
        for number in range(count):
            x = _bottleneck(layers, x, 64 * 2**group, strides=2 if group and not number else 1)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _bottleneck(layers: Any, x: Any, width: int, strides: int) -> Any:
    new = x
    for size, step, filters in ((1, strides, width), (3, 1, width), (1, 1, 4 * width)):
        new = layers.Conv2D(filters, size, strides=step, padding="same")(new)
        new = _normalized(layers, new)
        new = layers.ReLU()(new) if filters == width else new
    if x.shape[-1] != 4 * width or strides > 1:
        x = _normalized(layers, layers.Conv2D(4 * width, 1, strides=strides)(x))
    return layers.ReLU()(layers.Add()([x, new]))


def _normalized(layers: Any, x: Any) -> Any:
    return layers.BatchNormalization()(x)


def many(keras: Any) -> list[Any]:
    """1,000 small variables."""
    return [keras.Variable(np.zeros(8, np.float32)) for _ in range(1000)]


def classification(keras: Any, **options: Any) -> Any:
    """The loss of all of them."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def data(make: Any, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """So many rows for a model, and their classes."""
    rng = np.random.default_rng(0)
    if make is transformer:
        x = rng.integers(0, _WORDS, (rows, _LENGTH)).astype(np.int32)
    else:
        x = rng.standard_normal((rows, 784)).astype(np.float32)
    return x, rng.integers(0, 10, rows).astype(np.int32)
