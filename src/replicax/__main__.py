"""``python -m replicax``: the same as the command ``replicax``."""

from replicax._src.cli.main import entry

if __name__ == "__main__":
    entry()
