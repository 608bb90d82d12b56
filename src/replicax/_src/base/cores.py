"""The CPU cores that this process may use, and its share if it uses them with other workers.

A scheduler limits a task in two ways: by a set of cores (Slurm's cgroups and task affinity, cpusets
of containers), and by a quota of CPU time (CPU limits of Kubernetes and Docker). Every worker
announces both at the roll call, with names that mean the same in all processes of one kernel. So
workers divide what they share, and keep what a scheduler has divided, whatever the launcher.
"""

import os
import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_CGROUPS = Path("/sys/fs/cgroup")
_own_share: list[float] = []  # set when this process has joined other workers


def local_facts() -> dict[str, Any]:
    """Return the facts that this process announces: its machine, its cores, and their quotas."""
    try:  # the host name is not enough: containers of one machine have different ones
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = socket.gethostname()
    return {"machine": machine, "cores": _ranges(visible()), "quotas": _quotas()}


def visible() -> list[int]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable() -> int:
    """Return how many threads can compute at the same time in this process; at least 1."""
    share = _own_share[0] if _own_share else share_of([local_facts()], 0)
    return max(1, int(share + 1e-6))


def divide(members: Sequence[Mapping[str, Any]], index: int) -> None:
    """Set this worker's share of the cores that it uses with others.

    Args:
        members: The facts that the workers sent at the roll call, in worker order.
        index: The index of this worker.
    """
    _own_share[:] = [share_of(members, index)]


def share_of(members: Sequence[Mapping[str, Any]], index: int) -> float:
    """Return a worker's share of its machine, in cores.

    Each core counts in equal parts for the workers that may use it, and so does each quota.

    Example:
        >>> from replicax._src.base.cores import share_of
        >>> shared = {"machine": "m", "cores": "0-7", "quotas": []}
        >>> first, second = ({**shared, "cores": cores} for cores in ("0-3", "4-7"))
        >>> share_of([shared, shared], 0), share_of([first, second], 0)
        (4.0, 4.0)
        >>> pod = {**shared, "quotas": [[17, 1.5]]}
        >>> share_of([pod], 0), share_of([pod, pod], 0)
        (1.5, 0.75)
    """
    mine = members[index]
    near = [member for member in members if member["machine"] == mine["machine"]]
    users = Counter(core for member in near for core in _numbers(member["cores"]))
    groups = Counter(group for member in near for group, _ in member["quotas"])
    by_set = sum(1 / users[core] for core in _numbers(mine["cores"]))
    by_quota = [float(cores) / groups[group] for group, cores in mine["quotas"]]
    return min([by_set, *by_quota])


def _ranges(numbers: Sequence[int]) -> str:
    """Return increasing numbers as the kernel writes them: ``0-3,8``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{low}-{high}" if high > low else f"{low}" for low, high in parts)


def _numbers(ranges: str) -> Iterator[int]:
    for part in filter(None, ranges.split(",")):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def _quotas() -> list[tuple[int, float]]:
    """Return the quotas of this process's cgroup and of its ancestors, as (inode, cores)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        # In a container the path may be the host's, which does not exist here; the root does.
        for place in (folder, *folder.parents):
            if place.is_relative_to(root) and (cores := _quota(place)) is not None:
                found[place.stat().st_ino] = cores
    return sorted(found.items())


def _quota(folder: Path) -> float | None:
    """Return the CPU limit of one cgroup (version 2, else 1) in cores, or None."""
    try:
        if (both := folder / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):  # not here, or "max"
        return None
