"""Write the preflight figures of ``tpu.md`` and ``scaling.md`` from what the compiler says.

    python docs/make_tpu_pages.py FOLDER

reads the reports that ``replicax preflight --json`` left in FOLDER, or makes them first, which
takes half an hour on two cores, and puts tables and plots between the marks of the pages.
"""

import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from replicax.ahead._report import PreflightReport
from replicax.ahead._sweep import Sweep
from replicax.ahead._tables import as_text, show_bytes

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
SLICES = {
    8: ("v4:2x2x1", "v4:4x4x2", "v4:4x4x8", "v4:8x8x8"),
    1: ("v4:2x2x1", "v5p:2x2x2", "v5p:4x4x4", "v5p:4x8x8", "v5p:8x8x16"),
}
DEMO = ("v5e:16x16", "v4:8x8x8")


def main(folder: Path) -> None:
    """Fill both pages."""
    folder.mkdir(parents=True, exist_ok=True)
    demo = Sweep(tuple(_report(folder, "digits", name, ["--"]) for name in DEMO))
    demo_plot = Sweep(
        tuple(
            _report(folder, "digits", name, ["--"])
            for name in ("v5e:2x4", "v5e:8x8", "v5e:16x16", "v4:8x8x8")
        )
    )
    demo_plot.plot(DOCS / "preflight_digits.svg")
    text = "\n".join(as_text(report) for report in demo.reports)
    _fill(DOCS / "tpu.md", "demo", f"```text\n{text}```")
    split, whole = (_sweep(folder, cores) for cores in (8, 1))
    split.plot(DOCS / "scaling_split.svg")
    Sweep(tuple(r for r in whole.reports if r.compiles)).plot(DOCS / "scaling_whole.svg")
    page = DOCS / "scaling.md"
    _fill(page, "split", _table(split))
    _fill(page, "whole", _table(whole))
    largest = split.reports[-1]
    _fill(page, "largest", f"```text\n{as_text(largest)}```")


def _sweep(folder: Path, cores: int) -> Sweep:
    options = ["--plan", "--", "--size", "1b", "--cores", str(cores)]
    reports = [
        _report(folder, "transformer_tpu", name, options, f"cores{cores}") for name in SLICES[cores]
    ]
    return Sweep(tuple(reports))


def _report(
    folder: Path, example: str, name: str, options: list[str], label: str = ""
) -> PreflightReport:
    path = folder / f"scal_{label or example}_{name.replace(':', '_')}.json"
    if not path.exists():
        at = options.index("--")
        script = str(EXAMPLES / f"{example}.py")
        command = ["preflight", "--topology", name, "--json", str(path), *options[:at], script]
        Console().print(f"compiling {example} for {name}")
        subprocess.run([sys.executable, "-m", "replicax", *command, *options[at:]], check=False)
    return PreflightReport.from_json(path.read_text())


def _table(sweep: Sweep) -> str:
    rows = [
        "| slice | devices | replicas | memory of a device | fits | sent in a step | step, roofline"
        " |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    for r in sweep.reports:
        spare = show_bytes(abs(r.headroom))
        fits = f"yes, {spare} to spare" if r.fits else f"**no**, {spare} too much"
        sent = show_bytes(r.communication_bytes) if r.compiles else "-"
        step = f"{1e3 * r.step_seconds:.0f} ms" if r.compiles else "-"
        rows.append(
            f"| {r.topology} | {r.num_devices:,} | {r.num_replicas:,} |"
            f" {show_bytes(r.memory.total)} | {fits} | {sent} | {step} |"
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
    main(Path(sys.argv[1]))
