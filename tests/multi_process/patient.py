"""A worker that only asks the doctor how its cluster is."""

import sys

from replicax.cli._main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", "--cluster", "--json"]))
