"""A training of torch DDP that continues from its last checkpoint, for `tests.chaos.recovery`.

Started by torchrun with a folder, or by `train_with_ray` in each worker of Ray Train. Each worker
writes a line for each step to a ledger, with the number of workers and its process.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

EVERY, PACE = int(os.environ["EVERY"]), float(os.environ["PACE"])


def train(folder, state, save):
    """Train for ever: from ``state`` if there is one, with ``save(step, state)`` in between."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    step = 0
    if state is not None:
        step = state["step"]
        net.load_state_dict(state["net"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    attempt = torch.tensor(len(list(Path(folder).glob(f"ledger{rank}.*"))))
    torch.distributed.all_reduce(attempt, torch.distributed.ReduceOp.MAX)
    with open(f"{folder}/ledger{rank}.{int(attempt)}", "a", buffering=1) as ledger:
        while True:
            optimizer.zero_grad()
            model(torch.ones(4, 4)).square().mean().backward()
            optimizer.step()
            step += 1
            ledger.write(json.dumps([step, size, os.getpid()]) + "\n")
            time.sleep(PACE)
            if step % EVERY == 0:
                save(step, {"step": step, "net": net.state_dict()})


def main(folder):
    torch.distributed.init_process_group("gloo")
    path = Path(folder, "checkpoint")

    def save(_, state):
        if torch.distributed.get_rank() == 0:
            new = path.with_suffix(".new")
            torch.save(state, new)
            new.replace(path)

    train(folder, torch.load(path) if path.exists() else None, save)


def train_with_ray(config):
    import ray.train  # noqa: PLC0415 - torchrun needs no Ray

    def save(step, state):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if torch.distributed.get_rank() == 0:
                torch.save(state, f"{folder}/state")
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": step}, checkpoint=checkpoint)

    state = None
    if last := ray.train.get_checkpoint():
        with last.as_directory() as folder:
            state = torch.load(f"{folder}/state")
    train(config["folder"], state, save)


if __name__ == "__main__":
    main(*sys.argv[1:])
