"""What a step costs over the hand-written one, as programs grow: tables, JSON and plots.

    python -m benchmarks.curves [--quick] [--out FOLDER] [--against FILE]

Over the number of variables, of replicas, of rows in a batch and of workers. ``--out`` gets a table
in Markdown, ``curves.json`` and a plot for each curve; ``--against`` compares with such a JSON, and
fails where a ratio is far above the one in it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax

import replicax as rx
from benchmarks._models import MLP, POOLED_CNN, SMALL_MLP, of_variables
from benchmarks._steps import by_hand, with_replicax
from benchmarks._timing import Spread, compare
from benchmarks.core import empty_steps
from benchmarks.workers import Workers

MARGIN = 1.8  # times the ratio that was measured before: other machines, and other programs on them
DEVICES = 64

Point = tuple[float, Spread]


def variables(share: int) -> Iterator[Point]:
    """variables"""
    for count in (10, 100) if share > 1 else (10, 100, 1000, 5000):
        model = of_variables(count)
        yield count, _steps(2, model, share)


def replicas(share: int) -> Iterator[Point]:
    """replicas of a small MLP"""
    for count in (2, 8) if share > 1 else (2, 4, 8, 16, 32, 64):
        yield count, _steps(count, replace(SMALL_MLP, rows=8), share)


def batch(share: int) -> Iterator[Point]:
    """rows of each replica, MLP"""
    for rows in (8, 64) if share > 1 else (8, 32, 64, 128, 256, 512):
        yield rows, _steps(2, replace(MLP, rows=rows), share)


def pooling(share: int) -> Iterator[Point]:
    """rows of each replica, CNN with max pooling"""
    for rows in (8,) if share > 1 else (8, 32, 64):
        yield rows, _steps(2, replace(POOLED_CNN, rows=rows), share)


def workers(share: int) -> Iterator[Point]:
    """workers, a process each, MLP"""
    for count in (2,) if share > 1 else (1, 2, 4, 8):
        with (
            Workers(sys.executable, "ours", count) as ours,
            Workers(sys.executable, "by_hand", count) as theirs,
        ):
            found = compare(ours.block("MLP"), theirs.block("MLP"), pairs=24 // share)
        yield count, found.ratio


def empty(share: int) -> Iterator[Point]:
    """steps that do nothing"""
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    blocks = empty_steps(strategy, jax.devices()[:2])
    yield 1, compare(*blocks, pairs=160 // share, seconds=0.02).ratio


CURVES: tuple[Callable[[int], Iterator[Point]], ...] = (
    empty,
    variables,
    replicas,
    batch,
    pooling,
    workers,
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few points: under 3 minutes")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    [cpu] = rx.config.list_physical_devices("CPU")
    count = 8 if options.quick else DEVICES
    rx.config.set_logical_device_configuration(
        cpu, [rx.config.LogicalDeviceConfiguration()] * count
    )
    found: dict[str, dict[str, list[float]]] = {}
    for curve in CURVES:
        points = found.setdefault(curve.__name__, {})
        for x, ratio in curve(4 if options.quick else 1):
            points[str(x)] = [round(v, 3) for v in (ratio.median, ratio.low, ratio.high)]
            print(f"{x:6} {curve.__doc__:45} {ratio.median:.2f} of by hand", flush=True)
    if options.out:
        write(found, options.out)
    if options.against:
        raise SystemExit(far_above(found, json.loads(options.against.read_text())))


def _steps(count: int, model, share: int) -> Spread:
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    blocks = with_replicax(strategy, model), by_hand(jax.devices()[:count], model)
    return compare(*blocks, pairs=40 // share).ratio


def far_above(found: dict, before: dict) -> str | int:
    """The points that are beyond the margin, in words; 0 if there are none."""
    slow = [
        f"{name} at {x}: {points[x][0]:.2f} of by hand, {before[name][x][0]:.2f} before"
        for name, points in found.items()
        for x in points
        if x in before.get(name, {}) and points[x][0] > MARGIN * max(before[name][x][0], 0.5)
    ]
    return "Far slower than before:\n" + "\n".join(slow) if slow else 0


def write(found: dict, folder: Path) -> None:
    """The JSON, a table, and a plot for each curve that has several points."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curves.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = ["| curve | at | ours / by hand | quartiles |", "| --- | --- | --- | --- |"]
    titles = {curve.__name__: curve.__doc__ or "" for curve in CURVES}
    for name, points in found.items():
        for x, (median, low, high) in points.items():
            lines.append(f"| {titles[name]} | {x} | {median:.2f} | {low:.2f}..{high:.2f} |")
        if len(points) > 1:
            (folder / f"{name}.svg").write_text(plot(titles[name], points))
    (folder / "curves.md").write_text("\n".join(lines) + "\n")


def plot(title: str, points: dict[str, list[float]]) -> str:
    """A curve with its quartiles over a logarithmic axis, as SVG."""
    wide, high, edge = 480, 260, 44
    xs = [math.log(float(x)) for x in points]
    top = max(1.5, 1.1 * max(p[2] for p in points.values()))

    def place(x: float, y: float) -> str:
        along = edge + (x - xs[0]) / (xs[-1] - xs[0]) * (wide - 2 * edge)
        return f"{along:.1f},{high - edge - y / top * (high - 2 * edge):.1f}"

    def line(ys: list[float], style: str) -> str:
        path = " ".join(place(x, y) for x, y in zip(xs, ys, strict=True))
        return f'<polyline fill="none" {style} points="{path}"/>'

    def text(at: str, words: str, anchor: str = "middle") -> str:
        x, y = at.split(",")
        return f'<text x="{x}" y="{float(y):.1f}" text-anchor="{anchor}">{words}</text>'

    medians, lows, highs = ([p[i] for p in points.values()] for i in range(3))
    parts = [
        line([1.0] * len(xs), 'stroke="#999" stroke-dasharray="4"'),
        line(lows, 'stroke="#9bd"'),
        line(highs, 'stroke="#9bd"'),
        line(medians, 'stroke="#06c" stroke-width="2"'),
        *(text(place(x, -0.09 * top), label) for x, label in zip(xs, points, strict=True)),
        *(text(place(xs[0], y), f"{y:g} ", "end") for y in (0, 1)),
        text(f"{wide / 2},{high - 6}", title),
        text(f"{wide / 2},20", "a step, ours / by hand: median and quartiles"),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-size="11"'
    return "\n".join([f'{head} font-family="sans-serif">', *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
