"""Lines that are wrong: both checkers reject each that is marked, and no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import replicax as rx


def names() -> None:
    from replicax.distribute import MirorredStrategy  # wrong

    print(MirorredStrategy, rx.data.Datset)  # wrong
    rx.Varable(1.0)  # wrong


def variables(w: rx.Variable) -> None:
    rx.Variable(1.0, trainabel=False)  # wrong
    w.asign(1.0)  # wrong
    w.assign()  # wrong
    w.assign("1")  # wrong
    w.assign_add("1")  # wrong
    w.assign(1.0, 2.0, 3.0, 4.0, 5.0)  # wrong
    w + "1"  # wrong
    jnp.sum(w, axs=0)  # wrong


def options(given: rx.data.Options) -> None:
    given.determinstic = True  # wrong
    given.deterministic = "yes"  # wrong
    given.threading.privat_threadpool_size = 1  # wrong


def messages(feature: rx.train.Feature) -> None:
    rx.train.Feature(int64_lst=rx.train.Int64List(value=[1]))  # wrong
    rx.train.Int64List(value=["a"])  # wrong
    feature.int64_list = rx.train.Int64List()  # wrong


def datasets(strategy: rx.distribute.Strategy, x: npt.NDArray[np.float32], untyped: Any) -> None:
    dataset = rx.data.Dataset.from_tensor_slices((x, x)).shuffle(8).batch(4)
    for image, label in dataset:
        print(image.shpe, label.dtype)  # wrong
    for images, _labels in strategy.experimental_distribute_dataset(dataset):
        images.vlues  # wrong
    for _images, _labels, _weights in strategy.experimental_distribute_dataset(dataset):  # wrong
        break
    dataset.batch("4")  # wrong
    dataset.map(3)  # wrong
    dataset.flat_map(int)  # wrong
    rx.data.Dataset.from_tensor_slices(untyped).bach(4)  # wrong
    strategy.experimental_distribute_dataset(untyped).elemnt_spec  # wrong
    strategy.experimental_distribute_dataset(dataset.bath(4))  # wrong
    iter(dataset).save_stat()  # wrong
    iter(rx.data.Dataset.from_tensor_slices(untyped)).save_stat()  # wrong
    wrong: rx.data.Dataset[bytes] = rx.data.Dataset.range(3)  # wrong
    print(wrong)


@rx.function
def doubled(x: jax.Array, *, times: int = 1) -> jax.Array:
    return x * 2 * times


class Model:
    @rx.function
    def step(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * scale


def functions(model: Model, x: jax.Array) -> None:
    doubled()  # wrong
    doubled(x, tims=2)  # wrong
    doubled(x, times="2")  # wrong
    doubled.get_concrete_functon(x)  # wrong
    model.step()  # wrong
    model.step(x, "1")  # wrong
    model.stp(x)  # wrong
    model.step.get_concrete_functon(x)  # wrong
    rx.function(jit_compil=True)  # wrong
    rx.function(doubled, input_signture=[])  # wrong
    rx.function(3)  # wrong
    doubled(x).sm()  # wrong


def strategies(strategy: rx.distribute.MirroredStrategy, x: jax.Array) -> None:
    with strategy.scope() as entered:
        entered.num_replicas_in_sinc  # wrong
    strategy.run(doubled, arg=(x,))  # wrong
    strategy.run(3)  # wrong
    strategy.run(doubled, x)  # wrong
    strategy.run(doubled, args=(x,)).reduce  # wrong
    strategy.reduce("SUM", x)  # wrong
    strategy.reduce("SUM", strategy.run(doubled), axis=None).sm()  # wrong
    rx.distribute.get_strategy().nothing  # wrong
    rx.distribute.get_replica_context().all_reduc("SUM", x)  # wrong
    rx.distribute.PerReplica([1]).vlues  # wrong
    rx.distribute.MirroredStrategy(device=["CPU:0"])  # wrong
    rx.distribute.MirroredStrategy("CPU:0")  # wrong
    rx.distribute.MirroredStrategy(variable_policy="shard")  # wrong
    rx.distribute.MultiWorkerMirroredStrategy(variable_policy="shard")  # wrong
    strategy.reduce("AVG", x, axis=None)  # wrong
    rx.distribute.get_replica_context().all_reduce("AVG", x)  # wrong
    strategy.experimental_distribute_dataset(x).map(print)  # wrong
