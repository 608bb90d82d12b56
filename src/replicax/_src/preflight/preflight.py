"""Preflight: compile a step for absent devices with the actual compiler, and report on it."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from replicax._src.preflight.advice import advise
from replicax._src.preflight.compiler import Compiling, compile_program
from replicax._src.preflight.costs import Cost, Costs
from replicax._src.preflight.hlo import Hlo
from replicax._src.preflight.memory import largest
from replicax._src.preflight.report import Memory, PreflightReport, Sweep
from replicax._src.preflight.targets import Target
from replicax._src.preflight.trace import UNCHANGED, Step, Traced, Variation, trace

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

    The step is your own function: it uses a strategy, which may run on virtual CPU devices here. It
    is traced as if the strategy's replicas filled the slice, each with the batch and the number of
    logical devices that it has here, and compiled by the TPU compiler itself
    (``pip install 'replicax[preflight]'``), in a separate process. Nothing is executed.

    Args:
        step: A function that calls ``strategy.run``, plain or an `rx.function`.
        args: Its arguments, as for a call.
        topology: The slice: a generation and the chips along each axis.
        kwargs: Its keyword arguments.

    Returns:
        Whether it compiles and fits, its memory, its collectives, and an estimate of its time.

    Raises:
        ImportError: If the TPU compiler is not installed.
        ValueError: If there is no such slice, or replicas do not fill it.
        TypeError: If the step uses no strategy.

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
    target = Target.parse(topology)
    require_compiler(target.platform)
    (report,) = compile_steps(Step.of(step, args, kwargs or {}), [target])
    return report


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
        The reports, which print as a table, and convert to JSON or a plot.

    Example:
        >>> sweep = rx.tpu.preflight_sweep(step, (batch,), ["v5e:2x4"])  # doctest: +SKIP
        >>> sweep.plot("scaling.svg")  # doctest: +SKIP
    """
    targets = [Target.parse(name) for name in topologies]
    for platform in {target.platform for target in targets}:
        require_compiler(platform)
    call = Step.of(step, args, kwargs or {})
    return Sweep(tuple(compile_steps(call, targets)))


def compile_steps(
    step: Step,
    targets: Sequence[Target],
    how: Compiling | None = None,
    variation: Variation = UNCHANGED,
) -> Iterator[PreflightReport]:
    """Compile a call for several targets in parallel; yield the reports in order."""
    traced = [trace(step, target, variation) for target in targets]
    compiled = partial(_compile, how=how or Compiling())
    with ThreadPoolExecutor(_num_compilers()) as pool:
        yield from pool.map(compiled, traced, targets)


def _num_compilers() -> int:
    """Return how many compilers may run in parallel: one per core and per 8 GiB of free memory."""
    try:
        free = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    rooms = int(free[1]) // (8 << 20) if free else 1
    return max(1, min(os.cpu_count() or 1, rooms))


def require_compiler(platform: str = "tpu") -> None:
    """Raise if the compiler for ``platform`` is missing.

    Raises:
        ImportError: If it is not installed.
    """
    compiler = _COMPILERS[platform]
    missing = [n for n in compiler.modules if not _is_installed(n)]
    if missing:
        raise ImportError(
            f"Preflight needs the {compiler.title}, and {' and '.join(missing)} is not installed."
            f" It runs on any Linux machine, without {compiler.devices}:\n\n"
            f"    pip install 'replicax[{compiler.extra}]'\n"
        )


@dataclass(frozen=True)
class _Compiler:
    title: str
    devices: str
    extra: str
    modules: tuple[str, ...]


_COMPILERS = {
    "tpu": _Compiler("TPU compiler", "TPUs", "preflight", ("libtpu", "flatbuffers")),
    "cuda": _Compiler(
        "compiler for NVIDIA GPUs",
        "GPUs",
        "preflight-cuda",
        ("jax_plugins.xla_cuda12", "nvidia.cuda_nvcc", "flatbuffers"),
    ),
}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing too
        return False


def _compile(traced: Traced, target: Target, how: Compiling) -> PreflightReport:
    """Compile a traced step, and report on it."""
    started = time.monotonic()
    request = traced.request() | {"platform": target.platform, "options": target.request}
    facts, text = compile_program(request, traced.program, how)
    how.check_error(facts.get("error", ""))
    return _make_report(traced, target, facts, text, time.monotonic() - started)


def _make_report(
    traced: Traced, target: Target, facts: dict[str, Any], text: str, seconds: float
) -> PreflightReport:
    """Build the report from the compiler's result and the optimized program."""
    error = facts.get("error", "")
    memory, hbm = _memory(facts), round(facts.get("limit", 0) or target.hbm)
    is_full = "RESOURCE_EXHAUSTED" in error
    if is_full:
        used, limit = _amount(_USED, error), _amount(_LIMIT, error)
        memory, hbm = Memory(total=used or hbm + 1), limit or hbm
    # The TPU compiler rejects programs that do not fit; the GPU compiler does not.
    fits = not is_full and (target.platform == "tpu" or memory.total <= hbm)
    near = target.limits.near if target.num_devices > target.limits.near else 0
    hlo = Hlo(text)
    cost = Costs(hlo, near, target.limits).of_step()
    return PreflightReport(
        step=traced.name,
        topology=target.name,
        num_devices=target.num_devices,
        num_replicas=traced.num_replicas,
        compiles=not error,
        fits=fits,
        error=error,
        memory=memory,
        hbm=hbm,
        collectives=tuple(cost.merged()),
        flops=cost.flops,
        bytes_accessed=_traffic(facts, cost),
        compile_seconds=facts.get("seconds", seconds),
        operation_seconds=cost.seconds,
        waiting_seconds=cost.waiting,
        advice=() if fits else advise(traced.contents, memory, hbm),
        notes=(*traced.notes, *_count_notes(cost.notes), *unknown_links(target)),
        limits=target.limits,
        largest=largest(hlo, traced.names),
        by_line=tuple(cost.merged(by_line=True)[:10]),
        hlo=text,
    )


def _traffic(facts: dict[str, Any], cost: Cost) -> float:
    """Return XLA's estimate of the memory traffic, plus the further iterations of loops."""
    return (facts.get("bytes_accessed") or cost.bytes_once) + cost.bytes - cost.bytes_once


def _count_notes(notes: Mapping[str, int]) -> Iterator[str]:
    for note, count in notes.items():
        yield f"{count} x {note}"


def unknown_links(target: Target) -> Iterator[str]:
    """Yield a note if the bandwidth between the slices of ``target`` is unknown."""
    limits = target.limits
    if target.num_devices > limits.near and not limits.far_bytes:
        yield (
            f"the bandwidth of {target.kind} between slices is not known: counted as if they were"
            " one slice"
        )


def _memory(facts: dict[str, Any]) -> Memory:
    if "error" in facts:
        return Memory()
    outputs = facts["outputs"] - facts["aliased"]
    parts = (facts["arguments"], outputs, facts["temporaries"], facts["code"])
    return Memory(*parts, total=sum(parts), host=facts.get("host", 0))


def _amount(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return round(float(match[1]) * _UNITS[match[2]]) if match else 0
