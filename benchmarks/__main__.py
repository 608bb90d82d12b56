"""Every table: ``python -m benchmarks``, or ``make bench``.

    python -m benchmarks [--tensorflow PYTHON] [--torch PYTHON] [--quick] [--out FOLDER]

The interpreters are ones that have these libraries; without them their rows are left out. The
folder gets a page of what each program printed, and the curves as Markdown, JSON and plots.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--torch", metavar="PYTHON")
    parser.add_argument("--quick", action="store_true", help="few pairs, to try it out")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    tensorflow = ["--tensorflow", options.tensorflow] if options.tensorflow else []
    torch = ["--torch", options.torch] if options.torch else []
    quick = ["--quick"] if options.quick else []
    tables = {
        "core": [*tensorflow, *quick],
        "packing": [],
        "input": [],
        "data": tensorflow,
        "checkpoint": [],
        "saved_model": quick,
        "sharded": quick,
        "with_keras": [*tensorflow, *quick],
        "workers": [*tensorflow, *torch, *quick],
        "start": [*tensorflow, *torch, *quick],
        "curves": [*quick, *(["--out", str(options.out)] if options.out else [])],
    }
    # A process each: they want different devices.
    failed = [name for name, arguments in tables.items() if not _run(name, arguments, options.out)]
    if failed:
        raise SystemExit(f"These programs failed; what they wrote is above: {', '.join(failed)}.")


def _run(name: str, arguments: list[str], folder: Path | None) -> bool:
    """Whether one of the programs ended well; its table goes into a page of the folder."""
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(ran.stdout, flush=True)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        page = f"# benchmarks.{name}\n\n```\n{ran.stdout.rstrip()}\n```\n"
        # The curves write a page of their own.
        (folder / f"{name}{'.txt' if name == 'curves' else '.md'}").write_text(page)
    return ran.returncode == 0


if __name__ == "__main__":
    main()
