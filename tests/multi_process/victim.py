"""A worker that trains, until something happens to one of them.

Usage: victim FAULT WHO: worker WHO meets FAULT at its fifth step.
"""

import os
import signal
import sys
import time

import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax.workers import _group


def say(word):
    print(f"{word} {time.time()}", flush=True)


def main():
    fault, who = sys.argv[1], int(sys.argv[2])
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        v = rx.Variable(jnp.zeros(4), aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def train_step(x):
        def step(x):
            total = rx.distribute.get_replica_context().all_reduce("SUM", x)
            v.assign(total)
            return total

        return strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)

    def rows(context):
        def make():
            for i in range(60):
                if fault == "data-stuck" and i == 5 and index == who:
                    say("FAULT")
                    time.sleep(1000)
                if fault == "data-raises" and i == 5 and index == who:
                    say("FAULT")
                    raise ValueError("the disk is full of holes")
                yield np.full(4, i, np.float32)

        return rx.data.Dataset.from_generator(
            make, output_signature=rx.TensorSpec([4], "float32")
        )

    batches = strategy.distribute_datasets_from_function(rows)
    try:
        for number, batch in enumerate(batches):
            train_step(batch)
            if number == 4 and index == who:
                if not fault.startswith("data"):
                    say("FAULT")
                happen(fault, strategy)
            time.sleep(0.02)
    except BaseException:
        say("NOTICED")
        raise
    say("DONE")


def happen(fault, strategy):
    match fault:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        case "crashed":
            os.abort()
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stuck":
            time.sleep(1000)
        case "busy":
            while True:
                pass
        case "raises":
            raise ValueError("a wrong turn")
        case "interrupted":
            raise KeyboardInterrupt
        case "leaves":
            sys.exit(0)
        case "fails":
            sys.exit(3)
        case "vanishes":
            os._exit(0)
        case "hub":
            os.kill(_group.required()._hub_pid, signal.SIGKILL)
        case "other":
            strategy.reduce("SUM", strategy.run(lambda: jnp.ones(3)), axis=None)


if __name__ == "__main__":
    main()
