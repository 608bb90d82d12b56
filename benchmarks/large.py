"""Sharded variables of a large model against FSDP written by hand: memory and collectives.

    python benchmarks/large.py --out benchmarks/large.json
    python benchmarks/large.py --out benchmarks/large.json --table  # that of docs/scaling.md
    python benchmarks/large.py --size 8b --on h100:4x8 --layers 4 --programs "by hand" sharded

A Llama (stacked layers, rematerialized, computed in bfloat16, Adam in float32, one sequence per
device) is compiled ahead of time by the compilers of the devices. Nothing is run. The programs:

- `by hand`: `jax.jit`, a NamedSharding for each weight and a constraint that gathers a layer where
  it is used. XLA sums gradients in the type of the computation, bfloat16.
- `by hand, float32 sums`: `jax.shard_map`, which gathers each layer and reduce-scatters its
  gradient after a conversion to float32.
- `sharded`: `variable_policy="sharded", reduce_dtype="bfloat16"`.
- `sharded, float32 sums`: `variable_policy="sharded"`.

`--out` keeps results, so that a run that was stopped continues. Fewer `--layers` give the same
picture of one layer, and compile for less memory.
"""

import argparse
import json
import os
import sys
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["REPLICAX_CPU_DEVICES"] = "256"  # the mesh by hand has as many devices as the target

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import replicax as rx  # noqa: E402
from replicax._src.preflight.compiler import Compiling  # noqa: E402
from replicax._src.preflight.costs import Costs  # noqa: E402
from replicax._src.preflight.hlo import Hlo  # noqa: E402
from replicax._src.preflight.preflight import compile_steps  # noqa: E402
from replicax._src.preflight.targets import Target  # noqa: E402
from replicax._src.preflight.trace import Step  # noqa: E402

Size = namedtuple("Size", "layers width heads groups hidden vocabulary length")
SIZES = {
    "tiny": Size(3, 64, 4, 2, 256, 512, 16),
    "110m": Size(12, 768, 12, 12, 2048, 32768, 1024),
    "1b": Size(16, 2048, 32, 8, 8192, 128256, 2048),
    "8b": Size(32, 4096, 32, 8, 14336, 128256, 2048),
}
# Each program, and the one by hand that sums gradients in the same type.
PROGRAMS = {
    "by hand": "by hand",
    "sharded": "by hand",
    "by hand, float32 sums": "by hand, float32 sums",
    "sharded, float32 sums": "by hand, float32 sums",
}
RATE, DECAYS, EPSILON, NORM = 1e-3, (0.9, 0.95), 1e-8, 1.0


def shapes(size):
    """The weights; those of all layers are stacked."""
    n, d, f = size.layers, size.width, size.hidden
    kv = d // size.heads * size.groups
    return {
        "embedding": (size.vocabulary, d),
        "head": (size.vocabulary, d),
        "query": (n, d, d),
        "key": (n, d, kv),
        "value": (n, d, kv),
        "output": (n, d, d),
        "gate": (n, d, f),
        "up": (n, d, f),
        "down": (n, f, d),
    }


def to_bfloat16(w):
    return w.astype(jnp.bfloat16)


def loss_of(size, weights, rows, cast=to_bfloat16, *, unroll=False):
    """The mean loss of some rows; `cast` converts, and gathers, a weight where it is used."""
    embedding, head, *stacks = weights
    tokens, targets = rows[:, :-1], rows[:, 1:]
    x = cast(embedding)[tokens]

    @jax.checkpoint
    def layer(x, one):
        query, key, value, output, gate, up, down = map(cast, one)
        x = x + attention(size, norm(x), query, key, value) @ output
        y = norm(x)
        return x + (jax.nn.silu(y @ gate) * (y @ up)) @ down, None

    if unroll:
        for i in range(size.layers):
            x, _ = layer(x, [s[i] for s in stacks])
    else:
        x, _ = jax.lax.scan(layer, x, tuple(stacks))

    logits = (norm(x) @ cast(head).T).astype(jnp.float32)
    # Not `take_along_axis`: the TPU compiler gives the scatter of its gradient to the SparseCore of
    # a v5p, with several float32 arrays of the size of the logits.
    is_target = targets[..., None] == jnp.arange(size.vocabulary)
    picked = jnp.sum(jnp.where(is_target, jax.nn.log_softmax(logits), 0), axis=-1)
    return -jnp.mean(picked)


def norm(x):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(size, x, query, key, value):
    split = lambda y: y.reshape(*y.shape[:2], -1, size.width // size.heads)  # noqa: E731
    q, k, v = split(x @ query), split(x @ key), split(x @ value)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)


def adam(w, m, v, g, t):
    (b1, b2) = DECAYS
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    scale = jnp.sqrt(v / (1 - b2**t)) + EPSILON
    return w - RATE * (m / (1 - b1**t)) / scale, m, v


def clipped(gradients):
    total = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
    return [g * jnp.minimum(1.0, NORM / (total + 1e-6)) for g in gradients]


def with_replicax(size, options, rows, reduce_dtype):
    """The step of a sharded strategy, and its arguments."""
    strategy = rx.distribute.MirroredStrategy(
        jax.devices()[:2], variable_policy="sharded", reduce_dtype=reduce_dtype
    )
    with strategy.scope(), rx.tpu.planning():
        weights, *slots = (
            [rx.Variable(lambda s=s: jnp.zeros(s), name=n) for n, s in shapes(size).items()]
            for _ in range(3)
        )
        count = rx.Variable(lambda: jnp.zeros(()), name="count")

    def replica_step(rows):
        loss, gradients = rx.value_and_grad(
            lambda: loss_of(size, [w.read_value() for w in weights], rows, unroll=options.unroll),
            weights,
        )()
        gradients = rx.distribute.get_replica_context().all_reduce("MEAN", gradients)
        if options.clip:
            gradients = clipped(gradients)
        t = count.assign_add(1.0).read_value()
        for w, m, v, g in zip(weights, *slots, gradients, strict=True):
            for variable, new in zip((w, m, v), adam(w, m, v, g, t), strict=True):
                variable.assign(new)
        return loss

    @rx.function
    def step(rows):
        return strategy.reduce("MEAN", strategy.run(replica_step, args=(rows,)), axis=None)

    mine = strategy.experimental_distribute_values_from_function(
        lambda _: np.zeros((rows, size.length + 1), np.int32)
    )
    return Step.of(step, (mine,), {})


def by_hand(size, options, rows, devices, *, is_mapped=False):
    """The step of `jax.jit` with shardings, or with `jax.shard_map`, and its arguments."""
    mesh = Mesh(np.asarray(jax.devices()[:devices]), ("fsdp",))
    spec = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))  # noqa: E731
    where = {n: spec(*(None,) * (len(s) - 2), "fsdp") for n, s in shapes(size).items()}
    split = list(where.values())
    whole = lambda w: jax.lax.with_sharding_constraint(to_bfloat16(w), spec())  # noqa: E731

    def mapped(state, batch):
        loss, gradients = jax.value_and_grad(
            lambda weights: loss_of(size, weights, batch, gathered, unroll=options.unroll)
        )(state[0])
        return jax.lax.pmean(loss, "fsdp"), [g / devices for g in gradients]

    def step(state, t, batch):
        batch = jax.lax.with_sharding_constraint(batch, spec("fsdp"))
        if is_mapped:
            specs = [s.spec for s in split]
            loss, gradients = jax.shard_map(
                mapped,
                mesh=mesh,
                in_specs=([specs] * 3, PartitionSpec("fsdp")),
                out_specs=(PartitionSpec(), specs),
                check_vma=False,
            )(state, batch)
        else:
            loss, gradients = jax.value_and_grad(
                lambda weights: loss_of(size, weights, batch, whole, unroll=options.unroll)
            )(state[0])
        gradients = jax.lax.with_sharding_constraint(gradients, split)
        if options.clip:
            gradients = clipped(gradients)
        new = [adam(*row, t + 1) for row in zip(*state, gradients, strict=True)]
        return [list(column) for column in zip(*new, strict=True)], t + 1, loss

    def like(shape, dtype, sharding):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = [[like(s, jnp.float32, where[n]) for n, s in shapes(size).items()] for _ in range(3)]
    batch = like((rows * devices, size.length + 1), jnp.int32, spec("fsdp"))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=([split] * 3, spec(), spec()))
    return Step.of(jitted, (state, like((), jnp.float32, spec()), batch), {})


@jax.custom_vjp
def gathered(w):
    """Gather the parts of a weight in bfloat16; sum its gradient in float32, in parts."""
    return jax.lax.all_gather(to_bfloat16(w), "fsdp", tiled=True)


def _scattered(_, g):
    return (jax.lax.psum_scatter(g.astype(jnp.float32), "fsdp", tiled=True),)


gathered.defvjp(lambda w: (gathered(w), None), _scattered)


class _ByType(Costs):
    """Costs whose collectives have the dtype, and whether they are asynchronous, as the line."""

    def _single(self, one, computation):
        cost = super()._single(one, computation)
        kinds = sorted({s.dtype for s in one.shapes if s.sizes}) or ["scalar"]
        is_split = one.opcode.endswith("-start") or "chain_id" in one.tail
        is_async = is_split and '"is_sync":true' not in one.tail  # GPUs run such a pair at once
        name = f"{'+'.join(kinds)}{' async' if is_async else ''}"
        cost.collectives = {(*key[:3], name): n for key, n in cost.collectives.items()}
        return cost


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["110m", "1b", "8b"])
    parser.add_argument("--on", nargs="+", default=["h100:4x8", "v5e:16x16", "v5p:4x4x4"])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--rows", type=int, default=1, help="sequences of each device")
    parser.add_argument("--unroll", action="store_true", help="no loop over the layers")
    parser.add_argument("--clip", action="store_true", help="clip gradients by their global norm")
    parser.add_argument("--cache", default="", help="a folder for the compilers' results")
    parser.add_argument("--hlo", default="", help="a folder for the optimized programs")
    parser.add_argument("--out", default="", help="a file of results, to which others are added")
    parser.add_argument("--table", action="store_true", help="show results; compile nothing")
    options = parser.parse_args()
    file = Path(options.out) if options.out else None
    known = json.loads(file.read_text()) if file and file.exists() else {}
    if options.table:
        print("\n".join(page_rows(known, options)))
        return
    print(
        "| size, layers | devices | program | memory | x | sent | x | async | collectives | time |"
    )
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for name in options.size:
        for where in options.on:
            for program in options.programs:
                key = key_of(name, where, program, options)
                if key not in known:
                    known[key] = compiled(name, where, program, options)
                    if file:
                        file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
                peer = known.get(key_of(name, where, PROGRAMS[program], options))
                print(row(known[key], peer), flush=True)


def key_of(name, where, program, options):
    """The name of a result."""
    layers = options.layers or SIZES[name].layers
    flags = [n for n in ("unroll", "clip") if getattr(options, n)]
    return " | ".join([name, str(layers), where, program, f"{options.rows} rows", *flags])


def compiled(name, where, program, options):
    """Compile one program; return its figures."""
    size, target = SIZES[name], Target.parse(where)
    size = size._replace(layers=options.layers or size.layers)
    is_wide = program.endswith("float32 sums")
    if program.startswith("sharded"):
        step = with_replicax(size, options, options.rows, None if is_wide else "bfloat16")
    else:
        step = by_hand(size, options, options.rows, target.num_devices, is_mapped=is_wide)
    (report,) = compile_steps(step, [target], Compiling(cache=options.cache))
    if options.hlo:
        file = f"{name}-{where.replace(':', '-')}-{program.replace(' ', '-')}.txt"
        (Path(options.hlo) / file).write_text(report.hlo or report.error)
    found = {
        "size": f"{name}, {size.layers}",
        "devices": where,
        "program": program,
        "memory": report.memory.total,
        "fits": bool(report.fits),
        "seconds": round(report.compile_seconds),
    }
    if report.compiles:
        cost = _ByType(Hlo(report.hlo)).of_step()
        large = [c for c in cost.merged(by_line=True) if c.bytes > 1 << 16]
        found["collectives"] = [[c.count, c.kind, c.source, c.bytes] for c in large]
        found["sent"] = report.communication_bytes
    return found


def row(found, peer):
    """One line of the table, beside the figures of the program by hand."""
    cells = [found["size"], found["devices"], found["program"], f"{found['memory'] / 1e9:.2f} GB"]
    ratio = lambda key: f"{found[key] / peer[key]:.2f}" if peer and key in peer else ""  # noqa: E731
    if "sent" not in found:
        return f"| {' | '.join([*cells, ratio('memory'), 'does not fit', '', '', '', ''])} |"
    large = found["collectives"]
    count = sum(n for n, *_ in large)
    hidden = sum(n for n, _, source, _ in large if source.endswith("async"))
    text = "; ".join(f"{n} {kind} {source} {b / 2**30:.2f} GiB" for n, kind, source, b in large)
    cells += [ratio("memory"), f"{found['sent'] / 1e9:.2f} GB", ratio("sent")]
    cells += [f"{hidden} of {count}", text, f"{found['seconds']} s"]
    return f"| {' | '.join(cells)} |"


def page_rows(known, options):
    """The rows of the table of docs/scaling.md, of the results that are known."""
    for name in options.size:
        for where in options.on:
            for program in options.programs:
                found = known.get(key_of(name, where, program, options))
                peer = known.get(key_of(name, where, PROGRAMS[program], options))
                if found and "sent" in found:
                    cells = [name, *row(found, peer)[2:-2].split(" | ")[1:8]]
                    yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
