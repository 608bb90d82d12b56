"""Advice for a step that does not fit: what would need less memory, and how much less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from replicax._src.base.rendering import show_bytes
from replicax._src.preflight.report import Memory

_NEGLIGIBLE = 0.01  # of the memory of a device


@dataclass(frozen=True)
class DeviceContents:
    """The contents of a device's memory, as far as they are known before compilation.

    Attributes:
        variables: The bytes of all variables on a device.
        mirrored: The bytes of variables that each replica holds whole, and that could be sharded.
        rows: The rows of one replica's batch; 0 if the step has no batch.
        replicas: The number of replicas; 0 for a program without a strategy.
    """

    variables: int = 0
    mirrored: int = 0
    rows: int = 0
    replicas: int = 0


def advise(contents: DeviceContents, memory: Memory, hbm: int) -> tuple[str, ...]:
    """Return suggestions that reduce the memory of a step, the largest saving first.

    Args:
        contents: The contents of a device's memory.
        memory: The memory that the step needs.
        hbm: The memory of a device.
    """
    if memory.total <= hbm or not contents.replicas:
        return ()
    choices = [*_sharding(contents), *_smaller_activations(contents, memory, hbm)]
    worth = [c for c in choices if c[0] > _NEGLIGIBLE * hbm]
    lines = [text for _, text in sorted(worth, key=lambda c: -c[0])]
    return (*lines, *_more_devices(contents))


def _sharding(contents: DeviceContents) -> Iterator[tuple[float, str]]:
    count = contents.replicas
    if count > 1:
        saved = contents.mirrored * (count - 1) // count
        yield (
            saved,
            f'variable_policy="sharded": each of {count:,} replicas stores 1/{count:,} of the'
            f" variables, {show_bytes(saved)} less between steps",
        )


def _smaller_activations(
    contents: DeviceContents, memory: Memory, hbm: int
) -> Iterator[tuple[float, str]]:
    """Yield ways to reduce the memory of everything but the variables."""
    rest = memory.total - contents.variables
    room = max(hbm - contents.variables, 1)
    if contents.rows > 1:
        least = min(-(-rest // room), contents.rows)
        parts = next(k for k in range(max(least, 2), contents.rows + 1) if not contents.rows % k)
        yield (
            rest * (parts - 1) / parts,
            f"rx.accumulate(fn, {parts}): gradients of {contents.rows // parts} of the"
            f" {contents.rows} rows of a replica at a time, of at most {show_bytes(rest)} for"
            " activations and gradients",
        )
    yield (
        rest / 2,
        f"rx.remat(layer): keeps the inputs of layers and no other activations, of at most"
        f" {show_bytes(rest)} for activations and gradients",
    )


def _more_devices(contents: DeviceContents) -> Iterator[str]:
    yield (
        'devices_per_replica={"tensor": 2} with an rx.tpu.LayoutMap: two devices share the'
        " activations and variables of a replica"
    )
    if not contents.mirrored and contents.variables:
        yield (
            f"twice as many devices: variables, which are sharded, take half of"
            f" {show_bytes(contents.variables)}"
        )
