"""What a step costs over the hand-written one, as programs grow: tables, JSON and plots.

    python -m benchmarks.curves [--quick] [--pairs N] [--out FOLDER] [--against FILE]

Over the number of variables, of replicas, of rows in a batch and of workers. ``--out`` gets a table
in Markdown, ``curves.json`` and a plot for each curve; ``--against`` compares with such a JSON, and
fails where a ratio of processor times, which depends little on what else runs, is far above it.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import jax

import replicax as rx
from benchmarks._models import MLP, POOLED_CNN, SMALL_MLP, Model, of_variables
from benchmarks._steps import by_hand, with_replicax
from benchmarks._timing import Comparison, Metered, compare_both, metered
from benchmarks.core import empty_steps
from benchmarks.workers import Workers

MARGIN = 1.8  # times the ratio that was measured before: other machines, and other programs on them
DEVICES = 64

Points = dict[str, dict[str, list[float]]]  # at each point, by clock and processors
Found = dict[str, Points]
Sides = AbstractContextManager[tuple[Metered, Metered]]


@dataclass(frozen=True)
class Curve:
    """One of the curves.

    Attributes:
        title: What stands along its axis.
        at: Its points.
        quickly: The points that ``--quick`` takes.
        sides: Ours and the hand-written one at a point.
    """

    title: str
    at: tuple[int, ...]
    quickly: tuple[int, ...]
    sides: Callable[[int], Sides]


def _steps(count: int, model: Model) -> Sides:
    strategy = rx.distribute.MirroredStrategy([f"CPU:{i}" for i in range(count)])
    ours, theirs = with_replicax(strategy, model), by_hand(jax.devices()[:count], model)
    return nullcontext((metered(ours), metered(theirs)))


def _empty(_: int) -> Sides:
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    ours, theirs = empty_steps(strategy, jax.devices()[:2])
    return nullcontext((metered(ours), metered(theirs)))


@contextmanager
def _workers(count: int) -> Iterator[tuple[Metered, Metered]]:
    with (
        Workers(sys.executable, "ours", count) as ours,
        Workers(sys.executable, "by_hand", count) as theirs,
    ):
        yield ours.block("MLP"), theirs.block("MLP")


CURVES = {
    "empty": Curve("a step that does nothing", (1,), (1,), _empty),
    "variables": Curve(
        "variables", (10, 100, 1000, 5000), (10, 100), lambda n: _steps(2, of_variables(n))
    ),
    "replicas": Curve(
        "replicas of a small MLP",
        (2, 4, 8, 16, 32, 64),
        (2, 8),
        lambda n: _steps(n, replace(SMALL_MLP, rows=8)),
    ),
    "batch": Curve(
        "rows of each replica, MLP",
        (8, 32, 64, 128, 256, 512),
        (8, 64),
        lambda n: _steps(2, replace(MLP, rows=n)),
    ),
    "pooling": Curve(
        "rows of each replica, CNN with max pooling",
        (8, 32, 64),
        (8,),
        lambda n: _steps(2, replace(POOLED_CNN, rows=n)),
    ),
    "workers": Curve("workers, a process each, MLP", (1, 2, 4, 8), (2,), _workers),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="few points: under 3 minutes")
    parser.add_argument("--pairs", type=int, metavar="N", help="how often both sides alternate")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--against", type=Path, metavar="FILE")
    options = parser.parse_args()
    pairs = options.pairs or (10 if options.quick else 40)
    [cpu] = rx.config.list_physical_devices("CPU")
    count = 8 if options.quick else DEVICES
    rx.config.set_logical_device_configuration(
        cpu, [rx.config.LogicalDeviceConfiguration()] * count
    )
    found: Found = {}
    for name, curve in CURVES.items():
        points = found.setdefault(name, {})
        for x in curve.quickly if options.quick else curve.at:
            with curve.sides(x) as sides:
                clock, processors = compare_both(*sides, pairs=pairs)
            points[str(x)] = {"clock": _rounded(clock), "processors": _rounded(processors)}
            print(f"{x:6} {curve.title:45} {clock.ratio} {processors.ratio}", flush=True)
    if options.out:
        write(found, options.out)
    if options.against:
        raise SystemExit(far_above(found, json.loads(options.against.read_text())))


def _rounded(comparison: Comparison) -> list[float]:
    ratio = comparison.ratio
    return [round(v, 3) for v in (ratio.median, ratio.low, ratio.high)]


def far_above(found: Found, before: Found) -> str | int:
    """The points whose processor time is beyond the margin, in words; 0 if there are none."""
    slow = [
        f"{name} at {x}: {now:.2f} of by hand, {then:.2f} before"
        for name, points in found.items()
        for x, ((now, *_), (then, *_)) in _in_both(points, before.get(name, {}))
        if now > MARGIN * max(then, 0.5)
    ]
    return "Far slower than before:\n" + "\n".join(slow) if slow else 0


def _in_both(now: Points, before: Points) -> Iterator[tuple[str, tuple[list[float], list[float]]]]:
    for x in now:
        if x in before:
            yield x, (now[x]["processors"], before[x]["processors"])


def write(found: Found, folder: Path) -> None:
    """The JSON, a table, and a plot for each curve that has several points."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "curves.json").write_text(_json(found))
    lines = [
        "| curve | at | ours / by hand, by the clock | quartiles | of the processors |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, points in found.items():
        title = CURVES[name].title
        for x, point in points.items():
            (median, low, high), (used, *_) = point["clock"], point["processors"]
            lines.append(f"| {title} | {x} | {median:.2f} | {low:.2f}..{high:.2f} | {used:.2f} |")
        if len(points) > 1:
            (folder / f"{name}.svg").write_text(plot(title, points))
    (folder / "curves.md").write_text("\n".join(lines) + "\n")


def _json(found: Found) -> str:
    """A line for each point."""
    curves = []
    for name, points in found.items():
        rows = ",\n".join(f'  "{x}": {json.dumps(point)}' for x, point in points.items())
        curves.append(f' "{name}": {{\n{rows}\n }}')
    return "{\n" + ",\n".join(curves) + "\n}\n"


def plot(title: str, points: Points) -> str:
    """A curve with its quartiles over a logarithmic axis, as SVG."""
    wide, high, left, right, top, bottom = 520, 300, 48, 130, 40, 56
    xs = [math.log(float(x)) for x in points]
    most = max(1.2, 1.1 * max(p["clock"][2] for p in points.values()))

    def across(x: float) -> float:
        return left + (x - xs[0]) / (xs[-1] - xs[0]) * (wide - left - right)

    def up(y: float) -> float:
        return high - bottom - min(y, most) / most * (high - top - bottom)

    def path(ys: Iterable[float]) -> str:
        return " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in zip(xs, ys, strict=True))

    def text(x: float, y: float, words: str, style: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{words}</text>'

    def curve(which: str, colour: str) -> list[str]:
        rows = [p[which] for p in points.values()]
        median, low, highs = ([r[i] for r in rows] for i in range(3))
        around = path(low) + " " + " ".join(reversed(path(highs).split()))
        dots = (
            f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{colour}"/>'
            for p in path(median).split()
        )
        return [
            f'<polygon fill="{colour}" fill-opacity="0.15" points="{around}"/>',
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path(median)}"/>',
            *dots,
        ]

    step = 0.5 if most < 4 else 1.0
    parts: list[str] = []
    for i in range(int(most / step) + 1):
        dash = 'stroke="#444" stroke-dasharray="5 3"' if i * step == 1 else 'stroke="#ddd"'
        y = up(i * step)
        parts.append(f'<path d="M{left} {y:.1f}H{wide - right}" {dash}/>')
        parts.append(text(left - 6, y + 4, f"{i * step:g}", 'text-anchor="end"'))
    for which, colour, words in (
        ("processors", "#c60", "of the processors"),
        ("clock", "#06c", "by the clock"),
    ):
        parts += curve(which, colour)
        at = top + (14 if which == "clock" else 32)
        parts.append(text(wide - right + 14, at, words, f'fill="{colour}"'))
    parts += [
        text(across(x), high - bottom + 18, label) for x, label in zip(xs, points, strict=True)
    ]
    parts.append(text((left + wide - right) / 2, high - 14, title))
    parts.append(
        text(left, 20, "a step: ours / by hand, median and quartiles", 'font-weight="bold"')
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-size="12"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f'{head} font-family="sans-serif">', ground, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
