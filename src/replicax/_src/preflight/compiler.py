"""Compilation of a traced program in a separate process.

`compile_program` starts that process, or finds the result of an earlier one in a cache.
Run as a module with a folder, it reads ``request.json`` and ``program.bin`` in the
folder, and writes ``result.json`` and, if the program compiles, the optimized HLO as ``hlo.txt``.
The process is separate because libtpu takes over its process: it reads the environment of TPU
hosts, locks files, and aborts on errors. XLA's GPU compiler needs other flags than this process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import serialize_executable, topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax._src.base.errors import ReplicaxError
from replicax._src.files.paths import local_file, local_path
from replicax._src.values.placement import HOST_MEMORY

_LIMIT = re.compile(r"available HBM \(([\d.]+)G\)")
_TOO_LARGE = (1 << 21, 1 << 20)  # 2 TiB


_LONGEST_SECONDS = 3600
_BAD_FLAG = re.compile(
    r"No such compile option: '(?P<unknown>\w+)'"
    r"|Failed to parse '.*?' into flag (?P<unread>\w+)"
    r"|While setting option (?P<refused>\w+), [^\n]*"
)


class OptionError(ReplicaxError, ValueError):
    """A compiler option that does not exist, or an invalid value for one."""


@dataclass(frozen=True)
class Compiling:
    """Compiler options and outputs.

    Attributes:
        xla_flags: Compiler options, by name.
        executable: The file to write the executable to; empty for none.
        cache: The folder for cached results, keyed by the request and the program; empty for none.
    """

    xla_flags: Mapping[str, str | bool] = field(default_factory=dict)
    executable: str = ""
    cache: str = ""

    @classmethod
    def of(cls, flags: str = "", executable: str = "", cache: str = "") -> Compiling:
        """Parse the options of a command line.

        Raises:
            OptionError: If a flag is not one of XLA's.
        """
        pairs = [word.removeprefix("--").partition("=") for word in flags.split()]
        if wrong := [name for name, _, _ in pairs if not name.startswith("xla_")]:
            raise OptionError(
                f"{wrong[0]!r} is not a flag of XLA; flags look like --xla_tpu_enable_foo=true."
            )
        # Some options accept "true" and "false", others only booleans.
        values: dict[str, str | bool] = {"": True, "true": True, "false": False}
        key = {name: values.get(value.lower(), value) for name, _, value in pairs}
        return cls(key, executable, cache)

    def check_error(self, error: str) -> None:
        """Raise if the compiler's error is about one of the flags.

        Raises:
            OptionError: If so.
        """
        found = _BAD_FLAG.search(error)
        name = next((n for n in found.groups() if n), "") if found else ""
        if found and name in self.xla_flags:
            value = str(self.xla_flags[name]).lower()
            raise OptionError(
                f"The compiler does not take --{name}={value}: {found[0].rstrip(':')}. The names"
                " of its options begin with xla_tpu_ or xla_jf_ for TPUs, with xla_gpu_ for GPUs;"
                " this one came from --xla-flags."
            )


def compile_program(
    request: dict[str, Any], program: bytes, how: Compiling
) -> tuple[dict[str, Any], str]:
    """Compile a program, or read the result from the cache.

    Returns:
        The compiler's result, and the optimized program as text; empty if it failed.
    """
    path = os.path.abspath(local_path(how.executable)) if how.executable else ""
    request = request | {"flags": dict(how.xla_flags), "executable": path}
    with tempfile.TemporaryDirectory(prefix="replicax-preflight-") as name:
        folder = _cache_folder(request, program, how) or Path(name)
        if not (folder / "result.json").exists() or path:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "request.json").write_text(json.dumps(request))
            (folder / "program.bin").write_bytes(program)
            error = _run(folder)
            if not (folder / "result.json").exists():
                return {"error": error}, ""
        facts: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return facts, "" if "error" in facts else (folder / "hlo.txt").read_text()


def _cache_folder(request: dict[str, Any], program: bytes, how: Compiling) -> Path | None:
    """Return the cache folder of a request, keyed by its contents and the compiler versions."""
    if not how.cache:
        return None
    key = json.dumps([request, jax.__version__, _version("libtpu"), _version("jax-cuda12-pjrt")])
    return local_file(how.cache) / hashlib.sha256(key.encode() + program).hexdigest()[:32]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _run(folder: Path) -> str:
    """Run the compiler in a subprocess; return an error message in case it left no result."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "replicax._src.preflight.compiler", str(folder)],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=_LONGEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"The compiler took longer than {_LONGEST_SECONDS // 60} minutes, and was stopped."
    last = "\n".join(done.stderr.strip().splitlines()[-15:])
    return f"The compiler's process ended with status {done.returncode}:\n{last}"


def _environment() -> dict[str, str]:
    """Return this process's environment without device settings, and with libtpu's probing off."""
    foreign = ("XLA_FLAGS", "JAX_", "REPLICAX_", "TPU_", "LIBTPU_INIT_ARGS")
    keep = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    package = str(Path(__file__).parents[3])
    path = os.pathsep.join([package, *filter(None, [keep.get("PYTHONPATH")])])
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a lock file allows one preflight at a time
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    return keep | quiet | {"PYTHONPATH": path}


# The functions below run in the subprocess.


def main(folder: Path) -> None:
    """Compile the program in ``folder``, and write the result there."""
    request = json.loads((folder / "request.json").read_text())
    limit, started = 0.0, time.monotonic()
    try:
        devices = _devices(request)
        limit = _limit(devices) if request["platform"] == "tpu" else 0.0
        compiled = _compile(request, devices, (folder / "program.bin").read_bytes())
        if request["executable"]:
            _save(compiled, request["executable"])
    except Exception as error:
        _write(folder, {"limit": limit, "error": f"{type(error).__name__}: {error}"})
        return
    (folder / "hlo.txt").write_text(compiled.as_text() or "")
    seconds = time.monotonic() - started
    _write(folder, {"limit": limit, "seconds": seconds} | _facts(compiled))


def _devices(request: dict[str, Any]) -> np.ndarray:
    """Return the devices in the order of the mesh."""
    found = topologies.get_topology_desc(platform=request["platform"], **request["options"])
    places = request["places"]
    if not places:
        return np.asarray(found.devices)
    devices: list[Any] = list(found.devices)
    at = {(*d.coords, d.core_on_chip): d for d in devices}
    return np.asarray([at[tuple(place)] for place in places])


def _limit(devices: np.ndarray) -> float:
    """Return the memory available to a program; libtpu reports it only when it rejects one."""
    where = NamedSharding(Mesh(devices, ("all",)), PartitionSpec())
    large = jax.ShapeDtypeStruct(_TOO_LARGE, jnp.uint8)
    try:
        jax.jit(lambda x: x + 1, in_shardings=where).lower(large).compile()
    except jax.errors.JaxRuntimeError as error:
        found = _LIMIT.search(str(error))
        return float(found[1]) * (1 << 30) if found else 0.0
    return 0.0


def _compile(request: dict[str, Any], devices: np.ndarray, program: bytes) -> Any:
    """Compile the exported program for ``devices``, with its shardings and donations."""
    sizes, names = tuple(request["axes"].values()), tuple(request["axes"])
    mesh = Mesh(devices[: math.prod(sizes)].reshape(sizes), names)
    exported = export.deserialize(bytearray(program))
    whole = NamedSharding(mesh, PartitionSpec())
    # Exported programs do not record memory kinds.
    ins = tuple(_on_host(exported.in_shardings_jax(mesh), whole, request["host_inputs"]))
    outs = _on_host(exported.out_shardings_jax(mesh), whole, request["host_outputs"])
    avals = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=where)
        for aval, where in zip(exported.in_avals, ins, strict=True)
    ]

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **kwargs)

    jitted = jax.jit(
        flat,
        in_shardings=ins,
        out_shardings=jax.tree.unflatten(exported.out_tree, outs),
        donate_argnums=tuple(request["donated"]),
    )
    # Autotuning needs a GPU to run kernels on.
    gpu_options = {"xla_gpu_autotune_level": "0"} if request["platform"] == "cuda" else {}
    return jitted.lower(*avals).compile(compiler_options=gpu_options | request["flags"])


def _on_host(shardings: Sequence[Any], default: Any, offloaded: Sequence[int]) -> list[Any]:
    """Return the shardings, in the memory of the host where `offloaded` has their index."""
    found = [where or default for where in shardings]
    return [x.with_memory_kind(HOST_MEMORY) if i in offloaded else x for i, x in enumerate(found)]


def _save(compiled: Any, path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(serialize_executable.serialize(compiled), file)


def _facts(compiled: Any) -> dict[str, Any]:
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "host": memory.host_argument_size_in_bytes
        + memory.host_output_size_in_bytes
        - memory.host_alias_size_in_bytes
        + memory.host_temp_size_in_bytes,
        "flops": cost.get("flops", 0.0),
        "bytes_accessed": cost.get("bytes accessed", 0.0),
    }


def _write(folder: Path, result: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
