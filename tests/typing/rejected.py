"""Lines that are wrong: both checkers reject each that is marked, and no other."""

import jax.numpy as jnp

import replicax as rx


def names() -> None:
    from replicax.distribute import MirorredStrategy  # wrong

    print(MirorredStrategy, rx.data.Datset)  # wrong
    rx.Varable(1.0)  # wrong


def variables(w: rx.Variable) -> None:
    rx.Variable(1.0, trainabel=False)  # wrong
    w.asign(1.0)  # wrong
    w.assign()  # wrong
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
