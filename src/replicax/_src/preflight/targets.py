"""Target devices: parsing their names, with the compiler's description and performance limits.

Sources of the GPU figures; links are one direction, half of the published bandwidth:

* Memory, its bandwidth, cores, caches and clocks: as the devices report them, recorded in XLA's
  ``xla/backends/gpu/target_config/specs`` (a100_sxm_80, h100_sxm, h200, b200). A datasheet's
  "80 GB" is less than that, and its 8 TB/s for b200 is more. l4 is not included there: 22,565 MiB
  and 58 cores as programs print them, the rest from its datasheet.
* Flops, bfloat16 without sparsity: the datasheets of A100 (312), H100 and H200 (989, half of 1,979
  with sparsity), DGX B200 (a quarter of 72 petaflops of FP8 with sparsity, divided by eight) and L4
  (half of 242), as quoted by other pages; the datasheets themselves were not available.
* Links: NVLink of A100 600, H100 and H200 900 GB/s; DGX B200 14.4 TB/s for eight
  (docs.nvidia.com/dgx/dgxb200-user-guide); L4 PCIe 4.0 with 16 lanes.
* Networks: one adapter per GPU, with 200 Gb/s in DGX A100, and 400 Gb/s in DGX H100, H200
  (docs.nvidia.com/dgx-basepod) and B200; for L4 a g2-standard-96 with 100 Gb/s for eight
  (cloud.google.com/compute/docs/gpus/gpu-network-bandwidth).

Registers and threads are from the CUDA programming guide's table of compute capabilities.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replicax._src.base.errors import PlacementError
from replicax._src.base.types import VariableSynchronization
from replicax._src.files.paths import local_file
from replicax._src.state.cell import Cell
from replicax._src.state.variable import Variable, live_variables, policy_for
from replicax._src.strategy.base import default_ops, live_strategies
from replicax._src.topology.mesh import Topology
from replicax._src.topology.tpu_generations import GENERATIONS, SliceShape
from replicax._src.values.sharded import is_sharded, is_sharded_over_replicas

_SLICES = re.compile(r"(?:(?P<count>[1-9]\d*)x ?)?(?P<slice>\w+[:-][\dx]+)")
_CORES = re.compile(r"(?P<kind>v\w+)-(?P<number>[1-9]\d*)")
_MACHINES = re.compile(r"(?P<gpu>.+):(?:(?P<hosts>[1-9]\d*)x)?(?P<each>[1-9]\d*)")
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@dataclass(frozen=True)
class Limits:
    """The peak rates of one device, per second.

    Attributes:
        flops: Operations on bfloat16.
        hbm_bytes: Memory bandwidth in bytes.
        link_bytes: Bandwidth to other devices of its host, or for TPUs of its slice.
        far_bytes: Bandwidth from one host, or slice, to others; 0 if unknown.
        near: The number of devices per host or slice.

    Example:
        >>> from replicax._src.preflight.targets import Limits
        >>> Limits(flops=1e15, hbm_bytes=3e12, link_bytes=4e11).flops
        1000000000000000.0
    """

    flops: float
    hbm_bytes: float
    link_bytes: float
    far_bytes: float = 0.0
    near: int = 0

    def seconds(self, sent: float, group: int, hosts: int) -> float:
        """Return the time for a device to send ``sent`` bytes to a group on ``hosts`` hosts."""
        near = sent / self.link_bytes
        if hosts == 1 or not self.far_bytes:
            return near
        # All groups that have members on a host share its network.
        share = self.far_bytes * (group / hosts) / self.near
        return max(near, sent / share)


@dataclass(frozen=True)
class Target:
    """Devices to compile for, which this machine does not have.

    Attributes:
        name: The name, as given.
        platform: ``tpu`` or ``cuda``.
        kind: The name of the chip.
        num_devices: The number of devices.
        hbm: Memory of a device that is available to a program, in bytes.
        limits: The peak rates of a device.
        request: The arguments of `jax.experimental.topologies.get_topology_desc`.
        mesh_shape: Chips along x, y and z, and devices per chip; empty for GPUs.
    """

    name: str
    platform: str
    kind: str
    num_devices: int
    hbm: int
    limits: Limits
    request: dict[str, Any] = field(default_factory=dict)
    mesh_shape: tuple[int, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Target:
        """Parse the name of a slice or of GPU hosts.

        Raises:
            PlacementError: If there is no such target; the message lists the known ones.

        Example:
            >>> from replicax._src.preflight.targets import Target
            >>> [Target.parse(n).num_devices for n in ("v5e:4x4", "v5p-128", "h100:2x8")]
            [16, 64, 16]
        """
        try:
            return _parse(str(name))
        except PlacementError as error:
            raise PlacementError(
                f"{error} Several slices are '2x v5e:16x16'. GPUs are machines x GPUs of each, such"
                f" as 'h100:2x8'; known are {', '.join(_GPUS)}, and files 'mine.json:2x8'."
                f"{_suggest(str(name))}"
            ) from error.__cause__


def _parse(name: str) -> Target:
    machines = _MACHINES.fullmatch(name)
    gpu = _gpu(machines["gpu"]) if machines else None
    if machines and gpu:
        return _gpu_target(name, gpu, int(machines["hosts"] or 1), int(machines["each"]))
    slices = _SLICES.fullmatch(name)
    shape = SliceShape.parse(_canonical_slice(slices["slice"]) if slices else name)
    return _slice_target(name, shape, int((slices and slices["count"]) or 1))


def _suggest(name: str) -> str:
    """Return a question that suggests the closest existing name; "" if there is none."""
    kind, *size = re.split("[:-]", name.lower())
    sizes = {k: "4x4" if len(GENERATIONS[k].host) == 2 else "4x4x4" for k in GENERATIONS}
    sizes |= dict.fromkeys(_GPUS, "8")
    kinds = difflib.get_close_matches(kind, sizes, n=3, cutoff=0.6)
    asked = [f"{near}:{''.join(size)}" for near in kinds]
    for tried in (*asked, *(f"{near}:{sizes[near]}" for near in kinds)):
        with suppress(PlacementError):
            return f" Did you mean {_parse(tried).name!r}?"
    return ""


@dataclass(frozen=True)
class _Gpu:
    name: str
    memory: float
    limits: tuple[float, float, float, float]  # flops, memory, links, network per GPU
    config: str


def _slice_target(name: str, shape: SliceShape, count: int) -> Target:
    """Return the target for ``count`` slices."""
    chip = shape.generation
    far = chip.dcn_bytes * shape.num_devices if count > 1 else 0.0
    request: dict[str, Any] = {"topology_name": shape.name}
    if chip.config:
        request["chip_config_name"] = chip.config
    if max(shape.chips) == 1:  # libtpu assumes that a slice consists of whole hosts
        request["chips_per_host_bounds"] = (1, 1, 1)
    if count > 1:
        request["num_slices"] = count
    limits = Limits(chip.flops, chip.hbm_bytes, chip.ici_bytes, far, shape.num_devices)
    mesh = shape.mesh_shape if count == 1 else ()
    devices = count * shape.num_devices
    return Target(name, "tpu", chip.name, devices, round(chip.hbm), limits, request, mesh)


def _canonical_slice(name: str) -> str:
    """Convert ``v5p-128`` to ``v5p:4x4x4``: it counts TensorCores, of which most chips have two."""
    match = _CORES.fullmatch(name.replace("v5litepod", "v5e"))
    chip = GENERATIONS.get(match["kind"]) if match else None
    if match is None or chip is None:
        return name
    cores = 1 if chip.name in ("v5e", "v6e") else 2
    chips, rest = divmod(int(match["number"]), cores)
    if rest or chips & (chips - 1) or not chips:
        raise PlacementError(
            f"There is no slice {name!r} with a usual shape. Give its chips along each axis, such"
            f" as '{chip.name}:{'x'.join(map(str, chip.host))}'."
        )
    sides = [1] * len(chip.largest)
    while math.prod(sides) < chips:
        sides[-1] *= 2
        sides.sort(reverse=True)
    sides = sorted(sides) if chips > 4 else sides
    return f"{chip.name}:{'x'.join(map(str, sides))}"


def _gpu_target(name: str, gpu: _Gpu, hosts: int, each: int) -> Target:
    """Return the target for ``hosts`` hosts with ``each`` GPUs."""
    flops, memory, links, network = gpu.limits
    # The fraction of a GPU's memory that JAX preallocates, unless configured otherwise.
    usable = gpu.memory * float(os.environ.get(_FRACTION) or 0.75)
    far = network * each if hosts > 1 else 0.0
    request = {"target_config": gpu.config, "topology": f"1x{hosts}x{each}"}
    limits = Limits(flops, memory, links, far, each)
    return Target(name, "cuda", gpu.name, hosts * each, round(usable), limits, request)


def _gpu(name: str) -> _Gpu | None:
    return _read_gpu(local_file(name)) if name.endswith(".json") else _GPUS.get(name)


def _read_gpu(path: Path) -> _Gpu:
    """Read a user's description of a GPU; see `docs/preflight.md`."""
    needed = ("memory", "flops", "hbm_bytes", "link_bytes", "network_bytes", "target_config")
    try:
        facts = json.loads(path.read_text())
        memory, *limits, config = (facts[key] for key in needed)
        numbers = [float(x) for x in (memory, *limits)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PlacementError(
            f"{path} does not describe a GPU ({type(error).__name__}: {error}). It is a JSON file"
            f" with {', '.join(needed)}; bytes and operations are those of one second, the last is"
            " XLA's GpuTargetConfig as text."
        ) from error
    return _Gpu(path.stem, numbers[0], tuple(numbers[1:]), str(config))  # type: ignore[arg-type]


def _config(description: str, capability: tuple[int, int], chip: dict[str, float]) -> str:
    """Return XLA's GpuTargetConfig as text."""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "threads_per_core_limit": 2048,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    } | chip
    lines = " ".join(f"{key}: {value}" for key, value in info.items())
    major, minor = capability
    return (
        f"gpu_device_info {{ {lines} cuda_compute_capability {{ major: {major} minor: {minor} }} }}"
        ' platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }'
        f' runtime_version {{ major: 12 minor: 8 }} device_description_str: "{description}"'
    )


def _chip_info(
    cores: int, shared: int, cache: int, clock: float, **others: int
) -> dict[str, float]:
    chip: dict[str, float] = {
        "core_count": cores,
        "shared_memory_per_core": shared,
        "shared_memory_per_block_optin": shared - 1024,
        "l2_cache_size": cache,
        "clock_rate_ghz": clock,
    }
    return chip | others


def _make_gpu(
    name: str,
    title: str,
    capability: tuple[int, int],
    figures: tuple[float, tuple[float, float, float, float]],
    chip: dict[str, float],
) -> _Gpu:
    memory, limits = figures
    sizes = {"device_memory_size": int(memory), "memory_bandwidth": int(limits[1])}
    return _Gpu(name, memory, limits, _config(title, capability, chip | sizes))


_HOPPER = _chip_info(132, 233472, 52428800, 1.98)
_GPUS = {
    gpu.name: gpu
    for gpu in (
        _make_gpu(
            *("a100", "NVIDIA A100-SXM4-80GB", (8, 0)),
            (85_100_068_864, (312e12, 2_039_040_000_000, 300e9, 25e9)),
            _chip_info(108, 167936, 41943040, 1.41, fpus_per_core=64),
        ),
        _make_gpu(
            *("h100", "NVIDIA H100 80GB HBM3", (9, 0)),
            (84_942_979_072, (989e12, 3_352_320_000_000, 450e9, 50e9)),
            _HOPPER,
        ),
        _make_gpu(
            *("h200", "NVIDIA H200", (9, 0)),
            (151_397_597_184, (989e12, 4_800_000_000_000, 450e9, 50e9)),
            _HOPPER,
        ),
        _make_gpu(
            *("b200", "NVIDIA B200", (10, 0)),
            (191_514_411_008, (2250e12, 7_672_320_000_000, 900e9, 50e9)),
            _chip_info(148, 233472, 132644864, 1.965),
        ),
        _make_gpu(
            *("l4", "NVIDIA L4", (8, 9)),
            (22_565 << 20, (121e12, 300e9, 32e9, 12.5e9 / 8)),
            _chip_info(58, 102400, 50331648, 2.04, threads_per_core_limit=1536),
        ),
    )
}


@contextmanager
def redeclare_variables(target: Topology, policy: str) -> Iterator[None]:
    """Redeclare every variable for one replica or for several, as ``target`` has them.

    A script with one replica has ordinary variables, while on a slice it has distributed ones.
    """
    several = target.num_replicas > 1
    found = [(v, v.topology) for v in live_variables if v.whole is v]
    placed = [v for v, where in found if where is not None]
    strategies = {v.distribute_strategy for v in placed}
    old_policies = {s: (s.variable_policy, vars(s)["_ops"]) for s in strategies}
    old = [(v, v.cell, vars(v)["_policy"], v.cell.per_replica, v.cell.sharded) for v in placed]
    for strategy in strategies if policy else ():
        ops = default_ops(target, sharded=is_sharded(policy))
        vars(strategy).update(variable_policy=policy, _ops=ops)
    for variable, where in found:
        if where is not None and (policy or (where.num_replicas > 1) != several):
            _declare(variable, target)
    try:
        yield
    finally:
        for strategy, (policy_before, ops) in old_policies.items():
            vars(strategy).update(variable_policy=policy_before, _ops=ops)
        for variable, cell, sync_policy, per_replica, was_sharded in old:
            vars(variable)["_policy"] = sync_policy
            cell.per_replica, cell.sharded = per_replica, was_sharded


@contextmanager
def move_to(target: Topology, used: Sequence[Cell]) -> Iterator[None]:
    """Pretend that all strategies and their variables are on ``target``, which has no devices.

    Args:
        target: The topology for which the step is traced.
        used: The cells that the step uses, including values that it closes over, which belong
            to no variable.
    """
    cells = {id(c): c for c in (*used, *(v.cell for v in live_variables))}.values()
    placed = [(c, c.topology) for c in cells if c.topology is not None]
    strategies = [(s, s.topology) for s in live_strategies if s.topology is not None]
    for cell, _ in placed:
        cell.topology = target
    for strategy, _ in strategies:
        vars(strategy)["_topology"] = target
    try:
        yield
    finally:
        for cell, here in placed:
            cell.topology = here
        for strategy, here in strategies:
            vars(strategy)["_topology"] = here


def _declare(variable: Variable, target: Topology) -> None:
    """Set a variable's layout and policy for the replicas of ``target``."""
    cell, strategy, several = variable.cell, variable.distribute_strategy, target.num_replicas > 1
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    cell.per_replica = on_read and several
    policy_name = strategy.variable_policy
    cell.sharded = (
        several and not on_read and is_sharded_over_replicas(cell, policy_name, target, cell.spec)
    )
    policy = policy_for(cell, strategy, variable.aggregation, several=several)
    vars(variable)["_policy"] = policy
