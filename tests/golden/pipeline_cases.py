"""Small programs over datasets, written for TensorFlow and for replicax alike.

`ORDERS` are random: of their orders it is recorded which are equal. `ERRORS` fail on some elements:
of an iterator that goes on after an error it is recorded what it gives.
"""

import tempfile
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Library(NamedTuple):
    """What the programs are run with."""

    data: Any  # tf.data or rx.data
    io: Any
    set_seed: Callable[[int | None], None]
    fails: Callable[..., Any]  # numbers -> a function of a number that raises for those
    asks: Callable[..., Any]  # numbers -> the same, true for others
    number: Any  # the spec of a number


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


class _Make:
    """Shorthands for the programs that fail."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.data = library.data
        self.range = library.data.Dataset.range

    def bad(self, count: int, *at: int, **how: Any) -> Any:
        """Numbers below ``count``, of which some fail."""
        return self.range(count).map(self.library.fails(*at), **how)

    def choose(self, *datasets: Any) -> Any:
        choices = self.data.Dataset.from_tensor_slices(np.array([0, 1] * 4))
        return self.data.Dataset.choose_from_datasets(datasets, choices)

    def inner(self, count: int, *at: int) -> Any:
        """For each number, a dataset whose elements may fail."""
        fails = self.library.fails(*at)
        return lambda x: self.range(10 * x, 10 * x + count).map(fails)

    def made(self, *at: int) -> Any:
        """For each number, a dataset that cannot be made for some."""
        fails = self.library.fails(*at)
        return lambda x: self.range(10 * fails(x), 10 * x + 2)

    def generator(self, function: Any) -> Any:
        return self.data.Dataset.from_generator(function, output_signature=self.library.number)

    def records(self, *damages: str, **how: Any) -> Any:
        files = [_record_file(self.library, damage) for damage in damages]
        return self.data.TFRecordDataset(files, **how)


def _record_file(library: Library, damage: str) -> str:
    path = Path(tempfile.mkdtemp(), "a.tfrecord")
    with library.io.TFRecordWriter(str(path)) as writer:
        for k in range(5):
            writer.write(b"rec%d" % k)
    content = bytearray(path.read_bytes())
    second = 2 * (12 + 4 + 4)
    if damage != "cut":
        content[second + {"": 0, "data": 13, "length": 0, "checksum": 9}[damage]] ^= damage != ""
    path.write_bytes(content[:-6] if damage == "cut" else content)
    return str(path)


def _stops() -> Any:
    yield from (0, 1)
    raise ValueError("a generator that raises is finished")


class _GoesOn:
    """An iterator that raises for one element and has others after it."""

    def __init__(self) -> None:
        self._next = -1

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        self._next += 1
        if self._next == 5:
            raise StopIteration
        if self._next == 2:
            raise ValueError("two")
        return self._next


def _odd_type() -> Any:
    yield from (0, 1, "two", 3)


def _odd_shape() -> Any:
    yield from (0, 1, [2, 2], 3)


def _ranges(library: Library) -> Any:
    return lambda x: library.data.Dataset.range(10 * x, 10 * x + 2)


ERRORS: dict[str, Callable[[_Make], Any]] = {
    "map": lambda m: m.bad(8, 2, 5),
    "map, first and last": lambda m: m.bad(8, 0, 7),
    "map, all": lambda m: m.bad(3, 0, 1, 2),
    "map in threads": lambda m: m.bad(8, 2, 5, num_parallel_calls=2),
    "map, map": lambda m: m.bad(8, 2, 5).map(lambda x: x + 10),
    "map, map in threads": lambda m: m.bad(8, 2, 5).map(lambda x: x + 10, num_parallel_calls=2),
    "filter": lambda m: m.range(8).filter(m.library.asks(2, 5)),
    "take_while": lambda m: m.range(8).take_while(m.library.asks(2, 5)),
    "map, take_while": lambda m: m.bad(8, 1).take_while(lambda x: x < 3),
    "map, filter": lambda m: m.bad(8, 2, 5).filter(lambda x: x % 2 == 0),
    "take": lambda m: m.bad(8, 2, 5).take(4),
    "skip": lambda m: m.bad(8, 2, 5).skip(1),
    "shard, first": lambda m: m.bad(8, 2, 5).shard(2, 0),
    "shard, second": lambda m: m.bad(8, 2, 5).shard(2, 1),
    "enumerate": lambda m: m.bad(8, 2, 5).enumerate(),
    "zip, first": lambda m: m.data.Dataset.zip(m.bad(8, 2, 5), m.range(8)),
    "zip, second": lambda m: m.data.Dataset.zip(m.range(8), m.bad(8, 2, 5)),
    "zip, both": lambda m: m.data.Dataset.zip(m.bad(5, 1), m.bad(4, 2)),
    "zip, three": lambda m: m.data.Dataset.zip(m.range(5), m.bad(5, 1, 2), m.bad(5, 2, 3)),
    "zip, the short one first": lambda m: m.data.Dataset.zip(m.range(2), m.bad(5, 2)),
    "zip, the short one last": lambda m: m.data.Dataset.zip(m.bad(5, 2), m.range(2)),
    "concatenate": lambda m: m.bad(3, 1).concatenate(m.bad(3, 2)),
    "repeat": lambda m: m.bad(3, 1).repeat(2),
    "repeat, first": lambda m: m.bad(3, 0).repeat(2),
    "repeat, last": lambda m: m.bad(3, 2).repeat(2),
    "repeat of nothing": lambda m: m.bad(2, 0, 1).repeat(),
    "batch": lambda m: m.bad(8, 2, 5).batch(3),
    "batch, first": lambda m: m.bad(8, 0, 4).batch(3),
    "batch, two in one": lambda m: m.bad(8, 0, 1, 4).batch(3),
    "batch, the last": lambda m: m.bad(8, 7).batch(3),
    "batch, larger than all": lambda m: m.bad(8, 3).batch(8),
    "batch, remainder": lambda m: m.bad(8, 0, 4).batch(3, drop_remainder=True),
    "batch, map in threads": lambda m: m.bad(8, 0, 4, num_parallel_calls=2).batch(3),
    "padded_batch": lambda m: m.bad(8, 0, 4).padded_batch(3),
    "batch of filter": lambda m: m.range(8).filter(m.library.asks(0, 4)).batch(3),
    "batch of take": lambda m: m.bad(8, 0, 4).take(8).batch(3),
    "batch of repeat": lambda m: m.bad(4, 0).repeat(2).batch(3),
    "batch of prefetch": lambda m: m.bad(8, 0, 4).prefetch(2).batch(3),
    "batch of enumerate": lambda m: m.bad(8, 0, 4).enumerate().batch(3),
    "batch of batch": lambda m: m.bad(12, 0, 4).batch(2).batch(3),
    "batch of flat_map": lambda m: m.range(2).flat_map(m.inner(4, 0, 10)).batch(3),
    "batch of a generator": lambda m: m.generator(_GoesOn).batch(2),
    "batch of records": lambda m: m.records("data").batch(2),
    "unbatch": lambda m: m.bad(8, 2, 5).batch(3).unbatch(),
    "rebatch": lambda m: m.bad(12, 0, 4).batch(2).rebatch(3),
    "window": lambda m: m.bad(8, 2, 5).window(3).flat_map(lambda w: w.batch(3)),
    "window, by one": lambda m: m.bad(8, 0, 4).window(2, shift=1).flat_map(lambda w: w.batch(2)),
    "window, apart": lambda m: m.bad(12, 0, 4).window(2, shift=4).flat_map(lambda w: w.batch(2)),
    "window, with strides": lambda m: (
        m.bad(8, 0, 4)
        .window(2, shift=1, stride=2, drop_remainder=True)
        .flat_map(lambda w: w.batch(2))
    ),
    "prefetch": lambda m: m.bad(8, 2, 5).prefetch(2),
    "prefetch, all": lambda m: m.bad(4, 0, 1, 2, 3).prefetch(2),
    "prefetch of batch": lambda m: m.bad(8, 2, 5).batch(3).prefetch(2),
    "flat_map": lambda m: m.range(3).flat_map(m.inner(3, 1, 11)),
    "flat_map of an input that fails": lambda m: m.bad(4, 2).flat_map(_ranges(m.library)),
    "flat_map, not made": lambda m: m.range(4).flat_map(m.made(2)),
    "flat_map of generators": lambda m: m.range(2).flat_map(lambda _: m.generator(_stops)),
    "interleave": lambda m: m.range(3).interleave(m.inner(3, 1, 11), cycle_length=2),
    "interleave, all": lambda m: m.range(2).interleave(m.inner(2, 0, 1, 10, 11), cycle_length=2),
    "interleave, blocks": lambda m: m.range(3).interleave(
        m.inner(4, 1, 11), cycle_length=2, block_length=2
    ),
    "interleave, not made": lambda m: m.range(4).interleave(m.made(2), cycle_length=2),
    "interleave of an input that fails": lambda m: m.bad(4, 2).interleave(
        _ranges(m.library), cycle_length=2
    ),
    "interleave in threads": lambda m: m.range(3).interleave(
        m.inner(3, 1, 11), cycle_length=2, num_parallel_calls=2
    ),
    "interleave in threads, blocks": lambda m: m.range(3).interleave(
        m.inner(4, 1, 11), cycle_length=2, block_length=2, num_parallel_calls=2
    ),
    "shuffle of one": lambda m: m.bad(8, 2, 5).shuffle(1),
    "shuffle, repeat": lambda m: m.bad(3, 1).shuffle(1).repeat(2),
    "cache": lambda m: m.bad(8, 2, 5).cache().repeat(2),
    "choose": lambda m: m.choose(m.bad(4, 1), m.range(4)),
    "choose, both": lambda m: m.choose(m.bad(4, 0), m.bad(4, 0)),
    "scan": lambda m: m.bad(8, 2, 5).scan(np.int64(0), lambda s, x: (s + x, s)),
    "scan, its function": lambda m: m.range(8).scan(
        np.int64(0), lambda s, x: (s + m.library.fails(2, 5)(x), s)
    ),
    "unique": lambda m: m.bad(8, 2, 5).repeat(2).unique(),
    "ignore_errors": lambda m: m.bad(8, 2, 5).ignore_errors(),
    "ignore_errors of batch": lambda m: m.bad(8, 0, 4).batch(3).ignore_errors(),
    "group_by_window": lambda m: m.bad(8, 2, 5).group_by_window(
        lambda x: x % 2, lambda _, d: d.batch(2), window_size=2
    ),
    "group_by_window, its key": lambda m: m.range(8).group_by_window(
        lambda x: m.library.fails(2, 5)(x) % 2, lambda _, d: d.batch(2), window_size=2
    ),
    "group_by_window, in groups": lambda m: m.range(8).group_by_window(
        lambda x: x % 2, lambda _, d: d.map(m.library.fails(2, 5)), window_size=2
    ),
    "promised": lambda m: m.bad(8, 2, 5).apply(m.data.experimental.assert_cardinality(6)),
    "generator": lambda m: m.generator(_stops),
    "generator, repeat": lambda m: m.generator(_stops).repeat(2),
    "generator, prefetch": lambda m: m.generator(_stops).prefetch(2),
    "iterator": lambda m: m.generator(_GoesOn),
    "generator of another type": lambda m: m.generator(_odd_type),
    "generator of another shape": lambda m: m.generator(_odd_shape),
    "record, data": lambda m: m.records("data"),
    "record, length": lambda m: m.records("length"),
    "record, checksum": lambda m: m.records("checksum"),
    "record, cut off": lambda m: m.records("cut"),
    "records, data": lambda m: m.records("data", ""),
    "records, length": lambda m: m.records("length", ""),
    "records, cut off": lambda m: m.records("cut", ""),
    "records in turn": lambda m: m.records("data", "", num_parallel_reads=2),
}
_MOST_STEPS = 30


def plain(element: Any) -> Any:
    """An element as JSON has it."""
    if isinstance(element, tuple):
        return [plain(part) for part in element]
    if isinstance(element, bytes):
        return element.decode()
    array = np.asarray(element)
    return [plain(part) for part in array] if array.dtype == object else array.tolist()


def outcomes(
    iterator: Any, read: Callable[[Any], Any] = plain, most: int = _MOST_STEPS
) -> list[Any]:
    """What an iterator gives that goes on after each error, to its end."""
    found: list[Any] = []
    for _ in range(most):
        try:
            found.append(read(next(iterator)))
        except StopIteration:
            return [*found, "end"]
        except Exception:
            found.append("error")
    return found


def errors(library: Library, name: str) -> list[Any]:
    """What the iterator of a program gives."""
    return outcomes(ERRORS[name](_Make(library)).as_numpy_iterator())
