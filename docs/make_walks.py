"""The walks of `architecture.md`, measured: through which modules they go, as a drawing.

Run ``python docs/make_walks.py`` to draw `walks.svg` anew. The rows are the layers of
`pyproject.toml`, the boxes are modules, and a coloured dot in a box is a walk that runs code of it.
"""

import ast
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

DOCS = Path(__file__).parent
PACKAGE = Path(rx.__file__).parent
COLOURS = {
    "a start": "#7a5195",
    "a batch": "#ef5675",
    "a write": "#ffa600",
    "a step, first call": "#9fb8d6",
    "a step, warm": "#003f5c",
}


@contextmanager
def noted(seen: list[str]) -> Iterator[None]:
    """Note the modules of replicax whose code runs in the block, in all threads, in their order."""

    def note(frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(PACKAGE)):
            name = path[len(str(PACKAGE)) + 1 : -len(".py")]
            if name not in seen:
                seen.append(name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What ``run`` gives, and the modules that it goes through."""
    seen: list[str] = []
    with noted(seen):
        result = run()
    return result, seen


def walks() -> dict[str, list[str]]:
    """The modules of each walk, of a training step with variables on two replicas."""
    found = {}

    def started() -> Any:
        strategy = rx.distribute.MirroredStrategy(jax.devices()[:2])
        with strategy.scope():
            return strategy, rx.Variable(jnp.zeros(3), name="weights")

    (strategy, weights), found["a start"] = walk(started)
    data = rx.data.Dataset.from_tensor_slices(np.ones((4096, 3), np.float32)).batch(8)
    distributed = strategy.experimental_distribute_dataset(data)

    @rx.function
    def step(batch: Any) -> Any:
        def replica(x: Any) -> Any:
            loss, (change,) = rx.value_and_grad(lambda: jnp.mean(x @ weights), [weights])()
            change = rx.distribute.get_replica_context().all_reduce("SUM", change)
            weights.assign_sub(0.1 * change)
            return loss

        return strategy.reduce("MEAN", strategy.run(replica, args=(batch,)), axis=None)

    batch, found["a batch"] = walk(lambda: next(iter(distributed)))
    _, found["a write"] = walk(lambda: weights.assign(jnp.ones(3)))
    _, found["a step, first call"] = walk(lambda: step(batch))
    _, found["a step, warm"] = walk(lambda: step(batch))
    return found


def layers() -> list[str]:
    """The packages that walks can go through, from the highest to the lowest."""
    settings = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    names = [
        part.strip(" ()") for row in contract["layers"] for part in row.replace("|", ":").split(":")
    ]
    return [*(n for n in names if (PACKAGE / n).is_dir()), ""]


def imported_by(name: str) -> set[str]:
    """The modules of replicax that a module imports when it is imported itself."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    froms = [n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)]
    return {f[len("replicax.") :].replace(".", "/") for f in froms if f.startswith("replicax.")}


def drawing(found: dict[str, list[str]]) -> str:
    """The house as an SVG: a row for each layer, with a box for each module of a walk."""
    visited = sorted({name for names in found.values() for name in names})
    places, parts, height = {}, [], 64
    for layer in layers():
        names = [n for n in visited if n.rpartition("/")[0].split("/")[0] == layer]
        if names:
            parts.append(f'<text x="12" y="{height + 19}" class="layer">{layer or "(root)"}</text>')
        for at, name in enumerate(names):
            places[name] = (130 + 168 * (at % 6), height + 36 * (at // 6))
        height += 36 * -(-len(names) // 6) + 14 * bool(names)
    parts += _imports(places)
    for name, (x, y) in places.items():
        dots = [colour for what, colour in COLOURS.items() if name in found[what]]
        parts.append(_box(name, x, y, dots))
    for at, (what, colour) in enumerate(COLOURS.items()):
        x = 130 + 200 * at
        parts.append(f'<circle cx="{x}" cy="28" r="6" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="33">{what}: {len(found[what])} modules</text>')
    return _FRAME.format(height=height, parts="\n".join(parts))


_FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1150 {height}" font-family="sans-serif" \
font-size="13">
<style>rect{{fill:#fff;stroke:#8a94a6}}line{{stroke:#d5dae3}}.layer{{font-weight:bold}}</style>
<rect x="0" y="0" width="1150" height="{height}" style="stroke:none"/>
{parts}
</svg>
"""


def _imports(places: dict[str, tuple[int, int]]) -> Iterator[str]:
    for name, (x, y) in places.items():
        for other in sorted(imported_by(name) & set(places)):
            below, under = places[other]
            if under > y:
                yield f'<line x1="{x + 78}" y1="{y + 28}" x2="{below + 78}" y2="{under}"/>'


def _box(name: str, x: int, y: int, dots: list[str]) -> str:
    shown = name.rpartition("/")[2].lstrip("_")
    circles = [
        f'<circle cx="{x + 148 - 11 * at}" cy="{y + 14}" r="4" fill="{colour}"/>'
        for at, colour in enumerate(dots)
    ]
    return (
        f'<rect x="{x}" y="{y}" width="156" height="28" rx="5"/>'
        f'<text x="{x + 8}" y="{y + 18}">{shown}</text>{"".join(circles)}'
    )


if __name__ == "__main__":
    measured = walks()
    (DOCS / "walks.svg").write_text(drawing(measured))
    sys.stdout.write("".join(f"{what}: {len(names)}\n" for what, names in measured.items()))
