"""What the workers of the tests do; each returns what the test looks at."""

import contextlib
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx
from replicax._src.workers.group import required

AGGREGATION, SYNCHRONIZATION = rx.VariableAggregation, rx.VariableSynchronization


def made():
    return rx.distribute.MultiWorkerMirroredStrategy()


def own(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def context():
    return rx.distribute.get_replica_context()


def replica_id():
    return jnp.asarray(context().replica_id_in_sync_group, jnp.float32)


def collectives(compiled):
    strategy = made()
    wrap = rx.function if compiled else (lambda f: f)

    def step():
        i = replica_id()
        total = context().all_reduce("SUM", {"a": i + 1, "b": jnp.ones((2,)) * i})
        mean = context().all_reduce("MEAN", i)
        rows = context().all_gather(jnp.full((1,), i), axis=0)
        merged = context().merge_call(lambda s, x: s.reduce("SUM", x, axis=None), (i,))
        grad = jax.grad(lambda x: context().all_reduce("SUM", x * (i + 1)) ** 2)(jnp.float32(1))
        return total, mean, rows, merged, grad, i

    total, mean, rows, merged, grad, ids = wrap(lambda: strategy.run(step))()
    return {
        "total": [own(strategy, total["a"]), own(strategy, total["b"])],
        "mean": own(strategy, mean),
        "rows": own(strategy, rows),
        "merged": own(strategy, merged),
        "grad": own(strategy, grad),
        "ids": own(strategy, ids),
        "reduce": [float(strategy.reduce(op, ids, axis=None)) for op in ("SUM", "MEAN")],
        "gather": np.asarray(
            strategy.gather(strategy.run(lambda: jnp.full((1, 2), replica_id())), axis=0)
        ).tolist(),
    }


def memory_of_a_mean():
    strategy = made()
    value = strategy.run(lambda: jnp.ones((3, 2**20)))
    step = rx.function(
        lambda x: strategy.run(lambda x: context().all_reduce("MEAN", x), args=(x,))
    ).get_concrete_function(value)
    program = step._program.lowered(step._arguments.arrays).compile()
    return program.memory_analysis().temp_size_in_bytes


def sums(sizes):
    strategy = made()

    def step():
        keys = jax.random.split(jax.random.key(jnp.int32(replica_id())), len(sizes))
        own = [jax.random.normal(k, (n,)) for k, n in zip(keys, sizes, strict=True)]
        each = [context().all_reduce("SUM", x) for x in own]
        squares = lambda x: (context().all_reduce("SUM", x) ** 2).sum()  # noqa: E731
        return own, each, [jax.grad(squares)(x) for x in own]

    results = rx.function(lambda: strategy.run(step))()
    return [
        [np.asarray(strategy.experimental_local_results(x)[0]) for x in part] for part in results
    ]


def ragged_values():
    """Values whose rows differ between workers, reduced and gathered."""
    strategy = made()

    def rows():
        n = int(context().replica_id_in_sync_group) + 1
        return jnp.arange(n, dtype=jnp.float32)

    value = strategy.run(rows)
    gathered = strategy.run(lambda: context().all_gather(rows(), axis=0))
    return {
        "sum": float(strategy.reduce("SUM", value, axis=0)),
        "mean": float(strategy.reduce("MEAN", value, axis=0)),
        "gather": np.asarray(strategy.gather(value, axis=0)).tolist(),
        "all_gather": own(strategy, gathered),
    }


def variables():
    strategy = made()
    index = strategy.cluster_resolver.task_id or 0
    with strategy.scope():
        start = rx.Variable(np.full((3,), index + 1.0, np.float32), name="start")
        negative = rx.Variable(-0.0 if index == 0 else 5.0)
        whole = rx.Variable(index + 7)
        key = rx.Variable(jax.random.key(index))
        first = rx.Variable(0.0, aggregation=AGGREGATION.ONLY_FIRST_REPLICA)
        mean = rx.Variable(0.0, aggregation=AGGREGATION.MEAN)
        count = rx.Variable(
            0.0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM
        )
    out = {
        "start": np.asarray(start).tolist(),
        "signbit": bool(np.signbit(np.asarray(negative))),
        "whole": int(whole),
        "key": np.asarray(jax.random.key_data(key.read_value())).tolist(),
    }

    def step():
        first.assign(replica_id() + 10)
        mean.assign(replica_id())
        count.assign_add(replica_id() + 1)

    for run in (lambda: strategy.run(step), rx.function(lambda: strategy.run(step))):
        run()
        out.setdefault("written", []).append([float(first), float(mean), float(count)])
    rx.debug.check_in_sync()
    start.assign(jnp.full((3,), float(index)))
    try:
        rx.debug.check_in_sync([start])
    except rx.errors.DivergenceError as error:
        out["diverged"] = str(error)
    try:
        strategy.run(lambda: whole.assign(int(context().replica_id_in_sync_group)))
    except rx.errors.DivergenceError as error:
        out["refused"] = str(error)
    return out


def train(steps, compiled, rows):
    """A linear model on shuffled data, with a short last batch in every epoch."""
    strategy = made()
    x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32))[:, None]
    dataset = rx.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=3).batch(12)
    with strategy.scope():
        w = rx.Variable(jnp.zeros((4, 1)))
        seen = rx.Variable(0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM)

    def step(batch):
        inputs, targets = batch
        seen.assign_add(inputs.shape[0])
        count = context().all_reduce("SUM", jnp.float32(inputs.shape[0]))

        def loss(v):
            return jnp.sum((inputs @ v - targets) ** 2) / count

        value, grad = jax.value_and_grad(loss)(w.read_value())
        w.assign_sub(0.1 * context().all_reduce("SUM", grad))
        return value

    run = lambda batch: strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)  # noqa: E731
    run = rx.function(run) if compiled else run
    losses = []
    for _ in range(steps):
        losses += [float(run(batch)) for batch in strategy.experimental_distribute_dataset(dataset)]
    rx.debug.check_in_sync([w])
    return {"w": np.asarray(w).ravel().tolist(), "losses": losses, "seen": int(seen)}


def kept_batches(rows, width):
    """Sums of large batches as they came, and of every third one, kept, at the end."""
    strategy = made()
    data = np.arange(rows * width, dtype=np.float32).reshape(rows, width) % 1021
    dataset = rx.data.Dataset.from_tensor_slices(data).batch(8)
    total = rx.function(lambda b: strategy.run(lambda x: jnp.sum(x, axis=-1), args=(b,)))
    seen, kept = [], []
    for number, batch in enumerate(strategy.experimental_distribute_dataset(dataset)):
        now = [np.array(x) for x in strategy.experimental_local_results(total(batch))]
        seen += [x.tolist() for x in now]
        if number % 3 == 0:
            kept.append((batch, now))
    for batch, before in kept:
        for x, y in zip(strategy.experimental_local_results(batch), before, strict=True):
            np.testing.assert_array_equal(np.asarray(x).sum(-1), y)
    return seen


def iterator_loop(rows, steps):
    """Calls of several steps, which take a batch in every turn, until the data ends."""
    strategy = made()
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=AGGREGATION.SUM)
    dataset = rx.data.Dataset.from_tensor_slices(np.arange(rows, dtype=np.float32)).batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    plain, calls = iter(rx.data.Dataset.range(100)), []

    @rx.function
    def train(it):
        def step(count, _):
            strategy.run(lambda x: total.assign_add(jnp.sum(x)), args=(next(it),))
            return count + next(plain), None

        return rx.scan(step, jnp.int32(0), length=steps)[0]

    while True:
        try:
            calls.append(int(train(iterator)))
        except rx.errors.OutOfRangeError:
            return calls, float(total), iterator.save_state()["steps"]


def iterator_train(rows):
    """The iterator is an argument; the last call finds no batch."""
    strategy = made()
    dataset = rx.data.Dataset.range(rows).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        total = rx.Variable(0.0)

    @rx.function
    def step(iterator):
        part = strategy.run(lambda x: jnp.sum(x.astype(jnp.float32)), args=(next(iterator),))
        total.assign_add(strategy.reduce("SUM", part, axis=None))

    steps = 0
    try:
        while True:
            step(iterator)
            steps += 1
    except StopIteration:
        pass
    return [steps, float(total)]


def uneven_files(sizes, batch, policy):
    """Files of different lengths; which worker saw what, step by step."""
    strategy = made()
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for f, size in enumerate(sizes):
            path = Path(folder) / f"{f}.txt"
            path.write_text("".join(f"{100 * f + i}\n" for i in range(size)))
            paths.append(str(path))
        dataset = rx.data.TextLineDataset(paths).map(lambda s: np.int32(s)).batch(batch)
        options = rx.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            rx.data.experimental.AutoShardPolicy, policy
        )
        distributed = strategy.experimental_distribute_dataset(dataset.with_options(options))
        steps, sums = [], []
        for element in distributed:
            steps.append(own(strategy, element))
            part = strategy.run(lambda x: jnp.sum(x), args=(element,))
            sums.append(int(strategy.reduce("SUM", part, axis=None)))
        for count, _ in enumerate(distributed):  # a second pass, left early
            if count == 1:
                break
    return [steps, sums]


def failing_function(worker, number):
    """The element of one worker fails; what each worker sees, step by step."""
    strategy = made()

    def make(context):
        def check(x):
            if context.input_pipeline_id == worker and x == number:
                raise ValueError("mine")
            return x

        return (
            rx.data.TextLineDataset(__file__)
            .take(6)
            .enumerate()
            .map(lambda i, _: check(i))
            .batch(1)
        )

    iterator, found = iter(strategy.distribute_datasets_from_function(make)), []
    while True:
        try:
            found.append(own(strategy, next(iterator)))
        except StopIteration:
            return found
        except ValueError as error:
            found.append("mine" in str(error))


def uneven_function(lengths):
    strategy = made()

    def make(context):
        n = lengths[context.input_pipeline_id]
        return rx.data.Dataset.range(n).map(lambda x: x + 100 * context.input_pipeline_id).batch(2)

    distributed = strategy.distribute_datasets_from_function(make)
    return [own(strategy, element) for element in distributed]


def unseeded_shuffle(rows):
    strategy = made()
    dataset = rx.data.Dataset.range(rows).shuffle(rows).batch(strategy.num_replicas_in_sync)
    distributed = strategy.experimental_distribute_dataset(dataset)
    return [[v for e in distributed for part in own(strategy, e) for v in part] for _ in range(2)]


def facts():
    strategy = made()
    extended = strategy.extended
    numbers = strategy.experimental_distribute_values_from_function(
        lambda c: c.replica_id_in_sync_group
    )
    return {
        "n": strategy.num_replicas_in_sync,
        "numbers": list(strategy.experimental_local_results(numbers)),
        "devices": list(extended.worker_devices),
        "writes": [extended.should_checkpoint, extended.should_save_summary],
        "pid": os.getpid(),
    }


def each_workers_own():
    """Constants, plain values and captured per-replica values, which differ between workers."""
    strategy = made()
    w = jax.process_index()
    vector = jnp.asarray([w, w + 1.0])
    captured = strategy.experimental_distribute_values_from_function(
        lambda c: jnp.asarray([1.0 * c.replica_id_in_sync_group])
    )
    with strategy.scope():
        total = rx.Variable([0.0, 0.0], aggregation=AGGREGATION.SUM)
        counter = rx.Variable(
            0.0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM
        )
    out = {}

    def step():
        total.assign(vector)
        return (
            context().all_reduce("SUM", vector),
            context().all_reduce("SUM", vector[0]),
            context().all_reduce("MEAN", vector[0]),
            context().all_gather(vector[:1], 0),
            context().all_gather(jnp.zeros((0, 2)), 0),
            context().merge_call(lambda s, x: s.reduce("SUM", x, axis=None), (vector,)),
        )

    for name, wrap in (("eager", lambda f: f), ("compiled", rx.function)):
        out[name] = {
            "constants": [own(strategy, x) for x in wrap(lambda: strategy.run(step))()],
            "written": own(strategy, total),
            "mean": np.asarray(
                wrap(lambda x: strategy.reduce("MEAN", x, axis=None))(vector)
            ).tolist(),
            "axis": float(wrap(lambda x: strategy.reduce("SUM", x, axis=0))(vector)),
            "captured": [
                own(strategy, wrap(lambda: strategy.run(lambda row: row + 1, (captured,)))()),
                np.asarray(wrap(lambda: strategy.reduce("SUM", captured, axis=0))()).tolist(),
                np.asarray(wrap(lambda: strategy.gather(captured, axis=0))()).tolist(),
            ],
        }
        wrap(lambda: counter.assign(8.0))()
        out[name]["shared"] = [own(strategy, counter), float(counter)]
    if len(strategy.extended.worker_devices) == 1:
        destination = strategy.extended.worker_devices[0]
        out["plain"] = [
            [float(strategy.reduce(op, w + 1, axis=None)) for op in ("SUM", "MEAN")],
            np.asarray(strategy.gather(jnp.arange(w + 1), axis=0)).tolist(),
            float(strategy.extended.reduce_to("SUM", vector[0], destination)),
        ]
    else:
        verbs = (lambda: strategy.reduce("SUM", 1.0, axis=None), lambda: strategy.gather(vector, 0))
        for verb in verbs:
            try:
                verb()
            except ValueError as error:
                out.setdefault("refused", []).append(str(error))
    return out


def lazy_variables(compiled):
    """Variables that a replica function makes on its first call."""
    strategy = made()
    variables = {}  # eager replicas all make them, and get the same ones

    def step():
        if not variables:
            start = 5.0 + jax.process_index()
            variables["mirrored"] = rx.Variable(start, aggregation=AGGREGATION.SUM)
            variables["on read"] = rx.Variable(
                start, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM
            )
        for v in variables.values():
            v.assign_add(replica_id())
        return variables["mirrored"].read_value() * 1

    run = (rx.function if compiled else lambda f: f)(lambda: strategy.run(step))
    with strategy.scope():
        returned = [own(strategy, run()) for _ in range(2)]
    rx.debug.check_in_sync()
    return [returned, own(strategy, variables["on read"]), float(variables["on read"])]


def names():
    """What a worker of a cluster with a chief calls itself."""
    config = json.loads(os.environ["TF_CONFIG"])
    (lead, *others), index = config["cluster"]["worker"], config["task"]["index"]
    config["cluster"] = {"chief": [lead], "worker": others}
    config["task"] = {"type": "worker" if index else "chief", "index": max(index - 1, 0)}
    os.environ["TF_CONFIG"] = json.dumps(config)
    strategy = rx.compat.v1.distribute.experimental.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = rx.Variable(1.0)
    (device,) = strategy.extended.worker_devices
    with rx.device(device):
        x = jnp.ones(())
    config = strategy.update_config_proto(rx.compat.v1.ConfigProto())
    return {
        "devices": [device, v.device, rx.device_name(x)],
        "config": [config.experimental.collective_group_leader, config.device_filters],
        "isolate": config.isolate_session_state,
        "between_graph": strategy.extended.experimental_between_graph,
        "structure": len(strategy.experimental_local_results([1, 2])),
        "synchronization": v.synchronization.name,
    }


def keys_and_gradients():
    """Steps that split a random key of the chief's and follow the mean gradient."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        key = rx.Variable(jax.random.key(7 + jax.process_index()))
        weights = rx.Variable(jnp.ones(3))

    def replica(x):
        key.assign(jax.random.split(key.read_value())[0])
        loss, (gradient,) = rx.value_and_grad(
            lambda: jnp.sum((weights.read_value() - x) ** 2), [weights]
        )()
        context = rx.distribute.get_replica_context()
        weights.assign_sub(0.25 * context.all_reduce("MEAN", gradient))
        return loss

    step = rx.function(lambda x: strategy.run(replica, args=(x,)))
    x = strategy.experimental_distribute_values_from_function(
        lambda context: jnp.full(3, context.replica_id_in_sync_group, jnp.float32)
    )
    for _ in range(2):
        step(x)
    rx.debug.check_in_sync()
    return np.asarray(jax.random.key_data(key.read_value())), weights.numpy()


def sharded_training(policy, folder):
    strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy=policy)
    shape, count = (67, 101), strategy.num_replicas_in_sync
    rng = np.random.default_rng(jax.process_index())  # worker 0's values are everyone's
    with strategy.scope():
        w = rx.Variable(rng.normal(size=shape).astype("f4"), name="w")
        slot = rx.Variable(np.zeros(shape, "f4"))

    def step():
        x = jnp.ones(shape) * (replica_id() + 1)
        loss = lambda: jnp.mean(jnp.sin(w) * x)  # noqa: E731
        value, gradient = rx.value_and_grad(loss, w)()
        slot.assign(0.9 * slot + context().all_reduce("SUM", gradient))
        w.assign_sub(100 * slot)
        return value

    run = rx.function(lambda: strategy.run(step))
    losses = [float(strategy.reduce("SUM", run(), axis=None)) for _ in range(3)]
    trained = w.numpy()
    path = rx.train.Checkpoint(w=w).write(f"{folder}/{policy}")
    w.assign(np.zeros(shape, "f4"))
    rx.train.Checkpoint(w=w).restore(path)
    strategy.run(lambda: w.assign(w.read_value() + 0.0))
    refused = ""
    if policy == "sharded":
        try:
            w.assign(np.full(shape, jax.process_index(), "f4"))
        except rx.errors.DivergenceError as error:
            refused = str(error)
    return {
        "losses": losses,
        "trained": trained.tolist(),
        "restored": w.numpy().tolist(),
        "held": sum(s.data.nbytes for s in slot.cell.array().addressable_shards),
        "share": 4 * -(-67 * 101 // count) * len(strategy.topology.local_replicas),
        "refused": refused,
        "program": run.get_concrete_function().as_text(),
    }


def combination(options):
    """Train on replicas of several devices each, and shards of several replicas."""
    from tests.laws.test_combinations import Model  # noqa: PLC0415 - workers start JAX later

    model = Model(rx.distribute.MultiWorkerMirroredStrategy(**options))
    losses = model.train()
    numbers = {name: value.tolist() for name, value in model.numbers().items()}
    return {"losses": losses, "numbers": numbers, "replicas": model.strategy.num_replicas_in_sync}


def counted_on(folder):
    """What replicas count, each for itself, saved in between and gone on with."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy()
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 5)).astype("f4"))

    def made():
        with strategy.scope():
            return rx.Variable(
                jnp.zeros(5), synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM
            )

    def add(v, turn):
        rx.function(
            lambda: strategy.run(
                lambda: v.assign_add(values[turn][context().replica_id_in_sync_group])
            )
        )()
        copies = [np.asarray(c).tolist() for c in strategy.experimental_local_results(v)]
        return copies, v.numpy().tolist()

    v, fresh = made(), made()
    saved = add(v, 0)
    path = rx.train.Checkpoint(v=v).write(f"{folder}/ckpt")
    expected = add(v, 1)
    rx.train.Checkpoint(v=fresh).restore(path).assert_consumed()
    restored = [np.asarray(c).tolist() for c in strategy.experimental_local_results(fresh)]
    return saved, expected, (restored, fresh.numpy().tolist()), add(fresh, 1)


STATE = (66, 104)


def state(policy):
    """Variables of each kind; only what is the same on all workers is saved once for all."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy=policy)
    with strategy.scope():
        variables = {
            "w": rx.Variable(jnp.zeros(STATE), name="w"),
            "odd": rx.Variable(jnp.zeros((67, 101)), name="odd"),
            "small": rx.Variable(jnp.zeros(3), name="small"),
            "total": rx.Variable(
                0, synchronization=SYNCHRONIZATION.ON_READ, aggregation=AGGREGATION.SUM
            ),
        }
    return strategy, {**variables, "own": rx.Variable(0)}


def save_state(policy, folder):
    strategy, variables = state(policy)
    rng = np.random.default_rng(5)
    for name in ("w", "odd", "small"):
        variables[name].assign(rng.normal(size=variables[name].shape).astype("f4"))
    strategy.run(lambda: variables["total"].assign_add(1))
    variables["own"].assign(jax.process_index())
    # As programs do that were written for TensorFlow.
    mine = folder if jax.process_index() == 0 else f"{folder}/workertemp_{jax.process_index()}"
    checkpoint = rx.train.Checkpoint(**variables)
    checkpoint.save(f"{mine}/ckpt", block=False)
    checkpoint.sync()
    return {name: np.asarray(v.read_value()).tolist() for name, v in variables.items()}


def restore_state(policy, path):
    _, variables = state(policy)
    rx.train.Checkpoint(**variables).restore(path).assert_consumed()
    rx.debug.check_in_sync()
    held = sum(s.data.nbytes for s in variables["w"].cell.array().addressable_shards)
    found = {name: np.asarray(v.read_value()).tolist() for name, v in variables.items()}
    return found, held


def refused_checkpoints(folder):
    """What both workers hear when one of them cannot save, or restores something else."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy="sharded")
    with strategy.scope():
        w = rx.Variable(jnp.ones(STATE))
    checkpoint, words = rx.train.Checkpoint(w=w), []
    good = checkpoint.write(f"{folder}/good")

    def attempt(do):
        try:
            do()
        except OSError as error:
            words.append(f"{type(error).__name__}: {error}")

    if jax.process_index() == 1:  # has no room for its half, which is 13728 bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, resource.RLIM_INFINITY))
    attempt(lambda: checkpoint.write(f"{folder}/new"))
    attempt(lambda: checkpoint.write(good))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoint.read(good)
    w.assign(jnp.zeros(STATE))
    other = checkpoint.write(f"{folder}/other")
    w.assign(jnp.full(STATE, 3.0))
    attempt(lambda: checkpoint.read(good if jax.process_index() else other))
    return words, float(w.numpy().mean())


def left_alive(how, folder):
    """Worker 1 fails and lives on until worker 0 has seen it; return what both see."""
    noticed = Path(folder) / "noticed"
    strategy = rx.distribute.TPUStrategy() if how == "on a TPU" else made()
    with strategy.scope():
        total = rx.Variable(0.0, aggregation=AGGREGATION.SUM)
    index = required().facts.index

    @rx.function
    def step():
        strategy.run(lambda: total.assign(jnp.float32(1)))

    step()
    if index == 0:
        began = time.monotonic()
        error = _raised(step)
        noticed.touch()
        return error, time.monotonic() - began
    if how in ("raised", "on a TPU"):
        with contextlib.suppress(ValueError), contextlib.ExitStack() as stack:
            stack.callback(strategy.leave)
            raise ValueError("a wrong turn")
    elif how == "in a collective":
        group = required()
        with contextlib.suppress(ValueError), group.collective(how):
            raise ValueError("a wrong turn")
        strategy.leave()
    else:
        strategy.leave()
    strategy.leave()  # once more does nothing
    for _ in range(600):
        if noticed.exists():
            break
        time.sleep(0.1)
    time.sleep(2)  # the coordination service of JAX has ended by now
    service = jax.distributed.is_initialized()
    return _raised(step), float(total.read_value()), float(jnp.ones(3).sum()), service


def _raised(f):
    try:
        f()
    except rx.errors.ReplicaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""
