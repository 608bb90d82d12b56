"""The process that runs the TPU compiler: a traced program in a folder -> what was made of it.

``python -m replicax.preflight._compiler FOLDER`` reads ``request.json`` and ``program.bin`` there,
and writes ``result.json`` and, if it compiles, the optimized program as ``hlo.txt``. It is a
process of its own as libtpu takes a process over: it reads the environment of TPU machines, locks
files and ends the program if something is amiss.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import Mesh


def main(folder: Path) -> None:
    """Compile the program of ``folder``."""
    request = json.loads((folder / "request.json").read_text())
    try:
        compiled = _compiled(request, (folder / "program.bin").read_bytes())
    except Exception as error:
        _write(folder, {"error": f"{type(error).__name__}: {error}"})
        return
    (folder / "hlo.txt").write_text(compiled.as_text() or "")
    _write(folder, _facts(compiled))


def _compiled(request: dict[str, Any], program: bytes) -> Any:
    slice_of_devices = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["options"]
    )
    sizes, names = tuple(request["axes"].values()), tuple(request["axes"])
    mesh = Mesh(np.asarray(slice_of_devices.devices).reshape(sizes), names)
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
