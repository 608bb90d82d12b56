"""Write the figures of ``preflight.md``, ``tpu.md`` and ``scaling.md`` from compiler reports.

    python docs/make_preflight_pages.py FOLDER [--compile]

reads the reports that ``replicax preflight --json`` and ``docs/published_steps.py`` left in FOLDER,
and the table that ``replicax plan`` printed, ``plan.txt``, and puts tables and plots between the
marks of the pages; devices without a report are left out.
``--compile`` makes the former that are missing first, which takes an hour on two cores.
"""

import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from replicax._src.base.rendering import as_text, show_bytes
from replicax._src.preflight.report import PreflightReport, Sweep

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
SIZE = {
    "digits": ("digits", []),
    "110m": ("transformer_tpu", ["--size", "110m", "--cores", "1"]),
    "1b_cores1": ("transformer_tpu", ["--size", "1b", "--cores", "1"]),
    "1b_cores8": ("transformer_tpu", ["--size", "1b", "--cores", "8"]),
}
TPUS = {
    "digits": ("v5e:2x4", "v5e:8x8", "v5e:16x16", "v4:8x8x8", "v5p:8x8x16"),
    "110m": ("v5e:2x4", "v5e:8x8", "v5e:16x16", "v5p:8x8x16"),
    "1b_cores1": ("v5p:2x2x2", "v5p:4x4x4", "v5p:4x8x8", "v5p:8x8x16"),
    "1b_cores8": ("v4:2x2x2", "v4:4x4x4", "v4:4x8x8", "v4:8x8x16"),
}
GPUS = ("h100:1x8", "h100:8x8", "h100:32x8", "h100:128x8")


def main(folder: Path, *, compiles: bool) -> None:
    """Fill the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = {
        label: [
            r for name in (*TPUS[label], *GPUS) if (r := _report(folder, label, name, compiles))
        ]
        for label in SIZE
    }
    page = DOCS / "preflight.md"
    for label, found in reports.items():
        _fill(page, label, _table(found))
        _plot(found, DOCS / f"preflight_{label}.svg")
    _fill(page, "gpu", _full(reports["digits"], "h100:1x8"))
    _fill(page, "published", _published(folder))
    plan = folder / "plan.txt"
    if plan.exists():
        _fill(page, "plan", f"```text\n{plan.read_text().rstrip()}\n```")
    _fill(DOCS / "tpu.md", "demo", _full(reports["digits"], "v5e:16x16"))
    page = DOCS / "scaling.md"
    _fill(page, "whole", _table(reports["1b_cores1"]))
    _fill(page, "split", _table(reports["1b_cores8"]))
    slices = [r for r in reports["1b_cores8"] if r.topology in TPUS["1b_cores8"]]
    # Reports of earlier versions have not all that is shown.
    for r in [r for r in slices if r.operation_seconds][-1:]:
        _fill(page, "largest", _full(slices, r.topology))


def _report(folder: Path, label: str, name: str, compiles: bool) -> PreflightReport | None:  # noqa: FBT001
    path = folder / f"{label}_{name.replace(':', '_')}.json"
    if compiles and not path.exists():
        script, options = SIZE[label]
        plan = [] if label == "digits" else ["--plan"]
        command = ["preflight", "--topology", name, "--json", str(path), *plan]
        Console().print(f"compiling {label} for {name}")
        words = [*command, str(EXAMPLES / f"{script}.py"), "--", *options]
        subprocess.run([sys.executable, "-m", "replicax", *words], check=False)
    return PreflightReport.from_json(path.read_text()) if path.exists() else None


def _plot(reports: Sequence[PreflightReport], path: Path) -> None:
    if reports:
        Sweep(tuple(reports)).plot(path)


def _full(reports: Sequence[PreflightReport], name: str) -> str:
    text = "\n".join(as_text(r) for r in reports if r.topology == name)
    short = re.sub(r"[^\s]*/examples/", "examples/", text)
    return f"```text\n{short}```"


def _table(reports: Sequence[PreflightReport]) -> str:
    rows = [
        "| devices | number | replicas | memory of a device | fits | flops | sent in a step |"
        " arithmetic, memory, links, each alone |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for r in reports:
        spare = show_bytes(abs(r.headroom))
        fits = f"yes, {spare} to spare" if r.fits else f"**no**, {spare} too much"
        parts = (r.compute_seconds, r.memory_seconds, r.communication_seconds)
        rows.append(
            f"| {r.topology} | {r.num_devices:,} | {r.num_replicas:,} |"
            f" {show_bytes(r.memory.total)} | {fits} | {r.flops:.3g} |"
            f" {show_bytes(r.communication_bytes)} |"
            f" {', '.join(f'{1e3 * part:.3g}' for part in parts)} ms |"
        )
    return "\n".join(rows)


def _published(folder: Path) -> str:
    """Estimates against published step times; runs without a report are left out."""
    rows = [
        "| model | devices | published step | estimate | error | operations, links | arithmetic,"
        " memory, each alone |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in runpy.run_path(str(DOCS / "published_steps.py"))["RUNS"].items():
        path = folder / f"published_{name}.json"
        if path.exists():
            r = PreflightReport.from_json(path.read_text())
            links = r.communication_seconds
            rows.append(
                f"| {run.model} | {run.topology} | {run.seconds:.2f} s | {r.step_seconds:.2f} s |"
                f" {100 * (r.step_seconds / run.seconds - 1):+.0f} % |"
                f" {r.step_seconds - links:.2f}, {links:.2f} s |"
                f" {r.compute_seconds:.2f}, {r.memory_seconds:.2f} s |"
            )
    return "\n".join(rows)


def _fill(page: Path, mark: str, content: str) -> None:
    start, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    pattern = re.compile(f"{start}.*?{end}", re.DOTALL)
    text = page.read_text()
    if not pattern.search(text):
        raise SystemExit(f"{page} has no marks {start} ... {end}.")
    filled = f"{start}\n{content}\n{end}"
    page.write_text(pattern.sub(lambda _: filled, text))


if __name__ == "__main__":
    main(Path(sys.argv[1]), compiles="--compile" in sys.argv)
