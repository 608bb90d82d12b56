"""A worker that only asks the doctor how its cluster is."""

import sys

from replicax._src.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["doctor", "--cluster", "--json"]))
