"""Small programs over datasets, written for TensorFlow and for replicax alike.

`ORDERS` are random: of their orders it is recorded which are equal. `ERRORS` fail on some elements:
of an iterator that goes on after an error it is recorded what it gives.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple


class Library(NamedTuple):
    """What the programs are run with."""

    data: Any  # tf.data or rx.data
    set_seed: Callable[[int | None], None]


def names(orders: list[list[Any]]) -> str:
    """A letter for each order; equal orders have the same."""
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return "".join(letters[orders.index(order)] for order in orders)


def _parts(dataset: Any, count: int, passes: int = 2) -> list[list[int]]:
    """The passes over a dataset, each cut into ``count`` parts of equal length."""
    orders = []
    for _ in range(passes):
        whole = [int(x) for x in dataset.as_numpy_iterator()]
        size = len(whole) // count
        orders += [whole[i * size : (i + 1) * size] for i in range(count)]
    return orders


def _shuffle(library: Library, seed: int | None, again: bool | None) -> Any:
    return library.data.Dataset.range(20).shuffle(20, seed=seed, reshuffle_each_iteration=again)


def _sample(library: Library, seed: int | None, again: bool | None) -> Any:
    sources = [library.data.Dataset.range(20), library.data.Dataset.range(100, 120)]
    return library.data.Dataset.sample_from_datasets(
        sources, seed=seed, rerandomize_each_iteration=again
    )


def _two(library: Library, make: Any, *how: Any) -> list[Any]:
    return _parts(make(library, *how), 1) + _parts(make(library, *how), 1)


def _repeated(library: Library, make: Any, *how: Any) -> list[Any]:
    return _parts(make(library, *how).repeat(2), 2)


def _made_inside(library: Library, make: Any, *how: Any) -> list[Any]:
    numbers = library.data.Dataset.range(3)
    return _parts(numbers.flat_map(lambda _: make(library, *how)), 3)


def _made_outside(library: Library, make: Any, *how: Any) -> list[Any]:
    inner = make(library, *how)
    return _parts(library.data.Dataset.range(3).flat_map(lambda _: inner), 3)


def _concatenated(library: Library, make: Any, *how: Any) -> list[Any]:
    dataset = make(library, *how)
    return _parts(dataset.concatenate(dataset), 2)


def _cached(library: Library, make: Any, *how: Any) -> list[Any]:
    return _parts(make(library, *how).cache(), 1)


_PROGRAMS = (_two, _repeated, _made_inside, _made_outside, _concatenated, _cached)

ORDERS = {
    f"{program.__name__[1:]} {make.__name__[1:]}, seed {how[0]}, again {how[1]}": (
        program,
        make,
        *how,
    )
    for program, make, *how in product(
        _PROGRAMS, (_shuffle, _sample), (None, 3), (None, True, False)
    )
}


def orders(library: Library, name: str, global_seed: int | None) -> str:
    """Which orders are equal when a program runs twice, and with another global seed."""
    program, *how = ORDERS[name]
    found = []
    for seed in (global_seed, global_seed, None if global_seed is None else global_seed + 1):
        library.set_seed(seed)
        found += program(library, *how)
    library.set_seed(None)
    return names(found)
