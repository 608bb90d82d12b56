"""Reports and sweeps as tables for people."""

from typing import Any

from rich.table import Table
from rich.text import Text

from replicax._show import show_bytes
from replicax.ahead._costs import Collective
from replicax.ahead._fills import Buffer
from replicax.ahead._report import FORMULA, PreflightReport
from replicax.ahead._sweep import Sweep


def report_table(report: PreflightReport) -> Table:
    """One report, a fact in each row."""
    table = Table(title=f"{report.step} on {report.topology}", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in _rows(report):
        table.add_row(name, value)
    return table


def sweep_table(sweep: Sweep) -> Table:
    """Several reports, a slice in each row."""
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
    if not r.compiles:
        return [*rows, ("compiler", r.error)]
    m, lines = r.memory, [c for c in r.by_line if c.source][:5]
    parts = (
        f"{show_bytes(m.arguments)} arguments, {show_bytes(m.outputs)} other outputs,"
        f" {show_bytes(m.temporaries)} temporaries, {show_bytes(m.code)} code"
    )
    return [
        *rows,
        ("memory of a device", f"{show_bytes(m.total)} of {show_bytes(r.hbm)}"),
        ("", parts),
        *([("of which the largest", "\n".join(map(_filled, r.largest[:5])))] if r.largest else []),
        ("collectives of a step", "\n".join(map(_described, r.collectives)) or "none"),
        *([("from the lines", "\n".join(map(_sent, lines)))] if lines else []),
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
    parts = (r.compute_seconds, r.memory_seconds, r.communication_seconds)
    compute, memory, links = (f"{1e3 * s:.3g} ms" for s in parts)
    total = f"{1e3 * r.step_seconds:.3g} ms"
    return f"{total} = max({compute} compute, {memory} memory) + {links} links"


def _filled(b: Buffer) -> str:
    return f"{show_bytes(b.bytes)} {b.what}" + (f", {_short(b.source)}" if b.source else "")


def _sent(c: Collective) -> str:
    return f"{c.count} x {c.kind}, {show_bytes(c.bytes)}: {_short(c.source)}"


def _short(source: str) -> str:
    """The last two parts of a path."""
    return "/".join(source.rsplit("/", 2)[-2:])


def _described(c: Collective) -> str:
    hosts = f" of {c.hosts:,} machines" if c.hosts > 1 else ""
    return f"{c.count} x {c.kind} over {c.group:,} devices{hosts}, {show_bytes(c.bytes)} together"
