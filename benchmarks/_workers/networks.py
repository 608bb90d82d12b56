"""The networks of the comparison: numbers only, so that every library starts from the same ones."""

import itertools
from functools import partial

import numpy as np

RATE = 0.01

# How many numbers are all-reduced, by name.
ALL_REDUCES = {
    f"all-reduce of {what}": count
    for what, count in {
        "1 number": 1,
        "4 KiB": 2**10,
        "1 MiB": 2**18,
        "100 MiB": 25 * 2**20,
    }.items()
}

MLP_WIDTHS = [784, 512, 512, 10]
MLP_ROWS = 64

BLOCKS = 2
WIDTH = 128
HEADS = 4
TOKENS = 64
SEQUENCES = 8
VOCABULARY = 512


def mlp_weights():
    """A matrix and a vector for each layer."""
    rng = np.random.default_rng(0)
    return [
        weight
        for a, b in itertools.pairwise(MLP_WIDTHS)
        for weight in (_normal(rng, a, b), np.zeros(b, np.float32))
    ]


def mlp_batch(rows=MLP_ROWS):
    """Pictures and their labels."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, MLP_WIDTHS[0])).astype(np.float32)
    return x, rng.integers(0, MLP_WIDTHS[-1], rows).astype(np.int32)


def cnn_weights():
    """Two convolutions of 3 x 3, each with a max pooling of 2 x 2 behind it, and the way out."""
    rng = np.random.default_rng(0)
    shapes = ((3, 3, 1, 32), (3, 3, 32, 64), (7 * 7 * 64, 10))
    return [*(_normal(rng, *s) for s in shapes), np.zeros(10, np.float32)]


def cnn_batch():
    """Pictures with rows and columns, and their labels."""
    x, y = mlp_batch()
    return x.reshape(-1, 28, 28, 1), y


def transformer_weights():
    """Embedding, positions, four matrices for each block, and the way out."""
    rng = np.random.default_rng(0)
    blocks = [
        _normal(rng, *shape)
        for _ in range(BLOCKS)
        for shape in ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
    ]
    ends = [_normal(rng, n, WIDTH) for n in (VOCABULARY, TOKENS)]
    return [*ends, *blocks, _normal(rng, WIDTH, VOCABULARY)]


def transformer_batch():
    """Tokens, and the token that follows each."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, VOCABULARY, (SEQUENCES, TOKENS + 1)).astype(np.int32)
    return text[:, :-1], text[:, 1:]


WEIGHTS_AND_BATCH = {
    "MLP": (mlp_weights, mlp_batch),
    "CNN": (cnn_weights, cnn_batch),
    "transformer": (transformer_weights, transformer_batch),
}


def trainers(make, losses):
    """For each name what makes its step: ``make`` of the loss, the weights and the batch."""

    def maker(loss, weights, batch):
        return lambda: make(loss, weights(), batch())

    return {name: maker(losses[name], *parts) for name, parts in WEIGHTS_AND_BATCH.items()}


def all_reduces(make):
    """The same for ``make`` of how many numbers are all-reduced."""
    return {name: partial(make, count) for name, count in ALL_REDUCES.items()}


def _normal(rng, *shape):
    return (rng.standard_normal(shape) * 0.05).astype(np.float32)
