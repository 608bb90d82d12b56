"""Every table: ``python -m benchmarks``, or ``make bench``; options go to the first."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

# A process each: they want different devices.
for name, options in (("core.py", sys.argv[1:]), ("packing.py", [])):
    subprocess.run([sys.executable, HERE / name, *options], check=True)
