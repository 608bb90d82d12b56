"""Division of a machine's GPUs among the workers that see the same ones.

Every worker announces the UUIDs of its visible GPUs at the roll call. This distinguishes a
scheduler that has divided them already (``srun --gpus-per-task``, ``replicax launch
--gpus-per-worker``, Ray) from one that shows all GPUs to every worker, without relying on any
launcher's variables: workers with the same list take equal parts of it, in the order of their
indices, and the only worker of a machine keeps all.
"""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from replicax._src.cluster.checks import RollCallError, show
from replicax._src.compat.jax import cuda_is_possible, show_gpus, shown_gpus

_log = logging.getLogger("replicax")
_LISTED = re.compile(r"^GPU \d+: .*\(UUID: ([^)]+)\)", re.M)


def local_gpus() -> list[str]:
    """Return the UUIDs of the GPUs that this process would use.

    Empty if JAX cannot use any, or if the program has selected devices itself (JAX's flag
    ``jax_cuda_visible_devices``).
    """
    if not cuda_is_possible() or shown_gpus() != "all":
        return []
    listed = _listed()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return listed
    found = []
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal() and int(name) >= len(listed):
            break  # like CUDA, ignore everything after the first invalid entry
        if not name or name == "-1":
            break
        found.append(listed[int(name)] if name.isdecimal() else name)
    return found


def _listed() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return []  # without a driver, JAX finds no GPU either
    return _LISTED.findall(done.stdout) if done.returncode == 0 else []


def divide(members: Sequence[dict[str, Any]], index: int) -> None:
    """Make JAX use this worker's part of the GPUs that it shares with others.

    Args:
        members: The facts that the workers sent at the roll call, in worker order.
        index: The index of this worker.

    Raises:
        RollCallError: If there are more workers than GPUs, or two workers see different lists with
            a GPU in common.
    """
    part = part_of([list(member.get("gpus") or ()) for member in members], index)
    if part is not None:
        show_gpus(part)


def part_of(lists: Sequence[Sequence[str]], index: int) -> list[int] | None:
    """Return the positions in its GPU list that a worker uses; None for all of them.

    Args:
        lists: The GPUs that each worker sees.
        index: The worker.

    Raises:
        RollCallError: If the GPUs cannot be divided.

    Example:
        >>> from replicax._src.workers.gpus import part_of
        >>> part_of([["a", "b"], ["a", "b"], ["c", "d"]], 1)
        [1]
        >>> part_of([["a", "b"], ["a", "b"], ["c", "d"]], 2) is None
        True
    """
    mine = list(lists[index])
    alike = [i for i, gpus in enumerate(lists) if list(gpus) == mine]
    if not mine:
        return None
    for other, gpus in enumerate(lists):
        if common := set(mine) & set(gpus) if other not in alike else set():
            raise RollCallError(
                f"Workers {index} and {other} see different lists of GPUs ({show(mine)} and"
                f" {show(list(gpus))}) with {show(sorted(common))} in both. Set"
                " CUDA_VISIBLE_DEVICES to lists that have no GPU in common, or to the same list,"
                " which they divide."
            )
    if len(alike) == 1:
        return None
    each, rest = divmod(len(mine), len(alike))
    if not each:
        raise RollCallError(
            f"Workers {', '.join(map(str, alike))} share {len(mine)} GPU(s), and each needs one of"
            f" its own. Start {len(mine)} worker(s) on that machine, or set JAX_PLATFORMS=cpu."
        )
    if rest and index == alike[0]:
        _log.warning(
            "%d GPU(s) of a machine stay unused: its %d workers take %d each.",
            rest,
            len(alike),
            each,
        )
    first = alike.index(index) * each
    return list(range(first, first + each))
