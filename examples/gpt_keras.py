"""A GPT of Keras, from a tiny one to a billion parameters: `fit` with sharded variables.

    pip install 'replicax[keras]'
    python examples/gpt_keras.py                    # a tiny one, on 8 virtual devices
    python examples/gpt_keras.py --tensor 2         # replicas of two devices: the same numbers

Weights and Adam's state are sharded over the replicas, blocks are rematerialized, and layers
compute in bfloat16. Which devices a larger one needs, without having any:

    python examples/gpt_keras.py --size 1b --plan h100 --global-batch 64
"""

import argparse
import os
import subprocess
import sys
from collections import namedtuple
from typing import Any

os.environ.setdefault("REPLICAX_CPU_DEVICES", "8")  # without accelerators: virtual devices

import numpy as np

import replicax as rx

keras: Any = rx.keras
Size = namedtuple("Size", "layers width heads vocabulary length")
SIZES = {
    "tiny": Size(2, 64, 4, 128, 16),
    "110m": Size(12, 768, 12, 32768, 1024),
    "350m": Size(24, 1024, 16, 32768, 1024),
    "1b": Size(24, 2048, 16, 32768, 2048),
}


def main() -> None:
    """Train on sequences that count upwards, or plan."""
    parser = argparse.ArgumentParser(description="Train a GPT with Keras.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--global-batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--policy", choices=["mirrored", "sharded"], default="sharded")
    parser.add_argument("--tensor", type=int, default=1, help="devices of each replica")
    parser.add_argument("--float32", action="store_true", help="compute in float32")
    parser.add_argument("--plan", metavar="KINDS", help="find devices, such as h100,v5p")
    parser.add_argument("--most", type=int, default=64, help="the most devices of a plan")
    options = parser.parse_args()
    if options.plan:
        sys.exit(plan(options))

    keras.utils.set_random_seed(0)
    if not options.float32:
        keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    strategy = rx.distribute.MirroredStrategy(
        variable_policy=options.policy, devices_per_replica={"tensor": options.tensor}
    )
    size = SIZES[options.size]
    with strategy.scope(), layouts(options.tensor).scope():
        model = make_model(size)
        model.compile(
            optimizer=keras.optimizers.AdamW(3e-3, global_clipnorm=1.0),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    print(f"{strategy}, {model.count_params():,} parameters")
    history = model.fit(make_dataset(size, options), epochs=1, verbose=0)
    print(f"mean loss {history.history['loss'][-1]:.4f}")


def plan(options: Any) -> int:
    """Let `replicax plan` compile the step for many devices, with several sizes of a replica."""
    command = [sys.executable, "-m", "replicax", "plan", __file__, "--plan", "--fit", options.plan]
    command += ["--global-batch", str(options.global_batch), "--most", str(options.most)]
    return subprocess.call([*command, "--vary", "tensor=1,4", "--", "--size", options.size])


def layouts(tensor: int) -> rx.tpu.LayoutMap:
    """Which axis of which weight is sharded over the devices of each replica."""
    names: dict[str, Any] = {
        "attention/(query|key|value)/kernel": [None, "tensor", None],
        "attention/attention_output/kernel": ["tensor", None, None],
        "up/kernel": [None, "tensor"],
        "down/kernel": ["tensor", None],
    }
    return rx.tpu.LayoutMap(names if tensor > 1 else {})


class Block(keras.layers.Layer):  # type: ignore[misc]
    """Attention to the tokens before, then a network for each token."""

    def __init__(self, size: Size, **options: Any) -> None:
        super().__init__(**options)
        self.first = keras.layers.LayerNormalization(name="first")
        self.second = keras.layers.LayerNormalization(name="second")
        self.attention = keras.layers.MultiHeadAttention(
            size.heads, size.width // size.heads, name="attention"
        )
        self.up = keras.layers.Dense(4 * size.width, activation="gelu", name="up")
        self.down = keras.layers.Dense(size.width, name="down")

    def build(self, shape: Any) -> None:
        """Create the weights."""
        for layer in (self.first, self.second, self.up):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x: Any) -> Any:
        """For each token, its new value."""
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.second(x)))


def make_model(size: Size) -> Any:
    """For each token, how likely each token is to follow."""
    tokens = keras.Input((size.length,), dtype="int32")
    positions = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=1) - 1
    x = keras.layers.Embedding(size.vocabulary, size.width)(tokens)
    x = x + keras.layers.Embedding(size.length, size.width)(positions)
    for i in range(size.layers):
        x = rx.remat(Block(size, name=f"block_{i}"))(x)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(size.vocabulary, dtype="float32")(x))


def make_dataset(size: Size, options: Any) -> Any:
    """Batches of sequences that count upwards from anywhere, and the tokens that follow."""
    rng = np.random.default_rng(0)
    starts = rng.integers(size.vocabulary, size=(options.global_batch * options.steps, 1))
    rows = ((starts + np.arange(size.length + 1)) % size.vocabulary).astype(np.int32)
    dataset = rx.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:]))
    return dataset.batch(options.global_batch, drop_remainder=True)


if __name__ == "__main__":
    main()
