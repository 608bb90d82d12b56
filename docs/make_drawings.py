"""Makes the drawings of the start page and of the concepts: ``python docs/make_drawings.py``."""

from collections.abc import Iterator
from pathlib import Path

STYLE = """\
<style>
.b { fill: #eef3fb; stroke: #3b6fb6; } .g { fill: #eaf6ec; stroke: #3f8f4f; }
.o { fill: #fdf3e3; stroke: #b87a1e; } .e { fill: none; stroke: #999; stroke-dasharray: 4 3; }
.a { stroke: #555; stroke-width: 1.5; } .bg { fill: #fff; }
text { fill: #222; } .s { font-size: 12px; fill: #555; } .h { font-weight: 600; }
</style>
<defs><marker id="m" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="#555"/></marker></defs>"""
WIDTH = 760


def drawing(label: str, height: int, *parts: str) -> str:
    """A whole picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="{label}" font-family="system-ui, sans-serif" font-size="15">\n{STYLE}\n'
        f'<rect class="bg" width="{WIDTH}" height="{height}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def text(x: float, y: float, said: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of words."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{said}</text>'


def box(kind: str, place: tuple[float, float, float, float], *lines: str) -> str:
    """A rectangle with a name, and smaller lines below it."""
    x, y, width, height = place
    top = y + height / 2 - 8.5 * (len(lines) - 1) + 5
    said = [
        text(x + width / 2, top + 17 * i, line, "s" if i else "") for i, line in enumerate(lines)
    ]
    frame = (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>'
    )
    return "".join([frame, *said])


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    """From one place to another."""
    start = ' marker-start="url(#m)"' if both else ""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line class="a" {ends}{start} marker-end="url(#m)"/>'


def batch() -> str:
    """One batch through four replicas."""
    parts = [box("o", (15, 130, 110, 80), "one batch", "8 rows"), text(165, 62, "split", "s")]
    for i in range(4):
        y = 15 + 82 * i
        rows = f"rows {2 * i} and {2 * i + 1}, its copy of w"
        parts += [
            arrow(127, 170, 211, y + 31),
            box("b", (215, y, 190, 62), f"replica {i}", rows),
            arrow(407, y + 31, 481, 170),
        ]
    parts += [
        box("g", (485, 130, 125, 80), "all-reduce", "gradients add up"),
        arrow(612, 170, 631, 170),
        box("b", (635, 130, 110, 80), "w - lr * g", "on every copy"),
    ]
    return drawing("One batch through four replicas", 340, *parts)


def contexts() -> str:
    """How a program goes from one context to the other."""
    parts = [
        box("o", (15, 15, 730, 80), "cross-replica context", "one program; values of all replicas"),
        box("b", (15, 205, 730, 110)),
        text(30, 300, "replica context: one replica with its own rows", anchor="start"),
    ]
    for x, said, ends in (
        (70, "strategy.run(fn, args)", (97, 201)),
        (290, "strategy.reduce, gather", (201, 99)),
    ):
        parts += [arrow(x, ends[0], x, ends[1]), text(x + 10, 154, said, "s", "start")]
    parts += [arrow(530, 201, 530, 99, both=True), text(540, 154, "merge_call(fn)", "s", "start")]
    for i in range(3):
        parts.append(box("g", (150 + 190 * i, 220, 120, 46), f"replica {i}"))
    for i in range(2):
        parts.append(arrow(274 + 190 * i, 243, 336 + 190 * i, 243, both=True))
    parts.append(text(730, 300, "all_reduce, all_gather: between replicas", "s", "end"))
    return drawing("Replica and cross-replica context", 330, *parts)


def devices(top: float, height: float) -> Iterator[str]:
    """The frames of three devices."""
    for i in range(3):
        yield box("e", (230 + 178 * i, top, 160, height))
        yield text(310 + 178 * i, top - 6, f"device {i}", "s")


def values() -> str:
    """PerReplica and Mirrored values."""
    parts = [*devices(25, 165)]
    parts += [
        text(15, 66, "PerReplica", "h", "start"),
        text(15, 84, "reduce or gather it", "s", "start"),
    ]
    parts += [
        text(15, 149, "Mirrored", "h", "start"),
        text(15, 167, "use it as one array", "s", "start"),
    ]
    for i, own in enumerate(("[1, 4]", "[7, 2]", "[5, 3]")):
        parts.append(box("b", (245 + 178 * i, 50, 130, 46), own))
        parts.append(box("g", (245 + 178 * i, 125, 130, 46), "[13, 9]"))
    parts += [arrow(310, 98, 310, 123), arrow(488, 98, 488, 123), arrow(666, 98, 666, 123)]
    parts.append(text(15, 115, 'all_reduce("SUM") between them', "s", "start"))
    return drawing("Per-replica and mirrored values on three devices", 205, *parts)


def variables() -> str:
    """What each device holds of a variable, by its kind."""
    rows = (
        (
            "mirrored",
            "equal copies",
            ("w", "w", "w"),
            (
                "b",
                "whole",
            ),
        ),
        ("on-read", "separate, combined when read", ("2", "5", "1"), ("o", "its count")),
        (
            "sharded",
            "a shard on each device",
            ("w[0:2]", "w[2:4]", "w[4:6]"),
            ("g", "a third"),
        ),
    )
    parts = [*devices(25, 235)]
    for r, (name, meaning, held, (kind, note)) in enumerate(rows):
        y = 40 + 74 * r
        parts += [text(15, y + 26, name, "h", "start"), text(15, y + 44, meaning, "s", "start")]
        parts += [box(kind, (245 + 178 * i, y, 130, 58), one, note) for i, one in enumerate(held)]
    return drawing("What devices hold of mirrored, on-read and sharded variables", 275, *parts)


def batch_life() -> str:
    """From a dataset to the replica function."""
    steps = (
        ("o", "dataset", "in host memory,", "read ahead"),
        ("o", "split", "rows for each", "replica: 3, 3, 2"),
        ("b", "put", "each part goes", "to its device"),
        ("b", "PerReplica", "the batch in", "the loop"),
        ("g", "strategy.run", "fn(part) on", "every replica"),
    )
    return drawing("The life of a batch", 120, *in_a_row(steps, 15))


def step_life() -> str:
    """The steps of a call of a compiled function."""
    again = (
        ("o", "look up", "shapes, dtypes,", "Python values"),
        ("g", "run", "one call for", "all devices"),
        ("b", "commit", "variables get", "their new values"),
    )
    first = (
        ("o", "trace", "find the variables", "read and written"),
        ("o", "pack", "small all-reduces", "become one"),
        ("o", "compile", "XLA, for the", "devices' mesh"),
    )
    parts = [
        text(15, 24, "every call", "h", "start"),
        *in_a_row(again, 38, gap=170),
        text(15, 294, "the first call of its kind, in between", "h", "start"),
        *in_a_row(first, 180, gap=40, left=145),
        arrow(80, 130, 143, 222),
        arrow(552, 178, 446, 131),
    ]
    return drawing("The life of a step", 308, *parts)


def in_a_row(
    steps: tuple[tuple[str, ...], ...], top: float, gap: float = 19, left: float = 15
) -> Iterator[str]:
    """Boxes from left to right, with arrows between."""
    width = 130
    for i, (kind, *lines) in enumerate(steps):
        x = left + (width + gap) * i
        yield box(kind, (x, top, width, 90), *lines)
        if i:
            yield arrow(x - gap + 2, top + 45, x - 3, top + 45)


LAYERS = (
    ("o", (("rx.distribute, rx.data, rx.train, ...", "public names, no code"),)),
    (
        "b",
        (("cli, port, debug", "tools"), ("integrations", "Keras, Flax NNX, Ray"), ("preflight",)),
    ),
    ("b", (("train", "checkpoints, resumption, preemption"),)),
    ("g", (("strategy", "scope, run, reduce; eager and compiled runs"),)),
    ("g", (("input", "batches to replicas"), ("functions", "tracing, programs, gradients"))),
    ("g", (("state", "variables"), ("context", "current strategy and replica"))),
    ("g", (("collectives", "all-reduce"), ("values", "PerReplica, Mirrored"))),
    ("b", (("topology", "devices"), ("data", "dataset engine"))),
    (
        "b",
        (("workers", "start, monitor"), ("cluster", "find workers"), ("files", "local, S3, GCS")),
    ),
    ("e", (("base", "errors, types, threads"), ("compat", "private parts of JAX"))),
)


def layers() -> str:
    """The packages, above or to the left of those that they may import."""
    parts, width, height = [], WIDTH - 130, 52
    for r, (kind, names) in enumerate(LAYERS):
        each = (width - 10 * (len(names) - 1)) / len(names)
        for i, lines in enumerate(names):
            place = (15 + (each + 10) * i, 15 + (height + 8) * r, each, height)
            parts.append(box(kind, place, *lines))
    bottom = 15 + (height + 8) * len(LAYERS) - 8
    parts.append(arrow(WIDTH - 96, 20, WIDTH - 96, bottom - 5))
    for i, line in enumerate(("imports go", "down, or in", "a row to", "the right")):
        parts.append(text(WIDTH - 86, bottom / 2 - 20 + 17 * i, line, "s", "start"))
    return drawing(
        "The packages in layers; each imports those below it, or to its right", bottom + 15, *parts
    )


DRAWINGS = {
    "layers": layers,
    "batch": batch,
    "contexts": contexts,
    "values": values,
    "variables": variables,
    "batch_life": batch_life,
    "step_life": step_life,
}


def main() -> None:
    """Write them all."""
    for name, draw in DRAWINGS.items():
        (Path(__file__).parent / "_static" / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
