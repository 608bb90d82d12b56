"""Every table: ``python -m benchmarks``, or ``make bench``.

    python -m benchmarks [--tensorflow PYTHON] [--torch PYTHON] [--quick] [--out FOLDER]

The interpreters are ones that have these libraries; without them their rows are left out. The
folder gets what each program printed, and the curves as Markdown, JSON and plots.
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
        "data": [],
        "checkpoint": [],
        "saved_model": quick,
        "with_keras": [*tensorflow, *quick],
        "workers": [*tensorflow, *torch, *quick],
        "curves": [*quick, *(["--out", str(options.out)] if options.out else [])],
    }
    # A process each: they want different devices.
    for name, arguments in tables.items():
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        ran = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        print(ran.stdout, flush=True)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.txt").write_text(ran.stdout)


if __name__ == "__main__":
    main()
