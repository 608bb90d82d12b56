"""One pass over a dataset, element by element, that can be stopped and continued elsewhere."""

import sys
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Iterator as AnyIterator
from itertools import zip_longest
from operator import length_hint
from typing import Any, Generic, TypeVar, overload

import numpy.typing as npt

from replicax._basics import NamedFields, Numbers, T_co
from replicax._jax_private import at_rest, traced
from replicax.data._ahead import Ahead, Failed, around, as_state, counted, is_driven, is_plain
from replicax.data._blocks import NewArray
from replicax.data._errors import EndOfSequenceError, InvalidArgumentError
from replicax.data._node import Node, Stream, pass_over, walk
from replicax.data._nodes._batch import ends_in_batches
from replicax.data._seeds import Origin, Run, Seeds

_ROWS_AHEAD = 256
_STATE_VERSION = 3
_PATIENCE = 1.0  # seconds that `close` waits for another thread's element
_FROM = " < "

K = TypeVar("K")
# On the host numbers are NumPy's: arrays, and scalars where they have no axis. Checkers know the
# members of arrays, and let pass what is true of scalars only.
OnHost = npt.NDArray[Any] | Any


class DatasetIterator(Ahead, Generic[T_co]):
    """Elements of a dataset in order; made by ``iter(dataset)``.

    An element that cannot be made raises, and the next call goes on with what follows it, as in
    TensorFlow. Threads that read ahead end with the iterator: at the end of the dataset, by
    `close`, or when the iterator is garbage collected.

    Example:
        >>> iterator = iter(rx.data.Dataset.range(3))
        >>> int(next(iterator))
        0
    """

    def __init__(self, node: Node, new: NewArray | None = None) -> None:
        Ahead.__init__(self)
        self._node = node
        self._new = new if ends_in_batches(node) else None
        self._random = _random_nodes(node)
        self._origins = [seeds.begin() for seeds in self._random]
        self._limit = 1 if node.calls_user_code else _ROWS_AHEAD
        self._stream: Stream | None = None
        self._ready: AnyIterator[Any] = iter(())  # of a list: asking it is one step for threads
        self._num_ready = 0  # elements that `_ready` had, and that `_position` does not count
        self._is_done = False

    def __iter__(self) -> "DatasetIterator[T_co]":
        if not is_plain():
            around.loop()
        return self

    @overload
    def __next__(self: "DatasetIterator[NamedFields]") -> Any: ...

    @overload
    def __next__(self: "DatasetIterator[Numbers]") -> OnHost: ...

    @overload
    def __next__(self: "DatasetIterator[tuple[Numbers, Numbers]]") -> tuple[OnHost, OnHost]: ...

    @overload
    def __next__(
        self: "DatasetIterator[tuple[Numbers, Numbers, Numbers]]",
    ) -> tuple[OnHost, OnHost, OnHost]: ...

    @overload
    def __next__(self: "DatasetIterator[Mapping[K, Numbers]]") -> dict[K, OnHost]: ...

    @overload
    def __next__(self: "DatasetIterator[Any]") -> Any: ...

    def __next__(self) -> Any:
        if traced.value is not at_rest or is_driven():
            return around.take(self)
        if not self._peeked:
            for element in self._ready:  # most elements come this way: without a call or a lock
                return element
        return self.take()

    @property
    def origin(self) -> Node:
        """The end of the pipeline."""
        return self._node

    def take(self) -> Any:
        """The next element, in plain code."""
        with self.lock:
            if self._peeked:
                return Ahead.take(self)
            element = self._fetch()
            if type(element) is Failed:
                self._errors += 1
                element.settle()
            self._position += 1
            return element

    def _fetch(self) -> Any:
        for element in self._ready:
            self._num_ready -= 1
            return element
        if self._stream is None or self._is_done:
            self._begin()
            assert self._stream is not None
        try:
            block = self._stream.pull(self._limit)
            elements = None if block is None else block.elements()
        except Exception as error:
            return Failed(error)
        except BaseException:
            # An interrupt, in the middle of anything: the next call comes here from the start.
            self._stop()
            raise
        if elements is None or self._is_done:  # another thread may have closed it meanwhile
            self._is_done = True
            self._begin()
        assert elements is not None
        if self._limit == 1:
            return elements[0]
        self._position += self._num_ready  # all of which were taken without the lock
        self._num_ready = len(elements) - 1
        ready = iter(elements)
        element = next(ready)
        self._ready = ready
        return element

    def _count_taken(self) -> None:
        """Count those elements of `_ready` that were taken without the lock."""
        taken = self._num_ready - length_hint(self._ready)
        self._num_ready -= taken
        self._position += taken

    @property
    def element_spec(self) -> Any:
        """The spec of the elements.

        Example:
            >>> iter(rx.data.Dataset.range(3)).element_spec
            TensorSpec(shape=(), dtype=dtype('int64'), name=None)
        """
        return self._node.element_spec

    def save_state(self) -> dict[str, Any]:
        """Where this iterator stands: a small dict that JSON can hold.

        It has the number of elements given so far and the seeds, drawn ones too. Continuing is
        exact with `shuffle` and `repeat`; it reads again what must be read (files up to the place,
        generators from their start), and calls no `map` function for elements that are passed.

        Returns:
            The state, for `restore_state` of an iterator over the same pipeline.

        Example:
            >>> dataset = rx.data.Dataset.range(10).shuffle(10).repeat(2)
            >>> iterator = iter(dataset)
            >>> _ = [next(iterator) for _ in range(7)]
            >>> state = iterator.save_state()
            >>> rest = list(iterator)
            >>> again = iter(dataset)
            >>> again.restore_state(state)
            >>> list(again) == rest
            True
        """
        graph = _describe(self._node)
        with self.lock:
            self._count_taken()
            return {
                "version": _STATE_VERSION,
                "position": self._position,
                "errors": self._errors,
                "seeds": [list(origin) for origin in self._origins],
                "graph": graph,
            }

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go to the place that `save_state` described.

        Passes over the dataset that begin later have the orders that would have followed there.
        The pipeline must have the same transformations, and those that put elements together or
        take them in turn the same sizes; what functions and files hold is not compared.

        Args:
            state: What `save_state` returned, also of another process.

        Raises:
            InvalidArgumentError: The state belongs to another pipeline, or is none.

        Example:
            >>> iterator = iter(rx.data.Dataset.range(10))
            >>> iterator.restore_state({**iterator.save_state(), "position": 8})
            >>> [int(x) for x in iterator]
            [8, 9]
        """
        graph = _describe(self._node)
        told = as_state(state)
        if told.get("version") != _STATE_VERSION:
            raise InvalidArgumentError(
                f"This state is of version {told.get('version')!r:.20}, and this replicax reads"
                f" those of version {_STATE_VERSION}. Begin a new pass with `iter(dataset)`."
            )
        if told.get("graph") != graph:
            there, here = _difference(str(told.get("graph")), graph)
            raise InvalidArgumentError(
                f"This state was saved by another pipeline, which had {there:.200} where this one"
                f" has {here}: its place is another one here. Build the dataset as it was when the"
                " state was saved, or begin a new pass with `iter(dataset)`."
            )
        position, errors = counted(state, "position", "errors")
        origins = _origins(state.get("seeds"), len(self._random))
        with self.lock:
            self.close()
            self._is_done = False
            for seeds, *change in zip(self._random, origins, self._origins, strict=True):
                seeds.go_on(*change)
            self._position, self._errors, self._origins = position, errors, origins
            self._stream = self._open()

    def close(self) -> None:
        """End the pass and its threads; there is no element after it.

        Example:
            >>> iterator = iter(rx.data.Dataset.range(3).prefetch(2))
            >>> iterator.close()
            >>> list(iterator)
            []
        """
        self._is_done = True
        # A thread that is making an element ends the pass when it has; it may take any time.
        if self.lock.acquire(timeout=_PATIENCE):
            try:
                self._peeked.clear()
                self._stop()
            finally:
                self.lock.release()

    def __del__(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the program threads have been ended, and modules may be empty.
        if not is_over() and getattr(self, "_stream", None) is not None:
            self._stop()

    def _end(self) -> str:
        with self.lock:
            self._count_taken()
        return (
            f"End of sequence: the dataset has given all its {self._position} elements. Iterate"
            " with `for element in dataset`, or start again with `iter(dataset)`."
        )

    def _begin(self) -> None:
        """Open the stream where this iterator stands, or say that it has ended."""
        if self._is_done:
            self._stop()
            raise EndOfSequenceError(self._end())
        self._stream = self._open()

    def _open(self) -> Stream:
        """A stream that stands where this iterator does."""
        origins = dict(zip(self._random, self._origins, strict=True))
        stream = self._node.open(Run(origins, new=self._new))
        wanted = self._position + self._errors + len(self._peeked)
        # Elements that failed cannot be told from others without making them again.
        is_whole = not self._errors and not self._is_failing()
        found = stream.skip(wanted) if is_whole else pass_over(stream, wanted)
        if found < wanted:
            stream.close()
            raise InvalidArgumentError(
                f"The state stands after {wanted} elements, but the dataset has only {found} now:"
                " its files or arrays have changed."
            )
        return stream

    def _stop(self) -> None:
        stream, self._stream = self._stream, None
        self._count_taken()
        self._ready, self._num_ready = iter(()), 0
        if stream is not None:
            stream.close()


Iterator = DatasetIterator  # TensorFlow's name of it


def _random_nodes(node: Node) -> Sequence[Seeds]:
    return list(dict.fromkeys(seeds for part in walk(node) if (seeds := part.random) is not None))


def _origins(stored: Any, count: int) -> list[Origin]:
    parts: list[Any] = list(stored) if isinstance(stored, Sequence) else []
    parts = parts if len(parts) == count else [()]
    forms = [[type(x) for x in part] if isinstance(part, Sequence) else [] for part in parts]
    if any(form not in ([int, int, int], [int, int, type(None)]) for form in forms):
        raise InvalidArgumentError(
            f"The seeds of a saved state are {count} lists of a seed, a number and a global seed or"
            f" None; got {stored!r:.200}. Pass what `save_state()` returned."
        )
    return [Origin(*part) for part in parts]


def _describe(node: Node) -> str:
    return _FROM.join(map(_described, walk(node)))


def _described(part: Node) -> str:
    kind = type(part).__name__.removesuffix("Node")
    told = ", ".join(f"{name}={getattr(part, name)!r}" for name in part.grouping)
    return f"{kind}({told})" if told else kind


def _difference(saved: str, graph: str) -> tuple[str, str]:
    """The first parts in which two descriptions differ."""
    parts = zip_longest(saved.split(_FROM), graph.split(_FROM), fillvalue="nothing")
    return next((there, here) for there, here in parts if there != here)
