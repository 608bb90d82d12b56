"""Compile published training configurations, to compare the estimate with published step times.

    python docs/published_steps.py FOLDER NAME

writes the report of one of `RUNS`. The shapes, batches, shardings and remat policies are those of
the scripts in ``src/maxtext/configs`` (``tpu/v5e``, ``tpu/v5p``, ``tpu/v4``, ``gpu/a3/llama_2_7b``)
of AI-Hypercomputer/maxtext, the speeds those of their README files; ``8b_a100`` is a run of
``docs/performance.md`` of pytorch/torchtitan. The program uses JAX only: a decoder with rotary
attention and gated hidden layers, AdamW in float32, products in bfloat16, layers scanned. Attention
is a kernel that keeps its scores on the chip, as in those runs: for TPUs the same one, splash
attention, for GPUs JAX's own instead of cuDNN's or PyTorch's. The flops of the kernels are counted
manually, in `PRODUCTS`, because they are opaque to the compiler.
"""

import dataclasses
import math
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as on_tpus
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import replicax as rx
from replicax._src.preflight.costs import Costs
from replicax._src.preflight.hlo import Hlo
from replicax._src.preflight.report import PreflightReport

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # newer JAX recommends another library
    from jax.experimental.pallas.ops.gpu import attention as on_gpus

HEAD = 128
ROWS = "data", "fsdp"
# The number of matrix products of the size of queries and keys in each kernel: forward the scores
# and the results; backward the scores again, their gradients, and those of the inputs.
PRODUCTS = {"mha_fwd": 2, "mha_dq": 3, "mha_dkv": 4, "mha_forward": 2, "mha_backward": 7}


@dataclass(frozen=True)
class Run:
    """A published configuration and its speed.

    Attributes:
        model: The name of the model in the script.
        topology: The slice.
        sizes: Layers, width, heads, hidden units.
        batch: Sequences per device.
        tensor: The number of devices over which heads and hidden units are split.
        remat: ``full``, ``minimal``, which keeps the results of products, ``context``, which
            also keeps those of attention, or ``selective``, which keeps those of attention and of
            every second product.
        speed: The published model flops per second on one chip; 0 if `tokens` are published.
        length: Of a sequence.
        copies: Into how many groups the devices fall that each hold all weights. The devices of a
            group hold a part of each, and gather them layer by layer.
        network: What a machine sends in a second, if it is not as usual.
        groups: The number of heads of keys and values; 0 for as many as of queries.
        vocabulary: The number of tokens that the model knows.
        tokens: The published tokens per second on one chip.
    """

    model: str
    topology: str
    sizes: tuple[int, int, int, int]
    batch: int
    tensor: int
    remat: str
    speed: float
    length: int = 2048
    copies: int = 1
    network: float = 0.0
    groups: int = 0
    vocabulary: int = 32_000
    tokens: float = 0.0

    @property
    def flops(self) -> float:
        """Of the model, on one device in a step, as MaxText counts: forward, and twice that back.

        Attention counts in full, as it did when the speeds were published.
        """
        layers, width, heads, hidden = self.sizes
        tokens = self.batch * self.length
        attention = 2 * (heads + (self.groups or heads)) * HEAD
        weights = layers * width * (attention + 3 * hidden) + width * self.vocabulary
        return 3 * (2 * tokens * weights + 4 * layers * tokens * self.length * heads * HEAD)

    @property
    def seconds(self) -> float:
        """The published time of a step."""
        return self.flops / self.speed if self.speed else self.batch * self.length / self.tokens


RUNS = {
    "16b_v5e": Run("16B", "v5e:16x16", (32, 4096, 64, 28672), 6, 1, "full", 120e12),
    "32b_v5e": Run("32B", "v5e:16x16", (32, 8192, 64, 28672), 4, 1, "full", 132e12),
    "64b_v5e": Run("64B", "v5e:16x16", (64, 8192, 64, 28672), 2, 1, "full", 118e12),
    "22b_v4": Run("22B", "v4:4x4x4", (48, 6144, 24, 24576), 13, 1, "full", 156e12),
    "32b_v5p": Run("32B", "v5p:4x4x4", (32, 8192, 64, 28672), 6, 4, "minimal", 328e12),
    "64b_v5p": Run("64B", "v5p:4x4x4", (64, 8192, 64, 28672), 3, 4, "minimal", 323e12),
    "128b_v5p": Run("128B", "v5p:4x4x8", (64, 8192, 128, 57344), 1, 8, "minimal", 315e12),
    "8b_a100": Run(
        *("Llama 3 8B", "a100:8x8", (32, 4096, 32, 14336), 1, 1, "selective", 0.0, 8192),
        groups=8,
        vocabulary=128_256,
        tokens=2973,
    ),
    **{
        # Google's A3 machines have a network of 1,000 Gb/s, not NVIDIA's 3,200.
        f"7b_h100_{n}": Run(
            *("Llama 2 7B", f"h100:{n}x8", (32, 4096, 32, 11008), 4, 1, "context", speed, 4096),
            copies=n,
            network=125e9,
        )
        for n, speed in {1: 492e12, 2: 422e12, 4: 407e12, 8: 409e12, 16: 375e12}.items()
    },
}


def compiled(run: Run) -> PreflightReport:
    """Compile one step of a run, and return the report."""
    devices = math.prod(map(int, run.topology.split(":")[1].split("x")))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    shape = run.copies, devices // run.tensor // run.copies, run.tensor
    axes = "data", "fsdp", "tensor"
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    weights = {name: _struct(mesh, *about) for name, about in _weights(run).items()}
    tokens = _struct(mesh, (devices * run.batch, run.length), P(ROWS), jnp.int32)
    state = {"weights": weights, "first": weights, "second": weights}

    def train_step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        return _train_step(run, mesh, state, tokens)

    outs = jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P())
    step = jax.jit(train_step, donate_argnums=0, out_shardings=outs)
    report = _with_kernels(run, rx.preflight(step, (state, tokens), run.topology))
    if not run.network:
        return report
    limits = dataclasses.replace(report.chip, far_bytes=run.network if run.copies > 1 else 0.0)
    return dataclasses.replace(report, limits=limits)


def _with_kernels(run: Run, report: PreflightReport) -> PreflightReport:
    """Add the flops of the attention kernels to the report, as cost estimates in the HLO.

    Causal attention computes half of the scores: later tokens are masked.
    """
    heads = run.sizes[2] // run.tensor
    rows = run.batch * run.tensor
    product = 2 * rows * heads * run.length**2 * HEAD // 2
    lines = report.hlo.splitlines()
    for i, line in enumerate(lines):
        kernel = re.search(r"(\w+)/pallas_call", line)
        times = next((n for name, n in PRODUCTS.items() if kernel and name in kernel[1]), 0)
        if "backend_config=" in line and times:
            lines[i] = f'{line}, {{"cost_estimate":{{"flops":"{times * product}"}}}}'
    cost = Costs(Hlo("\n".join(lines)), 0, report.chip).of_step()
    notes = tuple(f"{count} x {note}" for note, count in cost.notes.items())
    found = {"flops": cost.flops, "operation_seconds": cost.seconds, "notes": notes}
    return dataclasses.replace(report, **found)


def _weights(run: Run) -> dict[str, tuple[tuple[int, ...], P]]:
    layers, width, heads, hidden = run.sizes
    inward = (layers, width, heads, HEAD), P(None, "fsdp", "tensor")
    grouped = (layers, width, run.groups or heads, HEAD), P(None, "fsdp", "tensor")
    up = (layers, width, hidden), P(None, "fsdp", "tensor")
    return {
        "embedding": ((run.vocabulary, width), P("tensor", "fsdp")),
        "logits": ((width, run.vocabulary), P("fsdp", "tensor")),
        "query": inward,
        **dict.fromkeys(("key", "value"), grouped),
        "out": ((layers, heads, HEAD, width), P(None, "tensor", None, "fsdp")),
        **dict.fromkeys(("gate", "up"), up),
        "down": ((layers, hidden, width), P(None, "tensor", "fsdp")),
    }


def _struct(mesh: Mesh, shape: Any, spec: P, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def _train_step(run: Run, mesh: Mesh, state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradients = jax.value_and_grad(_loss)(state["weights"], tokens, run, mesh)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["first"], gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, state["second"], gradients)
    weights = jax.tree.map(
        lambda w, m, v: w - 1e-4 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * w),
        *(state["weights"], first, second),
    )
    return {"weights": weights, "first": first, "second": second}, loss


def _loss(weights: Any, tokens: jax.Array, run: Run, mesh: Mesh) -> jax.Array:
    weights = dict(weights)
    table, logits = weights.pop("embedding"), weights.pop("logits").astype(jnp.bfloat16)
    rows = NamedSharding(mesh, P(ROWS, None, "tensor"))
    x = jax.nn.one_hot(tokens, run.vocabulary, dtype=jnp.bfloat16) @ table.astype(jnp.bfloat16)

    def layer(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
        x = jax.lax.with_sharding_constraint(x, rows)
        return _layer(x, {n: w.astype(jnp.bfloat16) for n, w in one.items()}, run, mesh), None

    policies = jax.checkpoint_policies
    products = policies.dots_with_no_batch_dims_saveable
    context = policies.save_only_these_names("context")
    both = policies.save_from_both_policies(products, context)
    # Of queries, keys, values, results, gates, inputs and outputs of the network, in this order.
    second = policies.save_only_these_names("context", "query", "value", "gate", "down")
    kept: dict[str, Any] = {"full": None, "minimal": products, "context": both, "selective": second}
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=kept[run.remat]), x, weights)
    scores = jax.nn.log_softmax((_normal(x) @ logits).astype(jnp.float32))
    return -jnp.mean(scores * jax.nn.one_hot(tokens, run.vocabulary))


def _layer(x: jax.Array, w: dict[str, jax.Array], run: Run, mesh: Mesh) -> jax.Array:
    y = _normal(x)
    query, key, value = (
        checkpoint_name(jnp.einsum("btd,dhe->bthe", y, w[n]), n) for n in ("query", "key", "value")
    )
    if run.groups:
        key, value = (jnp.repeat(x, run.sizes[2] // run.groups, axis=2) for x in (key, value))
    attention = _on_gpus if run.topology[:4] in ("a100", "h100") else _on_tpus
    heads = P(ROWS, None, "tensor")
    whole = {"mesh": _of_gpus(run, mesh), "in_specs": heads, "out_specs": heads, "check_vma": False}
    seen = jax.shard_map(attention, **whole)(_rotated(query), _rotated(key), value)
    x = x + jnp.einsum("bthe,hed->btd", checkpoint_name(seen, "context"), w["out"])
    y = _normal(x)
    gate = checkpoint_name(y @ w["gate"], "gate")
    return x + checkpoint_name((jax.nn.silu(gate) * (y @ w["up"])) @ w["down"], "down")


def _of_gpus(run: Run, mesh: Mesh) -> Any:
    """Return the mesh with the GPU for which Pallas lowers kernels, in place of CPUs."""
    kind = run.topology.split(":")[0]
    if kind not in ("a100", "h100"):
        return mesh
    gpu = AbstractDevice(device_kind=f"NVIDIA {kind.upper()}", num_cores=None, platform="gpu")
    return AbstractMesh(
        *(mesh.axis_sizes, mesh.axis_names), axis_types=mesh.axis_types, abstract_device=gpu
    )


def _on_tpus(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    _, length, heads, _ = query.shape
    before = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
    size = min(512, length)
    sizes = dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), size)
    back = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), size)
    blocks = on_tpus.BlockSizes(**sizes, **back, block_q_dq=size, block_kv_dq=size)
    kernel = on_tpus.make_splash_mha(
        *(before,), block_sizes=blocks, head_shards=1, q_seq_shards=1,
        residual_checkpoint_name="context",
    )  # fmt: skip
    turned = (x.swapaxes(1, 2) for x in (query * HEAD**-0.5, key, value))
    return jax.vmap(kernel)(*turned).swapaxes(1, 2)


def _on_gpus(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return on_gpus.mha(query, key, value, None, sm_scale=HEAD**-0.5, causal=True)


def _rotated(x: jax.Array) -> jax.Array:
    half = HEAD // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 10_000 ** (jnp.arange(half) / half)
    sines, cosines = (f(angles).astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)


def _normal(x: jax.Array) -> jax.Array:
    square = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(square + 1e-6).astype(x.dtype)


if __name__ == "__main__":
    report = compiled(RUNS[sys.argv[2]])
    Console().print(report)
    Path(sys.argv[1], f"published_{sys.argv[2]}.json").write_text(report.to_json() + "\n")
