"""When does it pay to pack gradients into one all-reduce? The ground of the limits in _packing.py.

    python benchmarks/packing.py

Two virtual CPU replicas all-reduce a list of equal arrays: packed, and one by one.
"""

import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import replicax as rx  # noqa: E402
from benchmarks._timing import Block, Comparison, Spread, block, compare  # noqa: E402
from replicax._src.collectives.packing import WITHIN_PROCESS, packed  # noqa: E402

KIB = 1024
LEAF_SIZES = tuple(n * KIB for n in (1, 4, 16, 32, 64, 256))
PACK_SIZES = tuple(n * KIB for n in (256, 1024))
COUNT = 32


def main() -> None:
    [cpu] = rx.config.list_physical_devices("CPU")
    rx.config.set_logical_device_configuration(cpu, [rx.config.LogicalDeviceConfiguration()] * 2)
    console = Console(width=None if sys.stdout.isatty() else 100)
    table = Table(title=f"packed / one by one (now: {WITHIN_PROCESS.small_bytes // KIB} KiB)")
    _columns(table, f"each of {COUNT} arrays", "packed", "one by one")
    for size in LEAF_SIZES:
        everything = COUNT * size
        found = compare(_step(size, COUNT, everything), _step(size, COUNT, 0), pairs=40)
        table.add_row(f"{size // KIB} KiB", *_cells(found))
    console.print(table)
    now = f"now: {WITHIN_PROCESS.pack_bytes // KIB} KiB"
    table = Table(title=f"256 arrays of 16 KiB: this limit / 4 MiB ({now})")
    _columns(table, "limit of a pack", "this", "4 MiB")
    for limit in PACK_SIZES:
        ours, theirs = (_step(16 * KIB, 256, n) for n in (limit, 4096 * KIB))
        table.add_row(f"{limit // KIB} KiB", *_cells(compare(ours, theirs, pairs=20)))
    console.print(table)


def _step(size: int, count: int, bytes_per_pack: int) -> Block:
    mesh, same = Mesh(jax.devices()[:2], ("replica",)), PartitionSpec()

    def body(leaves: list[jax.Array]) -> list[jax.Array]:
        # Computed, as gradients are: an input could be reduced where it lies.
        leaves = [x * 0.5 for x in leaves]
        total = partial(jax.lax.psum, axis_name="replica")
        return packed(total, leaves, bytes_per_pack=bytes_per_pack, num_packs=0)

    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(same,), out_specs=same, check_vma=False),
        donate_argnums=0,
    )
    state = [[jnp.ones(size // 4) for _ in range(count)]]

    def once() -> None:
        state[0] = step(state[0])

    return block(once, lambda: jax.block_until_ready(state[0]))


def _columns(table: Table, first: str, ours: str, theirs: str) -> None:
    for name in (first, "ratio", "quartiles", ours, theirs):
        table.add_column(name, justify="right")


def _cells(found: Comparison) -> tuple[str, ...]:
    ratio = found.ratio
    medians = (Spread.of(side).median for side in (found.ours, found.theirs))
    times = [f"{t * 1e3:.2f} ms" for t in medians]
    return f"{ratio.median:.2f}", f"{ratio.low:.2f}..{ratio.high:.2f}", *times


if __name__ == "__main__":
    main()
