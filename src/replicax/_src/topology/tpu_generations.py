"""TPU generations, and the parsing of slice names such as ``v4:2x2x2``.

Flops and bandwidths are given per chip, and divided by the number of devices that JAX makes of it.
Interconnect figures are for one direction, half of a bidirectional bandwidth. Sources:

* v5e, v5p, v6e and tpu7x: Google's pages (docs.cloud.google.com/tpu/docs/v5e, /v5p, /tpu7x), also
  for the bandwidth to other slices: 6.4 Tb/s for the 256 chips of v5e, and 50, 100 and 100 Gb/s per
  chip of the others.
* v4: /v4, which rounds the memory bandwidth to 1,200 GB/s; that figure and the links, 2,400 Gb/s,
  as quoted from Google's comparison with v5p. /v4 gives 1.1 PB/s for the all-reduce of 4,096 chips,
  269 GB/s each, and jax-ml/scaling-book six links of 45 GB/s, 270. To other slices: 25 GB/s per
  host of four chips (jax-ml/scaling-book).
* v3: /v3 for flops and memory. For its links that page gives 340 TB/s for the all-reduce of 1,024
  chips, 332 GB/s each. Four links of 656 Gb/s, as here, are 328; jax-ml/scaling-book has 400.
* v2: no source was available, as its page has no figures, so its step times are unreliable. The
  paper "A Domain Specific Supercomputer for Training Deep Neural Networks", which the pages of v2
  and v3 cite, is reported to have them.

The memory is the amount that libtpu 0.0.42 makes available to a program.
"""

import math
import re
from dataclasses import dataclass

from replicax._src.base.errors import PlacementError

_NAME = re.compile(r"(?P<generation>\w+):(?P<chips>[1-9]\d*(x[1-9]\d*)*)")
_GIB = 1 << 30
_MEGACORE = "megacore"  # the two cores of a chip form one device


@dataclass(frozen=True)
class Generation:
    """The properties of one TPU generation.

    Attributes:
        name: The name, as in the name of a slice.
        devices_per_chip: The JAX devices per chip; the two cores of v4 and v5p form one.
        host: The chips of one host, along each axis.
        largest: The largest slice, in chips along each axis.
        hbm_gib: Memory of a device that is available to a program.
        chip_flops: Peak bfloat16 operations per second of a chip.
        chip_hbm_bytes: Memory bandwidth of a chip, in bytes per second.
        chip_ici_bytes: Bandwidth of a chip to its neighbours, in bytes per second over all links.
        chip_dcn_bytes: Bandwidth of a chip to other slices, in bytes per second; 0 if unknown.
        config: The compiler's name for such a chip, if it is not the name of the generation.
    """

    name: str
    devices_per_chip: int
    host: tuple[int, ...]
    largest: tuple[int, ...]
    hbm_gib: float
    chip_flops: float
    chip_hbm_bytes: float
    chip_ici_bytes: float
    chip_dcn_bytes: float = 0.0
    config: str = ""

    @property
    def hbm(self) -> float:
        """Memory of a device, in bytes."""
        return self.hbm_gib * _GIB

    @property
    def flops(self) -> float:
        """Peak operations per second of a device."""
        return self.chip_flops / self.devices_per_chip

    @property
    def hbm_bytes(self) -> float:
        """Memory bandwidth of a device, in bytes per second."""
        return self.chip_hbm_bytes / self.devices_per_chip

    @property
    def ici_bytes(self) -> float:
        """Bandwidth of a device to others in its slice, in bytes per second."""
        return self.chip_ici_bytes / self.devices_per_chip

    @property
    def dcn_bytes(self) -> float:
        """Bandwidth of a device to other slices, in bytes per second; 0 if unknown."""
        return self.chip_dcn_bytes / self.devices_per_chip


GENERATIONS = {
    g.name: g
    for g in (
        Generation("v2", 2, (2, 2), (16, 16), 7.48, 45e12, 700e9, 248e9),
        Generation("v3", 2, (2, 2), (32, 32), 15.48, 123e12, 900e9, 328e9),
        Generation(
            "v4", 1, (2, 2, 1), (16, 16, 16), 30.75, 275e12, 1228e9, 300e9, 6.25e9, _MEGACORE
        ),
        Generation("v5e", 1, (2, 2), (16, 16), 15.75, 197e12, 819e9, 200e9, 3.125e9),
        Generation(
            "v5p", 1, (2, 2, 1), (16, 16, 24), 95.74, 459e12, 2765e9, 600e9, 6.25e9, _MEGACORE
        ),
        Generation("v6e", 1, (2, 2), (16, 16), 31.25, 918e12, 1638e9, 400e9, 12.5e9),
        Generation("tpu7x", 2, (2, 2, 1), (16, 24, 24), 94.75, 2307e12, 7380e9, 600e9, 12.5e9),
    )
}


@dataclass(frozen=True)
class SliceShape:
    """A slice, as given by its name: a generation, and the chips along each axis.

    Example:
        >>> from replicax._src.topology.tpu_generations import SliceShape
        >>> shape = SliceShape.parse("v4:2x2x2")
        >>> shape.num_devices, shape.mesh_shape
        (8, (2, 2, 2, 1))
    """

    generation: Generation
    chips: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "SliceShape":
        """Parse the name of a slice.

        Raises:
            PlacementError: If there is no such slice; the message lists the known ones.
        """
        match = _NAME.fullmatch(str(name))
        generation = GENERATIONS.get(match["generation"]) if match else None
        if match is None or generation is None:
            raise PlacementError(
                f"{name!r} is not the name of a TPU slice: a generation, a colon and the chips"
                f" along each axis, such as 'v5e:4x4' or 'v4:2x2x2'. {_list_generations()}"
            )
        chips = tuple(map(int, match["chips"].split("x")))
        if problem := _validate(generation, chips):
            raise PlacementError(f"There is no slice {name!r}: {problem}. {_list_generations()}")
        return cls(generation, chips)

    @property
    def name(self) -> str:
        """The name, such as ``v4:2x2x2``."""
        return f"{self.generation.name}:{'x'.join(map(str, self.chips))}"

    @property
    def num_devices(self) -> int:
        """The number of JAX devices."""
        return math.prod(self.mesh_shape)

    @property
    def mesh_shape(self) -> tuple[int, int, int, int]:
        """Chips along x, y and z, and devices on each chip."""
        x, y, z = (*self.chips, 1, 1)[:3]
        return x, y, z, self.generation.devices_per_chip


def _validate(generation: Generation, chips: tuple[int, ...]) -> str:
    rank = len(generation.largest)
    if len(chips) != rank:
        return f"{generation.name} has {rank} axes of chips, not {len(chips)}"
    if any(n > most for n, most in zip(sorted(chips), sorted(generation.largest), strict=True)):
        return f"the largest is {generation.name}:{'x'.join(map(str, generation.largest))}"
    hosts_fit = all(n % h == 0 for n, h in zip(chips, generation.host, strict=True))
    if math.prod(chips) != 1 and not hosts_fit:
        host = "x".join(map(str, generation.host))
        return f"a machine holds {host} chips, and a slice is one chip or made of whole machines"
    return ""


def _list_generations() -> str:
    largest = (f"{g.name}:{'x'.join(map(str, g.largest))}" for g in GENERATIONS.values())
    return f"The generations, each with its largest slice, are {', '.join(largest)}."
