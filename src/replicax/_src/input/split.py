"""Splitting a stream of batches into steps with a part for each replica of this process.

There are two rules, both TensorFlow's. *By batch*: each global batch is split separately into
chunks of `ceil(size / replicas)` rows. *By stream*: the rows of all batches form one stream, which
is split into the chunk sizes of a full batch, across batch boundaries.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.base.types import TensorSpec
from replicax._src.data.optional import Failed
from replicax._src.topology.mesh import Topology


@dataclass(frozen=True)
class Share:
    """The replicas of this process among those of all workers.

    Attributes:
        workers: The number of workers.
        worker: The index of this worker.
        replicas: The number of replicas of each worker.
        in_order: Whether replica i gets chunk i of a batch; otherwise workers take chunks in turn,
            as in TensorFlow.
    """

    workers: int
    worker: int
    replicas: int
    in_order: bool = False

    @classmethod
    def of(cls, topology: Topology, *, in_order: bool = False) -> "Share":
        """Return this process's share of the replicas of `topology`."""
        replicas = len(topology.local_replicas)
        workers, worker = topology.num_replicas // replicas, topology.local_replicas[0] // replicas
        return cls(workers, worker, replicas, in_order)

    @property
    def total(self) -> int:
        """The number of replicas of all workers."""
        return self.workers * self.replicas

    @property
    def chunks(self) -> list[int]:
        """The indices of the chunks of a batch for the replicas of this process."""
        numbers = range(self.replicas)
        if self.in_order:
            return [self.worker * self.replicas + i for i in numbers]
        return [i * self.workers + self.worker for i in numbers]


@dataclass(frozen=True)
class HostStep:
    """One step's data on the host, in one of two forms.

    Attributes:
        even: A pytree of arrays with a leading replica axis, if all parts have the same shapes.
        parts: A pytree for each replica, otherwise.
    """

    even: Any = None
    parts: tuple[Any, ...] = ()

    def pieces(self, replicas: int) -> tuple[Any, ...]:
        """Return a pytree for each of `replicas` replicas."""
        if self.parts:
            return self.parts
        return tuple(jax.tree.map(lambda x, i=i: x[i], self.even) for i in range(replicas))


Step = HostStep | Failed


def catch_failures(items: Iterable[Any]) -> Iterator[Any]:
    """Yield each item, or `Failed(error)` if producing it raised, and continue."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            item = Failed(error)
        yield item
        del item  # otherwise this frame would keep a batch alive while it makes the next


def skip_items(steps: Iterator[Any], count: int) -> Iterator[Any]:
    """Advance the iterator by `count` items and return it.

    Raises:
        InvalidArgumentError: If there are fewer items.
    """
    done = sum(1 for _ in itertools.islice(steps, count))
    if done < count:
        raise InvalidArgumentError(
            f"The state stands after {count} steps, but there are only {done} now: the data have"
            " changed."
        )
    return steps


class Grouped:
    """An iterator that concatenates consecutive batches.

    A batch that fails raises once; those before it remain for the next call.

    Args:
        batches: The batches.
        size: How many make one.
        first: How many make each of the first ones, if other numbers.
    """

    def __init__(self, batches: Iterable[Any], size: int, first: Sequence[int] = ()) -> None:
        self._batches = iter(batches)
        self._sizes = itertools.chain(first, itertools.repeat(size))
        self._next = next(self._sizes)
        self._group: list[Any] = []

    def __iter__(self) -> "Grouped":
        return self

    def __next__(self) -> Any:
        while len(self._group) < self._next:
            batch = next(self._batches, self)
            if batch is self:
                break
            self._group.append(batch)
        if not self._group:
            raise StopIteration
        group, self._group, self._next = self._group, [], next(self._sizes)
        if len(group) == 1:
            return group[0]
        for batch in group:
            _rows(batch)  # raises for what has no rows
        return jax.tree.map(lambda *parts: np.concatenate(parts), *group)


def whole_elements(elements: Iterable[Any]) -> Iterator[Step]:
    """Yield each element as a step of one replica."""
    for element in catch_failures(elements):
        yield element if isinstance(element, Failed) else HostStep(parts=(element,))


def split_batches(batches: Iterable[Any], share: Share, *, shared: bool = True) -> Iterator[Step]:
    """Split each batch separately.

    Args:
        batches: The batches that this worker reads.
        share: The replicas of this worker among all.
        shared: Whether all workers read the same batches and each takes its chunks; otherwise this
            worker takes all chunks, over several steps.
    """
    for batch in catch_failures(batches):
        if isinstance(batch, Failed):
            yield batch
            continue
        rows = _rows(batch)
        size = -(-rows // share.total)
        for mine in _chunk_indices(share, shared=shared):
            # All workers must decide alike whether the parts are even: check the last chunk of all.
            last = mine[-1] if share.workers == 1 or not shared else share.total - 1
            if (last + 1) * size <= rows:
                yield HostStep(even=jax.tree.map(lambda x: _stacked(x, mine, size, share), batch))  # noqa: B023
            else:
                parts = [_cut(batch, j * size, (j + 1) * size) for j in mine]
                yield _step(parts) if share.workers == 1 else HostStep(parts=tuple(parts))


def split_stream(
    batches: Iterable[Any], share: Share, batch_size: int, empty: Callable[[], Any]
) -> Iterator[Step]:
    """Split the stream of rows into chunks of the sizes that a full batch would be split into.

    Args:
        batches: The batches that this worker reads.
        share: The replicas of this worker among all.
        batch_size: The number of rows of a full batch.
        empty: Returns an empty batch, for replicas whose chunk size is 0.
    """
    small, larger = divmod(batch_size, share.total)
    if small and not larger:
        yield from _equal_shares(_Rows(batches), share.replicas, small)
        return
    sizes = [small + 1] * larger + [small] * (share.total - larger)
    first = share.worker * share.replicas
    source = _Rows(batches)
    step: list[Any] = []
    for size in itertools.cycle(sizes[first:] + sizes[:first]):
        # Only a read detects the end of the stream: a chunk size of 0 does not end the loop.
        while isinstance(chunk := source.read(size) if size else empty(), Failed):
            yield chunk
        if chunk is None:
            break
        step.append(chunk)
        if len(step) == share.replicas:
            yield _step(step)
            step = []
        if _rows(chunk) < size:
            break
    if step:
        yield _step(_pad_with_empty(step, share.replicas))


def _equal_shares(source: "_Rows", replicas: int, size: int) -> Iterator[Step]:
    """Split the stream into equal chunks: read the rows of a step at once and reshape them."""
    while (rows := source.read(replicas * size)) is not None:
        if isinstance(rows, Failed):
            yield rows
            continue
        count = _rows(rows)
        is_full = all(len(x) == replicas * size for x in jax.tree.leaves(rows))
        if is_full and replicas > 1:
            yield HostStep(even=jax.tree.map(lambda x: _by_replica(x, replicas, size), rows))
            del rows  # lets the next batch reuse its buffer
            continue
        chunks = [_cut(rows, start, start + size) for start in range(0, max(count, 1), size)]
        yield _step(_pad_with_empty(chunks, replicas))
        if count < replicas * size:
            return


def deal(elements: Iterable[Any], replicas: int, *, drop: Callable[[], bool]) -> Iterator[Step]:
    """Group consecutive elements into steps of one element for each replica.

    Args:
        elements: The elements of a dataset function's dataset.
        replicas: The number of replicas.
        drop: Returns whether to drop an incomplete last step instead of padding it with empty
            parts; called only if there is such a step.
    """
    step: list[Any] = []
    for element in catch_failures(elements):
        if isinstance(element, Failed):
            yield element
            continue
        step.append(element)
        if len(step) == replicas:
            yield _step(step)
            step = []
    if step and not drop():
        yield _step(_pad_with_empty(step, replicas))


class _Rows:
    """A stream of batches that is read by number of rows."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = catch_failures(batches)
        self._left: Any = None
        self._pending: list[Any] = []  # rows read before a batch that failed

    def read(self, count: int) -> Any:
        """Return the next `count` rows, fewer at the end of the stream, or None at the end.

        Return `Failed` once for a batch that raised; rows read before it remain for the next call.
        """
        taken, self._pending = self._pending, []
        count -= sum(_rows(part) for part in taken)
        while count and (batch := self._next()) is not None:
            if isinstance(batch, Failed):
                self._pending = taken
                return batch
            rows = _rows(batch)
            is_more = rows > count
            taken.append(_cut(batch, 0, count) if is_more else batch)
            self._left = _cut(batch, count, rows) if is_more else None
            count -= min(rows, count)
        if not taken:
            return None
        if len(taken) == 1:
            return taken[0]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *taken)

    def _next(self) -> Any:
        left, self._left = self._left, None
        if left is not None:
            return left
        return next(self._batches, None)


def _rows(batch: Any) -> int:
    """Return the number of rows of a batch; raise if it cannot be split over replicas."""
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: getattr(x, "is_uneven", False))
    for leaf in leaves:
        if getattr(leaf, "is_uneven", False):
            kind = type(leaf).__name__
            dense = "to_tensor" if "Ragged" in kind else "to_dense"
            raise TypeError(
                f"A batch has a {kind} in it, whose rows cannot be divided over replicas. Make it"
                f" an array in a `map` before: `x.{dense}()`."
            )
        if hasattr(leaf, "__dataclass_fields__") or hasattr(leaf, "__attrs_attrs__"):
            kind = type(leaf).__name__
            raise TypeError(
                f"A batch has a {kind} in it, and JAX does not know the parts of that class:"
                f" register it with `jax.tree_util.register_dataclass({kind})` (for attrs classes"
                " `register_pytree_node`), or make a dict or a named tuple of it with `map`."
            )
    if not leaves or any(np.ndim(x) == 0 for x in leaves):
        raise ValueError(
            "The dataset gives single elements, which cannot be divided over replicas. Batch it by"
            " the global batch size first: `dataset.batch(global_batch_size)`."
        )
    if any(len(x) != len(leaves[0]) for x in leaves):
        raise ValueError(
            f"The parts of a batch have first axes of different sizes: {[len(x) for x in leaves]}."
            " Each replica takes the same rows of every part, so all must be equally long. If the"
            " dataset gives single examples, batch it: `dataset.batch(global_batch_size)`."
        )
    return len(leaves[0])


def _chunk_indices(share: Share, *, shared: bool) -> list[list[int]]:
    """Return the indices of the chunks that this worker takes, one list for each step."""
    if shared:
        return [share.chunks]
    numbers = range(share.total)
    return [list(numbers[i : i + share.replicas]) for i in numbers[:: share.replicas]]


def _stacked(x: np.ndarray, mine: Sequence[int], size: int, share: Share) -> np.ndarray:
    """Return the chunks `mine` of an array, stacked; a reshape if they are all of it."""
    if share.workers == 1:
        return _by_replica(x, share.replicas, size)
    return np.stack([x[j * size : (j + 1) * size] for j in mine])


def _by_replica(x: np.ndarray, replicas: int, size: int) -> np.ndarray:
    return x.reshape(replicas, size, *x.shape[1:])


def _cut(batch: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[start:stop], batch)


def _step(parts: Sequence[Any]) -> HostStep:
    """Return a step of `parts`, stacked if they have the same shapes."""
    shapes = [[np.shape(x) for x in jax.tree.leaves(p)] for p in parts]
    if all(s == shapes[0] for s in shapes) and len(parts) > 1:
        return stack_parts(parts)
    return HostStep(parts=tuple(parts))


def stack_parts(parts: Sequence[Any]) -> HostStep:
    """Return a step with the stacked parts, which must have the same shapes."""
    return HostStep(even=jax.tree.map(lambda *xs: np.stack(xs), *parts))


def _pad_with_empty(step: Sequence[Any], replicas: int) -> list[Any]:
    """Return `step` with empty parts added up to the number of replicas."""
    return [*step, *([empty_like(step[0])] * (replicas - len(step)))]


def empty_like(part: Any) -> Any:
    """Return a part without rows, in the structure of `part`."""
    return jax.tree.map(_empty_array, part)


def empty_batch(spec: Any) -> Any:
    """Return a batch without rows that matches `spec`; unknown inner sizes become 0."""
    return jax.tree.map(
        lambda s: np.zeros((0, *(n or 0 for n in (s.shape or ())[1:])), s.dtype),
        spec,
        is_leaf=lambda s: isinstance(s, TensorSpec),
    )


def _empty_array(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return np.zeros((0, *array.shape[1:]), array.dtype)
