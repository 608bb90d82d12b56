"""``python -m replicax``: the same as the command ``replicax``."""

from replicax.cli._main import entry

if __name__ == "__main__":
    entry()
