"""Programs that are right: both checkers accept every line, and infer what is asserted."""

from typing import Any, NamedTuple, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

import replicax as rx

assert_type(rx.__version__, str)

Scaled = rx.data.Dataset[tuple[jax.Array, int]]
Numbered = rx.data.Dataset[tuple[np.int64, np.number[Any]]]


class Pair(NamedTuple):
    image: Any
    label: Any


def a_variable_is_an_array(w: rx.Variable, x: jax.Array) -> None:
    assert_type(rx.Variable(1.0), rx.Variable)
    assert_type(rx.Variable(1.0, trainable=False, name="w", dtype="float32"), rx.Variable)
    assert_type(w.assign_add(1.0), rx.Variable)
    assert_type(w.scatter_add(rx.IndexedSlices(x, x)), rx.Variable)
    assert_type(w.read_value(), jax.Array)
    assert_type(w.device, str)
    assert_type(w * 2, jax.Array)
    assert_type(2 * w, jax.Array)
    assert_type(w @ x, jax.Array)
    assert_type(x @ w, jax.Array)
    assert_type(-w, jax.Array)
    assert_type(w[0] * 2, jax.Array)
    assert_type(w[1:3, 0].assign(1.0), rx.Variable)
    assert_type(w.T, jax.Array)
    assert_type(w.sum(axis=0), jax.Array)
    assert_type(w.at[0].set(1), jax.Array)
    assert_type(jnp.sum(w), jax.Array)
    assert_type(jnp.dot(x, w), jax.Array)
    assert_type(float(w), float)
    assert_type(w.numpy(), np.ndarray)
    anywhere: ArrayLike = w
    part: jax.Array = w[0]
    keys = {w: 1}
    print(np.asarray(w), anywhere, part, keys[w])


def messages_know_their_fields() -> None:
    feature = rx.train.Feature(int64_list=rx.train.Int64List(value=[1]))
    assert_type(feature.int64_list.value, list[int])
    example = rx.train.Example(features=rx.train.Features(feature={"x": feature}))
    assert_type(example.features.feature["x"], rx.train.Feature)


def options_know_their_fields(options: rx.data.Options) -> None:
    options.deterministic = True
    options.experimental_distribute.auto_shard_policy = rx.data.experimental.AutoShardPolicy.DATA


@rx.function
def doubled(x: jax.Array, *, times: int = 1) -> jax.Array:
    return x * 2 * times


@rx.function(input_signature=[rx.TensorSpec([2], "float32")], reduce_retracing=True)
def named(x: jax.Array) -> dict[str, jax.Array]:
    return {"x": x}


class Model:
    @rx.function
    def step(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * scale

    @rx.function()
    def losses(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, x


def a_function_keeps_its_signature(model: Model, x: jax.Array) -> None:
    assert_type(doubled(x), jax.Array)
    assert_type(doubled(x, times=3), jax.Array)
    assert_type(doubled.experimental_get_tracing_count(), int)
    assert_type(named(x), dict[str, jax.Array])
    assert_type(model.step(x), jax.Array)
    assert_type(model.step(x, scale=2.0), jax.Array)
    assert_type(model.losses(x), tuple[jax.Array, jax.Array])
    assert_type(rx.function(lambda: jnp.ones(2))(), jax.Array)
    assert_type(Model.step(model, x), jax.Array)


def a_scope_is_of_its_strategy() -> None:
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope() as entered:
        assert_type(entered, rx.distribute.MirroredStrategy)
    assert_type(rx.distribute.get_strategy(), rx.distribute.Strategy)
    assert_type(strategy.num_replicas_in_sync, int)
    assert_type(strategy.extended, rx.distribute.StrategyExtended)


def a_replica_knows_its_context(x: jax.Array) -> None:
    context = rx.distribute.get_replica_context()
    assert_type(context.num_replicas_in_sync, int | Any)
    assert_type(context.all_reduce("SUM", x), jax.Array | Any)
    if context is None:  # in cross-replica context; a replica function need not ask
        return
    if isinstance(context, rx.distribute.ReplicaContext):
        assert_type(context.all_reduce("SUM", x), jax.Array)
        assert_type(context.all_reduce(rx.distribute.ReduceOp.MEAN, {"x": x}), dict[str, jax.Array])
        assert_type(context.all_gather(x, axis=0), jax.Array)


def a_run_keeps_the_type_of_the_result(strategy: rx.distribute.Strategy, model: Model) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return x.sum()

    def pair(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, x

    def nothing() -> None: ...

    def number() -> float:
        return 1.0

    def unknown(x: Any) -> Any:
        return x

    per_replica = strategy.run(loss, args=(1.0,))
    assert_type(per_replica, rx.distribute.PerReplica[jax.Array] | jax.Array)
    assert_type(strategy.reduce("SUM", per_replica, axis=None), jax.Array)
    assert_type(strategy.gather(per_replica, axis=0), jax.Array)
    assert_type(strategy.experimental_local_results(per_replica), tuple[jax.Array, ...])
    first, second = strategy.run(pair)
    assert_type(strategy.reduce("SUM", first, axis=0), jax.Array)
    assert_type(strategy.reduce("SUM", second, axis=0), jax.Array)
    assert_type(strategy.reduce("MEAN", strategy.run(pair), axis=None), tuple[jax.Array, jax.Array])
    assert_type(strategy.reduce("MEAN", strategy.run(named), axis=None), dict[str, jax.Array])
    assert_type(strategy.reduce("MEAN", strategy.run(doubled), axis=None), jax.Array)
    assert_type(strategy.reduce("MEAN", strategy.run(model.step), axis=None), jax.Array)
    strategy.run(nothing)
    assert_type(strategy.run(number), Any)
    assert_type(strategy.run(unknown), Any)
    assert_type(strategy.run(lambda x: x), Any)
    assert_type(strategy.reduce("MEAN", strategy.run(unknown), axis=None), Any)


def metrics_are_arrays() -> None:
    assert_type(rx.metrics.Mean().result(), jax.Array)
    assert_type(rx.metrics.RootMeanSquaredError().result(), jax.Array)


def per_replica_values_know_their_components(strategy: rx.distribute.Strategy) -> None:
    ids = rx.distribute.PerReplica([1, 2])
    assert_type(ids, rx.distribute.PerReplica[int])
    assert_type(ids.values, tuple[int, ...])
    assert_type(strategy.experimental_local_results(ids), tuple[int, ...])

    def ones(context: rx.distribute.experimental.ValueContext) -> jax.Array:
        return jnp.ones(context.num_replicas_in_sync)

    made = strategy.experimental_distribute_values_from_function(ones)
    assert_type(strategy.reduce("SUM", made, axis=None), jax.Array)
    either: rx.distribute.DistributedValues[int] = ids
    bare: rx.distribute.PerReplica = ids
    print(either, bare)


def datasets_know_the_form_of_their_elements(
    x: npt.NDArray[np.float32], y: npt.NDArray[np.int64], names: npt.NDArray[np.str_], untyped: Any
) -> None:
    def scaled(x: Any, y: Any) -> tuple[jax.Array, int]:
        return jnp.asarray(x / 2), int(y)

    def files(name: Any) -> rx.data.Dataset[bytes]:
        return rx.data.TFRecordDataset(name)

    pairs = rx.data.Dataset.from_tensor_slices((x, y)).shuffle(8).batch(4).repeat().prefetch(2)
    assert_type(pairs, rx.data.Dataset[tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]])
    for image, label in pairs:
        print(image.shape, label.dtype)
    assert_type(rx.data.Dataset.zip(pairs, pairs).take(1).map(scaled), Scaled)
    assert_type(pairs.flat_map(files), rx.data.Dataset[bytes])
    numbers = rx.data.Dataset.range(3)
    draws = rx.data.Dataset.random(seed=1)
    assert_type(rx.data.Dataset.zip(draws, draws), rx.data.Dataset[tuple[np.int64, np.int64]])
    assert_type(rx.data.Dataset.zip((draws, draws)), rx.data.Dataset[tuple[np.int64, np.int64]])
    assert_type(numbers.enumerate().filter(bool).with_options(rx.data.Options()), Numbered)
    assert_type(numbers.map(lambda n: n * 2), rx.data.Dataset[Any])
    assert_type(rx.data.Dataset.from_tensor_slices(untyped).batch(4), rx.data.Dataset[Any])
    for name in rx.data.Dataset.from_tensor_slices(names):
        assert_type(name, Any)


def a_distributed_dataset_gives_its_elements(
    strategy: rx.distribute.MirroredStrategy,
    x: npt.NDArray[np.float32],
    y: npt.NDArray[np.int64],
    untyped: Any,
) -> None:
    dataset = rx.data.Dataset.from_tensor_slices((x, y)).batch(4)
    for images, labels in strategy.experimental_distribute_dataset(dataset):
        assert_type(images, rx.distribute.PerReplica[jax.Array] | jax.Array)
        assert_type(strategy.reduce("SUM", labels, axis=0), jax.Array)
        assert_type(strategy.experimental_local_results(images), tuple[jax.Array, ...])
    named = rx.data.Dataset.from_tensor_slices({"x": x, "z": x}).batch(4)
    batch: dict[str, rx.distribute.PerReplica[jax.Array] | jax.Array]
    batch = next(iter(strategy.experimental_distribute_dataset(named)))
    assert_type(strategy.reduce("SUM", batch["x"], axis=0), jax.Array)

    def made(context: rx.distribute.InputContext) -> rx.data.Dataset[npt.NDArray[np.float32]]:
        return rx.data.Dataset.from_tensor_slices(x).batch(context.get_per_replica_batch_size(4))

    for part in strategy.distribute_datasets_from_function(made):
        assert_type(part, rx.distribute.PerReplica[jax.Array] | jax.Array)

    def fields(x: Any, y: Any) -> Pair:
        return Pair(x, y)

    for pair in strategy.experimental_distribute_dataset(dataset.map(fields)):
        print(pair.image, pair.label)  # the class of a named tuple is kept
    for known in (untyped, x, [x], rx.data.Dataset.from_tensor_slices([1, 2]).batch(2)):
        distributed = strategy.experimental_distribute_dataset(known)
        assert_type(distributed, rx.distribute.DistributedDataset[Any])
        for element in distributed:
            assert_type(element, Any)
    annotated: rx.distribute.DistributedDataset[rx.distribute.PerReplica[jax.Array]]
    annotated = strategy.experimental_distribute_dataset(untyped)
    assert_type(next(iter(annotated)), rx.distribute.PerReplica[jax.Array])
