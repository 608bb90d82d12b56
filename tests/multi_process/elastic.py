"""A training whose workers die: elastic FOLDER STEPS [RANK@POINT@COUNT ...].

A worker is killed at the given point of the library, with ``step`` before it takes a step, with
``resize`` when it has been told of so many resizes, with ``regroup`` when it begins to re-form with
workers that join, with ``claim`` when it begins its first save, with ``compile`` while it compiles;
or gets SIGTERM with ``term``, or SIGSTOP with ``stop``, before a step. A worker that joins again
does not. With ``cut``, its connections break in that step's barrier, which the others pass;
``cut@0`` is the step after which workers join.

With ``STOP_AFTER`` in the environment, the run commits after that step and ends; with ``WAIT_FOR``,
steps are slow while there are fewer replicas than that; with ``PACE``, each takes so many seconds
longer, with ``COMPILES`` its first compilation; with ``PER_REPLICA``, each replica takes as many
rows as that; ``ROWS`` is the size of a batch. ``ON_READ`` is the aggregation of a variable with a
value for each replica, which counts the steps of all replicas. With ``SHARDED`` there are two
sharded variables, which change the loss. A line for each step goes to the worker's ledger: the
step, the number of replicas, this worker's examples, and the bits of the loss and the weights. With
``TURNOVER``, a worker that has joined dies after so many seconds, and the others write their
threads, descriptors and MiB of memory to ``usage`` files after each change. With ``REPLAY``, the
run takes only the steps that this JSON file names, each from the bits of the weights and the
momentum that it gives.
"""

import json
import os
import sys
import time

BATCH = int(os.environ.get("ROWS", "12"))
_WIDE = [(6, 1024), (5, 1031)]

_started, _noted = time.monotonic(), [0]


def turn_over(folder, changes):
    """Note what this process uses if the workers have changed; end it if it joined long ago."""
    if changes > _noted[0]:
        _noted[0] = changes
        threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        with open("/proc/self/statm") as statm:
            memory = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        with open(f"{folder}/usage{os.environ['RANK']}.{os.getpid()}", "a") as file:
            file.write(json.dumps([changes, threads, files, memory]) + "\n")
    is_old = time.monotonic() - _started > float(os.environ["TURNOVER"])
    if "REPLICAX_JOIN" in os.environ and is_old:
        os.kill(os.getpid(), 9)


def cut_barrier(step, number):
    """Break the connections in the barrier of a step, when the others have passed it."""
    import jax  # noqa: PLC0415

    from replicax._src.functions import program  # noqa: PLC0415
    from replicax._src.workers import group  # noqa: PLC0415

    real = program.step_barrier

    def step_barrier(topology):
        passed = jax.block_until_ready(real(topology))
        mine = group.required()
        if step() == number or (not number and mine.has_newcomers):
            until = time.monotonic() + (60.0 if number else 2.0)
            while time.monotonic() < until and not mine.may_resize:
                time.sleep(0.01)
            if mine.may_resize:
                raise RuntimeError("Gloo: the connection was closed")
        return passed

    program.step_barrier = step_barrier


def compile_slowly(seconds, *, dies):
    """Let the first compilation of the step take so many seconds longer; die in it if asked to."""
    compiler = sys.modules["jax._src.compiler"]
    real, left = compiler.backend_compile_and_load, [seconds]

    def compile_and_load(backend, module, *args, **kwargs):
        if "train" in str(module.operation.attributes["sym_name"]) and left:
            time.sleep(2.0 if dies else left.pop())
            if dies:
                os.kill(os.getpid(), 9)
        return real(backend, module, *args, **kwargs)

    compiler.backend_compile_and_load = compile_and_load


def die_at(point):
    """Kill this process when it begins to re-form with workers that join, or to save."""
    from replicax._src.train.manager import CheckpointManager  # noqa: PLC0415
    from replicax._src.workers import start  # noqa: PLC0415

    def die(*_):
        time.sleep(0.5)  # the others wait for this one
        os.kill(os.getpid(), 9)

    owner, name = {"regroup": (start, "regroup"), "claim": (CheckpointManager, "_claim")}[point]
    setattr(owner, name, die)


def main(*arguments):  # noqa: C901 - one program, from top to bottom
    folder, steps, *plan = arguments
    dies_before, dies_at_resize, dies_at, cut_at = {}, 0, "", None
    for who, point, number in (item.split("@") for item in plan):
        is_first = os.environ["REPLICAX_RESTART"] == "0" and "REPLICAX_JOIN" not in os.environ
        if who == os.environ["RANK"] and is_first:
            if point in ("step", "term", "stop"):
                dies_before[int(number)] = {"step": 9, "term": 15, "stop": 19}[point]
            elif point == "resize":
                dies_at_resize = int(number)
            elif point in ("regroup", "claim", "compile"):
                dies_at = point
            elif point == "cut":
                cut_at = int(number)
            else:
                os.environ["REPLICAX_FAULT"] = f"{point}:kill@{number}"

    # The fault is read when replicax is imported.
    import jax.numpy as jnp  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415

    import replicax as rx  # noqa: PLC0415

    last = int(os.environ.get("STOP_AFTER", steps))
    policy = "sharded" if "SHARDED" in os.environ else "mirrored"
    strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy=policy)
    rows = np.random.default_rng(0).normal(size=(BATCH * int(steps), 4)).astype("float32")
    with strategy.scope():
        weights, speed = rx.Variable(jnp.ones(4)), rx.Variable(jnp.zeros(4))
        count = rx.Variable(0)
        wide = []
        if policy == "sharded":  # the second one is stored flat and padded
            wide = [rx.Variable(jnp.linspace(-1, 1, m * n).reshape(m, n)) for m, n in _WIDE]
        seen = None
        if os.environ.get("ON_READ"):
            on_read = rx.VariableSynchronization.ON_READ
            how = rx.VariableAggregation[os.environ["ON_READ"]]
            seen = rx.Variable(0.0, synchronization=on_read, aggregation=how)
    data = rx.data.Dataset.range(len(rows)).shuffle(30, seed=7)
    if each := int(os.environ.get("PER_REPLICA", "0")):
        spread = strategy.experimental_distribute_dataset(data.batch(each), batch="per_replica")
    else:
        spread = strategy.experimental_distribute_dataset(data.batch(BATCH))
    batches = iter(spread)
    held = [weights, speed, count, batches]  # what a program holds stays the same objects
    sizes = []

    @strategy.on_resize
    def note_size(strategy):
        sizes.append(strategy.num_replicas_in_sync)
        if len(sizes) == dies_at_resize:
            os.kill(os.getpid(), 9)

    if cut_at is not None:
        cut_barrier(lambda: int(count) + 1, cut_at)
    if dies_at in ("regroup", "claim"):
        die_at(dies_at)
    if seconds := float(os.environ.get("COMPILES", "0")):
        compile_slowly(seconds, dies=dies_at == "compile")

    def replica_step(ids):
        x = jnp.asarray(rows)[ids]

        def loss_fn():
            errors = jnp.square(x @ weights.value() - 1.0)
            if each:
                return rx.nn.mean_loss(errors)
            return rx.nn.compute_average_loss(errors, global_batch_size=BATCH)

        loss, (gradient,) = rx.value_and_grad(loss_fn, [weights])()
        gradient = rx.distribute.get_replica_context().all_reduce("SUM", gradient)
        speed.assign(0.9 * speed + gradient)
        weights.assign_sub(0.01 * speed)
        count.assign_add(1)
        for w in wide:
            w.assign(0.9 * w.value() + 0.01 * gradient.sum())
            loss = loss + jnp.square(w.value()).mean() / strategy.num_replicas_in_sync
        if seen is not None:
            seen.assign_add(1.0)
        return loss

    @rx.function
    def train(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(batch,)), axis=None)

    @rx.function
    def train_next(iterator):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(next(iterator),)), axis=None)

    def note(ids, loss):
        bits = [np.asarray(x).tobytes().hex() for x in (loss, weights, speed)]
        line = [int(count), strategy.num_replicas_in_sync, ids, *bits]
        name = f"{os.environ['RANK']}.{os.environ['REPLICAX_RESTART']}"
        with open(f"{folder}/ledger{name}", "a") as file:
            file.write(json.dumps(line) + "\n")

    if "REPLAY" in os.environ:
        with open(os.environ["REPLAY"]) as file:
            begins = {int(step): begin for step, begin in json.load(file).items()}
        for step in range(1, max(begins) + 1):
            batch = next(batches)
            if step in begins:
                for variable, text in zip((weights, speed), begins[step], strict=True):
                    variable.assign(np.frombuffer(bytes.fromhex(text), "float32"))
                count.assign(step - 1)
                loss = train(batch)
                note(np.concatenate(strategy.experimental_local_results(batch)).tolist(), loss)
        return

    state = {"w": weights, "s": speed, "n": count, "d": batches, "wide": wide}
    with rx.train.Resumable(
        f"{folder}/commits", every=int(os.environ.get("EVERY", "2")), **state
    ) as run:
        while int(count) < last:
            if number := dies_before.pop(int(count) + 1, 0):
                os.kill(os.getpid(), number)
            if "TURNOVER" in os.environ:
                turn_over(folder, len(sizes))
            if os.environ.get("FORM") == "iterator":
                note(None, train_next(batches))
            else:
                batch = next(batches)
                loss = train(batch)
                note(np.concatenate(strategy.experimental_local_results(batch)).tolist(), loss)
            time.sleep(float(os.environ.get("PACE", "0")))
            if strategy.num_replicas_in_sync < int(os.environ.get("WAIT_FOR", "0")):
                time.sleep(1.0)
            run.step()
        if "STOP_AFTER" in os.environ:
            run.commit()
    assert held == [weights, speed, count, batches]
    # A batch that is in use when a worker is lost has a program of its own: it keeps its rows, and
    # stays a per-replica value when one replica is left.
    assert train.experimental_get_tracing_count() <= 1 + 2 * len(sizes)
    can_read = seen is not None and os.environ["ON_READ"] != "NONE"
    total = f" total {float(seen.read_value())}" if can_read else ""
    sys.stdout.write(f"sizes {sizes} chief {strategy.is_chief}{total}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
