"""Print the cores that this worker sees, and how many it uses."""

import replicax as rx
from replicax._src.base import cores

if __name__ == "__main__":
    with rx.distribute.MultiWorkerMirroredStrategy().scope():
        print(cores.local_facts()["cores"], cores.usable(), flush=True)  # noqa: T201 - the result
