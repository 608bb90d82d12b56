"""Programs written by hand with JAX alone, and compiled ahead of time for the slice ``v5e:4x4``.

``python tests/preflight/by_hand.py FILE`` writes what the compiler says of each of them, read off
without any code of replicax. Loops are written out, so that nothing has to be counted through them.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, ROWS, TURNS = 512, 8, 10


def figures():
    """What the compiler says of each program."""
    return _said()["programs"]


def limits():
    """How many devices some slices have, and how much memory a program may use of each."""
    return _said()["limits"]


@cache
def _said():
    """What a process of its own says, which has libtpu for itself."""
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    env = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_", "TPU_"))}
    done = subprocess.run(
        [sys.executable, __file__], env=env | quiet, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main():
    devices = np.asarray(topologies.get_topology_desc("v5e:4x4", platform="tpu").devices)
    flat = Mesh(devices, ("r",))
    grid = Mesh(devices.reshape(4, 4), ("r", "l"))
    lines = Mesh(devices.reshape(4, 4), ("r", "s"))
    made = {
        "data_parallel": compiled(flat, data_parallel, P()),
        "logical": compiled(grid, data_parallel, P(None, "l"), manual={"r"}),
        "sharded": compiled(lines, sharded, P(("r", "s"))),
        "loop": compiled(flat, loop, P()),
        "branch": compiled(flat, larger_branch, P()),
        "permutes": compiled(flat, permutes, P()),
    }
    programs = {name: facts(c) for name, c in made.items()}
    found = {name: limit(name) for name in ("v3:2x2", "v4:2x2x1", "v5e:2x2", "tpu7x:2x2x1")}
    sys.stdout.write("\n" + json.dumps({"programs": programs, "limits": found}) + "\n")


def limit(name):
    megacore = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    found = topologies.get_topology_desc(name, platform="tpu", **megacore)
    where = NamedSharding(Mesh(np.asarray(found.devices), ("r",)), P())
    large = jax.ShapeDtypeStruct((1 << 10, 1 << 30), jnp.uint8)
    try:
        jax.jit(lambda x: x * 2, in_shardings=where).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        gib = re.search(r"available HBM \(([\d.]+)G\)", str(error))[1]
        return {"devices": len(found.devices), "bytes": float(gib) * 2**30}


def compiled(mesh, step, layout, manual=None):
    replicas = tuple(name for name in mesh.axis_names if name != "l")
    rows = NamedSharding(mesh, P(replicas))
    inside = layout if layout == P(replicas) else P()
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(inside, P(replicas)),
        out_specs=(inside, P(replicas)),
        axis_names=manual or set(mesh.axis_names),
        check_vma=False,
    )
    where = NamedSharding(mesh, layout)
    weight = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32, sharding=where)
    count = math.prod(mesh.shape[name] for name in replicas)
    x = jax.ShapeDtypeStruct((count * ROWS, WIDTH), jnp.float32, sharding=rows)
    jitted = jax.jit(mapped, donate_argnums=0, out_shardings=(where, rows))
    return jitted.lower(weight, x).compile()


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) - 1).mean()


def data_parallel(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - jax.lax.psum(gradient, "r"), value[None]


def sharded(part, x):
    whole = jax.lax.all_gather(part, ("r", "s"), tiled=True)
    value, gradient = jax.value_and_grad(loss)(whole, x)
    half = jax.lax.psum_scatter(gradient, "r", tiled=True)
    return part - jax.lax.psum_scatter(half, "s", tiled=True), value[None]


def loop(w, x):
    for _ in range(TURNS):
        # Else the compiler sees that the turns belong together, and makes another program.
        w, x = jax.lax.optimization_barrier((w, x))
        x = jnp.tanh(x @ w)
        w = w + jax.lax.psum(x.T @ x, "r")
    return w, x.sum()[None]


def larger_branch(w, x):
    y = jnp.tanh(jnp.tanh(x @ w) @ w)
    return w + jax.lax.psum(y.mean(), "r"), y.sum()[None]


def permutes(w, x):
    ring = [(i, (i + 1) % 16) for i in range(16)]
    for _ in range(TURNS):
        x = jax.lax.ppermute(jnp.tanh(x @ w), "r", ring)
    return w + x.sum(), x.sum()[None]


def facts(compiled):
    memory, text = compiled.memory_analysis(), compiled.as_text()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
        "traffic": compiled.cost_analysis()["bytes accessed"],
        "loops": text.count(" while("),
        "collectives": collectives(text),
        "text": text,
    }


def collectives(text):
    """Bytes by kind: of what is scattered over four devices before, of the others afterwards.

    Of what is begun and ended apart, the larger of both.
    """
    found = Counter()
    kinds = "all-reduce|all-gather|reduce-scatter|collective-permute"
    for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        arrays = re.findall(r"\b(f32|bf16)\[([\d,]*)\]", shape)
        sizes = [
            (4 if t == "f32" else 2) * int(np.prod([int(n) for n in s.split(",") if n]))
            for t, s in arrays
        ]
        times = 4 if kind == "reduce-scatter" else 1
        found[kind] += max(sizes) if kind == "collective-permute" else times * sum(sizes)
    return found


if __name__ == "__main__":
    main()
