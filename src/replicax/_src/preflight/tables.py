"""Tables of preflight reports, and comparisons with limits and baselines.

The comparisons yield an `Excess` for each figure that is too large, with its source lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from replicax._src.base.rendering import show_bytes
from replicax._src.preflight.compiler import OptionError
from replicax._src.preflight.costs import Collective
from replicax._src.preflight.memory import Buffer
from replicax._src.preflight.report import FORMULA, PreflightReport, Sweep


def report_table(report: PreflightReport) -> Table:
    """Return a table of one report, with a row per fact."""
    table = Table(title=f"{report.step} on {report.topology}", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def sweep_table(sweep: Sweep) -> Table:
    """Return a table of several reports, with a row per slice."""
    name = sweep.reports[0].step if sweep.reports else "nothing"
    table = Table(title=f"{name} on several slices")
    for column in ("slice", "devices", "replicas", "memory", "fits", "sent", "step, roofline"):
        table.add_column(column, justify="left" if column == "slice" else "right")
    for r in sweep.reports:
        table.add_row(
            r.topology,
            f"{r.num_devices:,}",
            f"{r.num_replicas:,}",
            show_bytes(r.memory.total) if r.memory.total else "-",
            "yes" if r.fits and r.compiles else "no" if r.memory.total else "-",
            show_bytes(r.communication_bytes) if r.compiles else "-",
            f"{1e3 * r.step_seconds:.3g} ms" if r.compiles else "-",
        )
    return table


def _rows(r: PreflightReport) -> list[tuple[str, Any]]:
    cores = r.num_devices // (r.num_replicas or r.num_devices)
    each = f" of {cores} logical devices" if cores > 1 else ""
    s = "s" if r.num_replicas > 1 else ""
    replicas = f"{r.num_replicas:,} replica{s}{each}" if r.num_replicas else "no strategy"
    rows: list[tuple[str, Any]] = [
        ("devices", f"{r.num_devices:,}: {replicas}"),
        ("verdict", _verdict(r)),
    ]
    if r.advice:
        rows.append(("would need less", "\n".join(r.advice)))
    if not r.compiles:
        return [*rows, ("compiler", r.error)]
    m, lines = r.memory, [c for c in r.by_line if c.source][:5]
    parts = (
        f"{show_bytes(m.arguments)} arguments, {show_bytes(m.outputs)} other outputs,"
        f" {show_bytes(m.temporaries)} temporaries, {show_bytes(m.code)} code"
    )
    if m.host:
        parts += f"; {show_bytes(m.host)} in the memory of the host"
    return [
        *rows,
        ("memory of a device", f"{show_bytes(m.total)} of {show_bytes(r.hbm)}"),
        ("", parts),
        *(
            [("of which the largest", "\n".join(map(_format_buffer, r.largest[:5])))]
            if r.largest
            else []
        ),
        ("collectives of a step", "\n".join(map(_format_collective, r.collectives)) or "none"),
        *([("from the lines", "\n".join(map(_format_line, lines)))] if lines else []),
        ("flops of a device", f"{r.flops:.3g}"),
        *([("counted with care", "\n".join(r.notes))] if r.notes else []),
        ("step time, roofline", _estimate(r)),
        ("", FORMULA),
        ("compiled in", f"{r.compile_seconds:.1f} s"),
    ]


def _verdict(r: PreflightReport) -> Text:
    if not r.fits:
        return Text(f"does NOT fit: {show_bytes(-r.headroom)} too much", "red")
    if not r.compiles:
        return Text("does not compile", "red")
    return Text(f"fits, with {show_bytes(r.headroom)} to spare", "green")


def _estimate(r: PreflightReport) -> str:
    links = r.communication_seconds
    parts = (r.step_seconds, r.step_seconds - links, links, r.compute_seconds, r.memory_seconds)
    total, work, links_, compute, memory = (f"{1e3 * s:.3g} ms" for s in parts)
    lines = [f"{total} = {work} operations + {links_} links"]
    if any(c.asynchronous for c in r.collectives):
        overlapped = f"{1e3 * (r.step_seconds - links + r.waiting_seconds):.3g} ms"
        lines.append(f"{overlapped} if asynchronous collectives run concurrently with operations")
    lines.append(
        f"all arithmetic by itself {compute}, all memory traffic, on the chip too, {memory}"
    )
    return "\n".join(lines)


def _format_buffer(b: Buffer) -> str:
    return f"{show_bytes(b.bytes)} {b.what}" + (f", {_short(b.source)}" if b.source else "")


def _format_line(c: Collective) -> str:
    return f"{c.count} x {c.kind}, {show_bytes(c.bytes)}: {_short(c.source)}"


def _short(source: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(source.rsplit("/", 2)[-2:])


def _format_collective(c: Collective) -> str:
    hosts = f" of {c.hosts:,} machines" if c.hosts > 1 else ""
    text = f"{c.count} x {c.kind} over {c.group:,} devices{hosts}, {show_bytes(c.bytes)} together"
    if not c.asynchronous:
        return text
    apart = f"{1e3 * c.apart_seconds / c.asynchronous:.3g} ms"
    return f"{text}, {c.asynchronous} asynchronous with {apart} of operations in between"


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?|(?P<percent>\d+(\.\d+)?)%")
_TOLERANCE = 0.01  # relative noise of memory and time


@dataclass(frozen=True)
class Excess:
    """A figure that is larger than its limit.

    Attributes:
        topology: The devices.
        figure: The name of the figure.
        before: The limit, or the value in the baseline.
        now: The current value.
        shown: Both values, for display.
        where: The values or collectives that contribute most or have grown, with source lines.
    """

    topology: str
    figure: str
    before: float
    now: float
    shown: str
    where: tuple[str, ...] = ()


def limit_of(text: str, hbm: int) -> float:
    """Parse an amount of memory such as ``12GiB`` or ``80%``, relative to ``hbm``, into bytes.

    Raises:
        OptionError: If the text is not an amount.

    Example:
        >>> from replicax._src.preflight.tables import limit_of
        >>> limit_of("12GiB", 0) == 12 * 2**30, limit_of("80%", 1000)
        (True, 800.0)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not an amount of memory, such as 12GiB, 900MiB or 80%.")
    if match["percent"]:
        return float(match["percent"]) / 100 * hbm
    return float(match["number"]) * _UNITS[match["unit"]]


def above(reports: Sequence[PreflightReport], limit: str) -> Iterator[Excess]:
    """Yield an excess for each report that takes more memory than ``limit``."""
    for report in reports:
        most, total = limit_of(limit, report.hbm), report.memory.total
        if total > most:
            shown = f"{show_bytes(total)} of a device, {show_bytes(most)} allowed"
            where = tuple(_format_item(b.bytes, b.what, b.source) for b in report.largest[:3])
            yield Excess(report.topology, "memory", most, total, shown, where)


def grown(before: Sequence[PreflightReport], now: Sequence[PreflightReport]) -> Iterator[Excess]:
    """Yield an excess for each figure that is larger than in the baseline for the same devices."""
    known = {report.topology: report for report in before}
    for report in now:
        old = known.get(report.topology)
        if old is not None:
            yield from _compare(old, report)


def _compare(old: PreflightReport, new: PreflightReport) -> Iterator[Excess]:
    if old.compiles and not new.compiles:
        yield Excess(new.topology, "errors", 0, 1, f"does not compile: {new.error[:200]}")
        return
    for figure, (of, show) in _FIGURES.items():
        a, b = of(old), of(new)
        if b > a * (1 + _TOLERANCE) and b - a > 1e-9:
            change = f"{show(a)} -> {show(b)} ({_percent(a, b)})"
            where = tuple(_growth(old, new, figure))
            yield Excess(new.topology, figure, a, b, change, where)


_FIGURES: dict[str, tuple[Callable[[PreflightReport], float], Callable[[float], str]]] = {
    "memory": (lambda r: r.memory.total, show_bytes),
    "flops": (lambda r: r.flops, lambda x: f"{x:.3g}"),
    "memory traffic": (lambda r: r.bytes_accessed, show_bytes),
    "sent bytes": (lambda r: r.communication_bytes, show_bytes),
    "step time": (lambda r: r.step_seconds, lambda s: f"{1e3 * s:.3g} ms"),
}


def _percent(a: float, b: float) -> str:
    return f"{100 * (b - a) / a:+.1f} %" if a else "new"


def _growth(old: PreflightReport, new: PreflightReport, figure: str) -> Iterator[str]:
    """Yield descriptions of the values or collectives that are new, or larger than before."""
    if figure == "memory":
        had = {(b.what, b.source): b.bytes for b in old.largest}
        for b in new.largest:
            if b.bytes > had.get((b.what, b.source), 0):
                yield _format_item(b.bytes, b.what, b.source)
    elif figure == "sent bytes":
        sent = {(c.kind, c.group, c.source): c.bytes for c in old.by_line}
        for c in new.by_line:
            if c.bytes > sent.get((c.kind, c.group, c.source), 0):
                yield _format_item(c.bytes, f"{c.kind} over {c.group:,} devices", c.source)


def _format_item(size: float, what: str, source: str) -> str:
    return f"{show_bytes(size)} {what}" + (f" ({source})" if source else "")
