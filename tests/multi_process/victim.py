"""A worker that trains, until something happens to one of them.

Usage: victim FAULT WHO [STEPS]: worker WHO meets FAULT at its fifth step.
"""

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax._src.workers import group


def say(word):
    sys.stdout.write(f"{word} {time.time()}\n")
    sys.stdout.flush()


def main():
    fault, who, steps = sys.argv[1], int(sys.argv[2]), int((sys.argv[3:] or ["60"])[0])
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    mine = fault if index == who else "none"
    with strategy.scope():
        v = rx.Variable(jnp.zeros(4), aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def train_step(x):
        def step(x):
            total = rx.distribute.get_replica_context().all_reduce("SUM", x)
            v.assign(total)
            return total

        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    try:
        train(strategy, train_step, mine, steps)
    except BaseException:
        say("NOTICED")
        raise
    say("DONE")


def train(strategy, train_step, fault, steps):
    signature = rx.TensorSpec([4], "float32")
    batches = strategy.distribute_datasets_from_function(
        lambda _: rx.data.Dataset.from_generator(
            lambda: rows(fault, steps), output_signature=signature
        )
    )
    for number, batch in enumerate(batches):
        train_step(batch)
        if number == 4:
            say("FAULT" if fault in HAPPENINGS else "WELL")
            happen(fault, strategy)
        time.sleep(0.02)


def rows(fault, steps):
    for i in range(steps):
        if i == 5 and fault.startswith("data"):
            say("FAULT")
            if fault == "data-stuck":
                time.sleep(1000)
            raise ValueError("the disk is full of holes")
        yield np.full(4, i, np.float32)


def happen(fault, strategy):
    HAPPENINGS.get(fault, lambda _: None)(strategy)


def _signal(number):
    return lambda _: os.kill(os.getpid(), number)


def _stuck(_):
    time.sleep(1000)


def _signal_to_hub(number):
    return lambda _: os.kill(group.required()._hub_pid, number)


def _kill_keeper(_):
    hub = group.required()._hub_pid
    (keeper,) = Path(f"/proc/{hub}/task/{hub}/children").read_text().split()
    os.kill(int(keeper), signal.SIGKILL)


def _fork(then):
    """Fork a child that does ``then``; with JAX's threads, it can do little more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        then()


def _fork_and_exit(_):
    _fork(lambda: sys.exit(0))


def _fork_and_die(_):
    _fork(lambda: time.sleep(30))
    os.kill(os.getpid(), signal.SIGKILL)


def _busy(_):
    while True:
        pass


def _raises(_):
    raise ValueError("a wrong turn")


def _interrupted(_):
    raise KeyboardInterrupt


def _other(strategy):
    strategy.reduce("SUM", strategy.run(lambda: jnp.ones(3)), axis=None)


HAPPENINGS = {
    "killed": _signal(signal.SIGKILL),
    "terminated": _signal(signal.SIGTERM),
    "stopped": _signal(signal.SIGSTOP),
    "crashed": lambda _: os.abort(),
    "stuck": _stuck,
    "busy": _busy,
    "raises": _raises,
    "interrupted": _interrupted,
    "leaves": lambda _: sys.exit(0),
    "fails": lambda _: sys.exit(3),
    "vanishes": lambda _: os._exit(0),
    "forks": _fork_and_exit,
    "forks and is killed": _fork_and_die,
    "keeper killed": _kill_keeper,
    "hub killed": _signal_to_hub(signal.SIGKILL),
    "hub stopped": _signal_to_hub(signal.SIGSTOP),
    "other": _other,
}


if __name__ == "__main__":
    main()
