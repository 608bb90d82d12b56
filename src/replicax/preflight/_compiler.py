"""The process that runs the compiler: a traced program in a folder -> what was made of it.

``python -m replicax.preflight._compiler FOLDER`` reads ``request.json`` and ``program.bin`` there,
and writes ``result.json`` and, if it compiles, the optimized program as ``hlo.txt``. It is a
process of its own as libtpu takes a process over: it reads the environment of TPU machines, locks
files and ends the program if something is amiss. XLA's compiler for GPUs wants flags of its own.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_LIMIT = re.compile(r"available HBM \(([\d.]+)G\)")
_TOO_LARGE = (1 << 21, 1 << 20)  # 2 TiB


def main(folder: Path) -> None:
    """Compile the program of ``folder``."""
    request = json.loads((folder / "request.json").read_text())
    limit = 0.0
    try:
        devices = _devices(request)
        limit = _limit(devices) if request["platform"] == "tpu" else 0.0
        compiled = _compiled(request, devices, (folder / "program.bin").read_bytes())
    except Exception as error:
        _write(folder, {"limit": limit, "error": f"{type(error).__name__}: {error}"})
        return
    (folder / "hlo.txt").write_text(compiled.as_text() or "")
    _write(folder, {"limit": limit} | _facts(compiled))


def _devices(request: dict[str, Any]) -> np.ndarray:
    """The devices of the mesh, in its order."""
    found = topologies.get_topology_desc(platform=request["platform"], **request["options"])
    places = request["places"]
    if not places:
        return np.asarray(found.devices)
    devices: list[Any] = list(found.devices)
    at = {(*d.coords, d.core_on_chip): d for d in devices}
    return np.asarray([at[tuple(place)] for place in places])


def _limit(devices: np.ndarray) -> float:
    """What a program may use of a device's memory; libtpu says so only when it refuses one."""
    where = NamedSharding(Mesh(devices, ("all",)), PartitionSpec())
    large = jax.ShapeDtypeStruct(_TOO_LARGE, jnp.uint8)
    try:
        jax.jit(lambda x: x + 1, in_shardings=where).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        found = _LIMIT.search(str(error))
        return float(found[1]) * (1 << 30) if found else 0.0
    return 0.0


def _compiled(request: dict[str, Any], devices: np.ndarray, program: bytes) -> Any:
    sizes, names = tuple(request["axes"].values()), tuple(request["axes"])
    mesh = Mesh(devices.reshape(sizes), names)
    exported = export.deserialize(bytearray(program))
    ins, outs = exported.in_shardings_jax(mesh), exported.out_shardings_jax(mesh)
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where)
        for aval, where in zip(exported.in_avals, ins, strict=True)
    ]
    args, _ = jax.tree.unflatten(exported.in_tree, avals)
    shardings, _ = jax.tree.unflatten(exported.in_tree, ins)
    jitted = jax.jit(
        exported.call,
        in_shardings=shardings,
        out_shardings=jax.tree.unflatten(exported.out_tree, outs),
        donate_argnums=(0,) if request["donates"] else (),
    )
    return jitted.lower(*args).compile()


def _facts(compiled: Any) -> dict[str, Any]:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
    }


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
