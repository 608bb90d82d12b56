"""preflight: compile a step for a slice that is not here, with the real TPU compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from replicax.preflight._hlo import Hlo
from replicax.preflight._report import Memory, PreflightReport
from replicax.preflight._sweep import Sweep
from replicax.preflight._trace import Step, Traced, trace
from replicax.topology._generations import SliceShape

_LONGEST_SECONDS = 1800
_USED = re.compile(r"(?:Used |temporaries \(|required[^(]*\()([\d.]+)([KMGT])")
_LIMIT = re.compile(r"(?: of |available HBM \()([\d.]+)([KMGT])")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def preflight(
    step: Callable[..., Any],
    args: Sequence[Any] = (),
    topology: str = "v5e:16x16",
    kwargs: Mapping[str, Any] | None = None,
) -> PreflightReport:
    """Compile a step for a TPU slice, on a machine without TPUs.

    The step is your own: it uses a strategy, which may run on virtual CPU devices here. It is
    traced as if that strategy had as many replicas as fill the slice, each with the batch and the
    number of logical devices that it has here, and compiled by the TPU compiler itself
    (``pip install 'replicax[tpu]'``), in a process of its own. Nothing is run.

    Args:
        step: A function that calls ``strategy.run``, plain or an `rx.function`.
        args: Its arguments, as for a call here.
        topology: The slice: a generation and the chips along each axis.
        kwargs: Its keyword arguments.

    Returns:
        Whether it compiles and fits, its memory, its collectives and an estimate of its time.

    Raises:
        ImportError: The TPU compiler is not installed.
        ValueError: There is no such slice, or replicas do not fill it.
        TypeError: The step uses no strategy.

    Example:
        >>> strategy = rx.distribute.TPUStrategy()
        >>> with strategy.scope():
        ...     weight = rx.Variable(jnp.zeros((256, 256)))
        >>> @rx.function
        ... def step(x):
        ...     return strategy.run(lambda x: (x @ weight).sum(), args=(x,))
        >>> report = rx.tpu.preflight(step, (jnp.ones((8, 256)),), "v5e:4x4")  # doctest: +SKIP
        >>> report.fits, report.num_replicas  # doctest: +SKIP
        (True, 16)
    """
    SliceShape.parse(topology)
    require_compiler()
    return compile_step(Step.of(step, args, kwargs or {}), topology)


def preflight_sweep(
    step: Callable[..., Any],
    args: Sequence[Any] = (),
    topologies: Sequence[str] = ("v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16"),
    kwargs: Mapping[str, Any] | None = None,
) -> Sweep:
    """Compile a step for several slices; see `preflight`.

    Args:
        step: A function that calls ``strategy.run``.
        args: Its arguments.
        topologies: The slices.
        kwargs: Its keyword arguments.

    Returns:
        The reports, as a table, as JSON and as a plot.

    Example:
        >>> sweep = rx.tpu.preflight_sweep(step, (batch,), ["v5e:2x4"])  # doctest: +SKIP
        >>> sweep.plot("scaling.svg")  # doctest: +SKIP
    """
    for name in topologies:
        SliceShape.parse(name)
    return Sweep(tuple(preflight(step, args, name, kwargs) for name in topologies))


def compile_step(step: Step, topology: str) -> PreflightReport:
    """Compile a call for a slice."""
    shape = SliceShape.parse(topology)
    return _compiled(trace(step, shape), shape)


def require_compiler() -> None:
    """Refuse to go on without the TPU compiler.

    Raises:
        ImportError: It is not installed.
    """
    missing = [n for n in ("libtpu", "flatbuffers") if importlib.util.find_spec(n) is None]
    if missing:
        raise ImportError(
            f"Preflight needs the TPU compiler, and {' and '.join(missing)} is not installed. It"
            " runs on any Linux machine, without TPUs:\n\n    pip install 'replicax[tpu]'\n"
        )


def _compiled(traced: Traced, shape: SliceShape) -> PreflightReport:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="replicax-preflight-") as name:
        folder = Path(name)
        request = {"topology": shape.name, "axes": traced.axes, "donates": traced.donates}
        if max(shape.chips) == 1:  # libtpu takes a slice to be made of whole machines
            request["options"] = {"chips_per_host_bounds": (1, 1, 1)}
        (folder / "request.json").write_text(json.dumps({"options": {}} | request))
        (folder / "program.bin").write_bytes(traced.program)
        facts = _run_compiler(folder)
        seconds = time.monotonic() - started
        hlo = Hlo((folder / "hlo.txt").read_text()) if "error" not in facts else Hlo("")
    return _reported(traced, shape, facts, hlo, seconds)


def _run_compiler(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "replicax.preflight._compiler", str(folder)],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_LONGEST_SECONDS,
        check=False,
    )
    result = folder / "result.json"
    if result.exists():
        facts: dict[str, Any] = json.loads(result.read_text())
        return facts
    last = "\n".join(done.stderr.strip().splitlines()[-15:])
    return {"error": f"The compiler's process ended with status {done.returncode}:\n{last}"}


def _environment() -> dict[str, str]:
    """Of this process, without what asks for devices, and with what keeps libtpu from searching."""
    foreign = ("XLA_FLAGS", "JAX_", "REPLICAX_", "TPU_", "LIBTPU_INIT_ARGS")
    keep = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join([package, *filter(None, [keep.get("PYTHONPATH")])])
    quiet = {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one preflight at a time, by a file that locks
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
    }
    return keep | quiet | {"PYTHONPATH": path}


def _reported(
    traced: Traced, shape: SliceShape, facts: dict[str, Any], hlo: Hlo, seconds: float
) -> PreflightReport:
    error = facts.get("error", "")
    memory, hbm = _memory(facts), round(shape.generation.hbm)
    is_full = "RESOURCE_EXHAUSTED" in error
    if is_full:
        used, limit = _amount(_USED, error), _amount(_LIMIT, error)
        memory, hbm = Memory(total=used or hbm + 1), limit or hbm
    return PreflightReport(
        step=traced.name,
        topology=shape.name,
        num_devices=shape.num_devices,
        num_replicas=traced.num_replicas,
        compiles=not error,
        fits=not is_full and memory.total <= hbm,
        error=error,
        memory=memory,
        hbm=hbm,
        collectives=tuple(hlo.collectives()),
        flops=hlo.flops(),
        bytes_accessed=facts.get("bytes_accessed", 0.0),
        compile_seconds=seconds,
    )


def _memory(facts: dict[str, Any]) -> Memory:
    if "error" in facts:
        return Memory()
    outputs = facts["outputs"] - facts["aliased"]
    parts = (facts["arguments"], outputs, facts["temporaries"], facts["code"])
    return Memory(*parts, total=sum(parts))


def _amount(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0
