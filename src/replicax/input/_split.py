"""Split: this process's stream of batches -> steps with a part for each of its replicas.

Two rules, which are TensorFlow's. *By batch*: every global batch on its own, in chunks of
``ceil(size / replicas)`` until it runs out. *By stream*: chunks of the full batch's shares, across
the borders of batches, until the stream runs out.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from replicax._types import TensorSpec
from replicax.data._ahead import Failed
from replicax.data._errors import InvalidArgumentError
from replicax.topology._mesh import Topology


@dataclass(frozen=True)
class Share:
    """Which of the replicas of all workers are this process's.

    Attributes:
        workers: How many workers there are.
        worker: Which of them this is.
        replicas: How many replicas each of them has.
        in_order: Whether the replicas, in their order, get the chunks of a batch in theirs;
            otherwise the workers take chunks in turn, as TensorFlow's do.
    """

    workers: int
    worker: int
    replicas: int
    in_order: bool = False

    @classmethod
    def of(cls, topology: Topology, *, in_order: bool = False) -> "Share":
        """This process's share of the replicas of a topology."""
        replicas = len(topology.own)
        workers, worker = topology.num_replicas // replicas, topology.own[0] // replicas
        return cls(workers, worker, replicas, in_order)

    @property
    def total(self) -> int:
        """The replicas of all workers."""
        return self.workers * self.replicas

    @property
    def chunks(self) -> list[int]:
        """The numbers of the chunks of a batch that this process's replicas get."""
        numbers = range(self.replicas)
        if self.in_order:
            return [self.worker * self.replicas + i for i in numbers]
        return [i * self.workers + self.worker for i in numbers]


@dataclass(frozen=True)
class HostStep:
    """One step on the host.

    Attributes:
        even: If all parts have one shape: a structure of arrays with a row for each replica.
        parts: Otherwise: a structure for each replica.
    """

    even: Any = None
    parts: tuple[Any, ...] = ()

    def pieces(self, replicas: int) -> tuple[Any, ...]:
        """A structure for each replica."""
        if self.parts:
            return self.parts
        return tuple(jax.tree.map(lambda x, i=i: x[i], self.even) for i in range(replicas))


Step = HostStep | Failed


def attempts(items: Iterable[Any]) -> Iterator[Any]:
    """The items of an iterator, with a `Failed` for each that raises; it is asked on."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            item = Failed(error)
        yield item
        del item


def passed_over(steps: Iterator[Any], count: int) -> Iterator[Any]:
    """The iterator, ``count`` items further on.

    Raises:
        InvalidArgumentError: If it has fewer.
    """
    done = sum(1 for _ in itertools.islice(steps, count))
    if done < count:
        raise InvalidArgumentError(
            f"The state stands after {count} steps, but there are only {done} now: the data have"
            " changed."
        )
    return steps


def single(elements: Iterable[Any]) -> Iterator[Step]:
    """Every element whole, for one replica."""
    for element in attempts(elements):
        yield element if isinstance(element, Failed) else HostStep(parts=(element,))


def split_batches(batches: Iterable[Any], share: Share, *, shared: bool = True) -> Iterator[Step]:
    """Every batch on its own.

    Args:
        batches: The batches that this worker reads.
        share: Which chunks of a batch are whose.
        shared: Whether all workers read the same batches, and each takes its chunks of them;
            otherwise the chunks are all this worker's, over several steps.
    """
    for batch in attempts(batches):
        if isinstance(batch, Failed):
            yield batch
            continue
        rows = _rows(batch)
        size = -(-rows // share.total)
        for mine in _chunks(share, shared=shared):
            # With several workers, all must find the same, which looks at their chunks too.
            last = mine[-1] if share.workers == 1 or not shared else share.total - 1
            if (last + 1) * size <= rows:
                yield HostStep(even=jax.tree.map(lambda x: _stacked(x, mine, size, share), batch))  # noqa: B023
            else:
                parts = [_cut(batch, j * size, (j + 1) * size) for j in mine]
                yield _step(parts) if share.workers == 1 else HostStep(parts=tuple(parts))


def split_stream(
    batches: Iterable[Any], share: Share, batch_size: int, nothing: Callable[[], Any]
) -> Iterator[Step]:
    """Chunks of the stream, in the shares of a full batch.

    Args:
        batches: The batches that this worker reads.
        share: Which replicas it serves.
        batch_size: How many rows a full batch has.
        nothing: Makes a batch without rows, for shares that have none.
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
        # The end shows only when rows are asked for.
        while isinstance(chunk := source.take(size) if size else nothing(), Failed):
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
        yield _step(_filled(step, share.replicas))


def _equal_shares(source: "_Rows", replicas: int, size: int) -> Iterator[Step]:
    """The same where all chunks have one size: those of a step are taken at once, as they lie."""
    while (rows := source.take(replicas * size)) is not None:
        if isinstance(rows, Failed):
            yield rows
            continue
        count = _rows(rows)
        is_full = all(len(x) == replicas * size for x in jax.tree.leaves(rows))
        if is_full and replicas > 1:
            yield HostStep(even=jax.tree.map(lambda x: _in_shares(x, replicas, size), rows))
            del rows  # the next batch may take its memory
            continue
        chunks = [_cut(rows, start, start + size) for start in range(0, max(count, 1), size)]
        yield _step(_filled(chunks, replicas))
        if count < replicas * size:
            return


def deal(elements: Iterable[Any], replicas: int, *, drop: Callable[[], bool]) -> Iterator[Step]:
    """One element for each replica, in turn.

    Args:
        elements: What a dataset function's dataset gives.
        replicas: How many take one each.
        drop: Says whether a last step that cannot serve all is left out, rather than filled up
            with parts that have no rows; asked only if there is such a step.
    """
    step: list[Any] = []
    for element in attempts(elements):
        if isinstance(element, Failed):
            yield element
            continue
        step.append(element)
        if len(step) == replicas:
            yield _step(step)
            step = []
    if step and not drop():
        yield _step(_filled(step, replicas))


class _Rows:
    """A stream of batches, read by rows."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = attempts(batches)
        self._left: Any = None
        self._taken: list[Any] = []  # before a batch that failed

    def take(self, count: int) -> Any:
        """The next ``count`` rows, fewer at the end; None if there are none.

        Where a batch failed it says so, once; the rows before it stay for the next call.
        """
        taken, self._taken = self._taken, []
        count -= sum(_rows(part) for part in taken)
        while count and (batch := self._next()) is not None:
            if isinstance(batch, Failed):
                self._taken = taken
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
                f"A batch has a {kind} in it, and JAX does not know the parts of that class: tell"
                f" it with `jax.tree_util.register_dataclass({kind})` (for attrs classes"
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
            " Each replica takes the same rows of every part, so that all must be equally long."
        )
    return len(leaves[0])


def _chunks(share: Share, *, shared: bool) -> list[list[int]]:
    """The numbers of the chunks of a batch that this worker takes, step by step."""
    if shared:
        return [share.chunks]
    numbers = range(share.total)
    return [list(numbers[i : i + share.replicas]) for i in numbers[:: share.replicas]]


def _stacked(x: np.ndarray, mine: Sequence[int], size: int, share: Share) -> np.ndarray:
    if share.workers == 1:
        return _in_shares(x, share.replicas, size)
    return np.stack([x[j * size : (j + 1) * size] for j in mine])


def _in_shares(x: np.ndarray, replicas: int, size: int) -> np.ndarray:
    return x.reshape(replicas, size, *x.shape[1:])


def _cut(batch: Any, start: int, stop: int) -> Any:
    return jax.tree.map(lambda x: x[start:stop], batch)


def _step(parts: Sequence[Any]) -> HostStep:
    shapes = [[np.shape(x) for x in jax.tree.leaves(p)] for p in parts]
    if all(s == shapes[0] for s in shapes) and len(parts) > 1:
        return evened(parts)
    return HostStep(parts=tuple(parts))


def evened(parts: Sequence[Any]) -> HostStep:
    """Parts of one shape, as one step."""
    return HostStep(even=jax.tree.map(lambda *xs: np.stack(xs), *parts))


def _filled(step: Sequence[Any], replicas: int) -> list[Any]:
    return [*step, *([emptied(step[0])] * (replicas - len(step)))]


def emptied(part: Any) -> Any:
    """A part without rows, for the structure of one that has some."""
    return jax.tree.map(_without_rows, part)


def without_rows(spec: Any) -> Any:
    """A batch without rows, of a spec."""
    return jax.tree.map(
        lambda s: np.zeros((0, *(n or 0 for n in (s.shape or ())[1:])), s.dtype),
        spec,
        is_leaf=lambda s: isinstance(s, TensorSpec),
    )


def _without_rows(x: Any) -> np.ndarray:
    array = np.asarray(x)
    return np.zeros((0, *array.shape[1:]), array.dtype)
