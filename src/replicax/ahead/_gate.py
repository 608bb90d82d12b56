"""Gate: a report and what it may not exceed -> what is too much, by how much, and where."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from replicax._show import show_bytes
from replicax.ahead._compiler import OptionError
from replicax.ahead._report import PreflightReport

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AMOUNT = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(i?B)?|(?P<percent>\d+(\.\d+)?)%")
_TOLERANCE = 0.01  # of memory and time that may be there by chance


@dataclass(frozen=True)
class Excess:
    """Something that is larger than it may be.

    Attributes:
        topology: On which devices.
        figure: What it is.
        before: What it may be, or was.
        now: What it is now.
        shown: Both, for people.
        where: What has become larger, with its line.
    """

    topology: str
    figure: str
    before: float
    now: float
    shown: str
    where: tuple[str, ...] = ()


def limit_of(text: str, hbm: int) -> float:
    """How many bytes a text such as ``12GiB`` or ``80%`` means.

    Raises:
        OptionError: It means none.

    Example:
        >>> from replicax.ahead._gate import limit_of
        >>> limit_of("12GiB", 0) == 12 * 2**30, limit_of("80%", 1000)
        (True, 800.0)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is no amount of memory; write such as 12GiB, 900MiB or 80%.")
    if match["percent"]:
        return float(match["percent"]) / 100 * hbm
    return float(match["number"]) * _UNITS[match["unit"]]


def above(reports: Sequence[PreflightReport], limit: str) -> Iterator[Excess]:
    """Reports that take more memory than ``limit``."""
    for report in reports:
        most, total = limit_of(limit, report.hbm), report.memory.total
        if total > most:
            shown = f"{show_bytes(total)} of a device, {show_bytes(most)} allowed"
            where = tuple(_told(b.bytes, b.what, b.source) for b in report.largest[:3])
            yield Excess(report.topology, "memory", most, total, shown, where)


def grown(before: Sequence[PreflightReport], now: Sequence[PreflightReport]) -> Iterator[Excess]:
    """What is larger in ``now`` than it was for the same devices."""
    known = {report.topology: report for report in before}
    for report in now:
        old = known.get(report.topology)
        if old is not None:
            yield from _between(old, report)


def _between(old: PreflightReport, new: PreflightReport) -> Iterator[Excess]:
    if old.compiles and not new.compiles:
        yield Excess(new.topology, "errors", 0, 1, f"does not compile: {new.error[:200]}")
        return
    for figure, (of, show) in _FIGURES.items():
        a, b = of(old), of(new)
        if b > a * (1 + _TOLERANCE) and b - a > 1e-9:
            change = f"{show(a)} -> {show(b)} ({_percent(a, b)})"
            where = tuple(_larger(old, new, figure))
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


def _larger(old: PreflightReport, new: PreflightReport, figure: str) -> Iterator[str]:
    """Values or collectives that are new, or larger than before."""
    if figure == "memory":
        had = {(b.what, b.source): b.bytes for b in old.largest}
        for b in new.largest:
            if b.bytes > had.get((b.what, b.source), 0):
                yield _told(b.bytes, b.what, b.source)
    elif figure == "sent bytes":
        sent = {(c.kind, c.group, c.source): c.bytes for c in old.by_line}
        for c in new.by_line:
            if c.bytes > sent.get((c.kind, c.group, c.source), 0):
                yield _told(c.bytes, f"{c.kind} over {c.group:,} devices", c.source)


def _told(size: float, what: str, source: str) -> str:
    return f"{show_bytes(size)} {what}" + (f" ({source})" if source else "")
