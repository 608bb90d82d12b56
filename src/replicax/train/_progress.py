"""Progress: an iterable -> the same elements, and a line that says how fast they go by."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from replicax._lazy import LazyModule
from replicax.values._per_replica import Distributed

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    T = TypeVarWithDefault("T", default=Any)
else:
    T = TypeVar("T")

_rich = LazyModule("rich.progress")
_SOON = 0.1  # seconds between two looks of a terminal


class ProgressBar(Generic[T]):
    """Elements of an iterable, with a line that says how the loop gets on; see `progress`.

    Example:
        >>> steps = rx.train.progress(range(2), every=None)
        >>> for x in steps:
        ...     steps.update(loss=0.5 * x)
        >>> steps.steps
        2
    """

    def __init__(self, elements: Iterable[T], line: "_Line", batch_size: int | None) -> None:
        self._elements = elements
        self._line = line
        self._batch_size = batch_size
        self.steps = 0
        self.examples: int | None = 0
        self._waited = 0.0
        self._numbers: dict[str, Any] = {}
        self._shown: dict[str, float] = {}

    def update(self, **numbers: Any) -> None:
        """Say the latest of some numbers, which the line shows.

        Args:
            **numbers: By name, such as ``loss=loss``. An array that is not computed yet is shown
                when it is; nothing waits for it.

        Example:
            >>> steps = rx.train.progress([1, 2], every=None)
            >>> for x in steps:
            ...     steps.update(loss=1.0 / x)
        """
        self._numbers.update(numbers)

    def __iter__(self) -> Iterator[T]:
        self.steps, self.examples, self._waited = 0, 0, 0.0
        began = time.perf_counter()
        iterator = iter(self._elements)
        with self._line:
            while True:
                asked = time.perf_counter()
                try:
                    element = next(iterator)
                except StopIteration:
                    break
                self._waited += time.perf_counter() - asked
                yield element
                self.steps += 1
                self._count(element)
                self._line.step(self.steps, lambda: self._told(began))
            self._line.end(self.steps, self._told(began, patiently=True))

    def _count(self, element: Any) -> None:
        more = _rows(element) if self._batch_size is None else self._batch_size
        self.examples = None if more is None or self.examples is None else self.examples + more

    def _told(self, began: float, *, patiently: bool = False) -> str:
        """How fast, how much of it waiting for input, and the numbers that are known by now."""
        seconds = max(time.perf_counter() - began, 1e-9)
        parts = [f"{self.steps / seconds:,.1f} steps/s"]
        if self.examples is not None:
            of = "" if self._batch_size is not None or _is_alone() else " of this worker"
            parts.insert(0, f"{self.examples / seconds:,.0f} examples/s{of}")
        parts.append(f"input wait {self._waited / seconds:.0%}")
        for name, value in self._numbers.items():
            if patiently or _is_computed(value):
                self._shown[name] = float(np.asarray(value))
        parts += [f"{name} {value:.4g}" for name, value in self._shown.items()]
        return ", ".join(parts)


def progress(
    iterable: Iterable[T],
    *,
    total: int | None = None,
    batch_size: int | None = None,
    description: str = "",
    every: float | None = 10.0,
) -> ProgressBar[T]:
    """Show how a training loop gets on: steps, examples a second, how long it waits for input.

    On a terminal the line moves; elsewhere, in a log file, there is a line now and then. With
    several workers the first one shows it, and on the others the loop is silent.

    Args:
        iterable: What the loop goes over: a dataset, a distributed one, a range.
        total: How many elements there are; its length or cardinality if None and known.
        batch_size: Examples in an element, of all workers. If None they are counted: the rows of
            arrays, on this worker.
        description: What the line begins with.
        every: Seconds between two lines where there is no terminal; None for no output at all.

    Returns:
        An iterable with the same elements. Its `update` takes numbers to show.

    Example:
        >>> data = rx.data.Dataset.range(6).batch(2)
        >>> steps = rx.train.progress(data, every=None)
        >>> for batch in steps:
        ...     steps.update(loss=float(batch.sum()))
        >>> steps.steps, steps.examples
        (3, 6)
    """
    total = _length(iterable) if total is None else total
    line = _Line(description, total, every)
    return ProgressBar(iterable, line, batch_size)


def _is_computed(value: Any) -> bool:
    ask = getattr(value, "is_ready", None)  # of JAX's arrays
    return ask is None or bool(ask())


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:  # there is no end, or nobody knows it, or it is a distributed dataset
        known = getattr(iterable, "cardinality", None)
        return known if isinstance(known, int) and known >= 0 else None


def _rows(element: Any) -> int | None:
    """The rows of the first array in an element; None where there is no such thing."""
    leaves = jax.tree.leaves(element, is_leaf=lambda x: isinstance(x, Distributed))
    first: Any = leaves[0] if leaves else None
    parts: tuple[Any, ...] = first.values if isinstance(first, Distributed) else (first,)
    shapes = [np.shape(part) for part in parts if hasattr(part, "shape")]
    if not shapes or not all(shapes):
        return None
    return sum(int(shape[0]) for shape in shapes)


class _Line(AbstractContextManager["_Line"]):
    """Where the progress is shown: a terminal, a file, or nowhere."""

    def __init__(self, description: str, total: int | None, every: float | None) -> None:
        self._description = description
        self._total = total
        self._every = every
        self._bar: Any = nullcontext()
        self._task: Any = None
        self._next = 0.0

    def __enter__(self) -> "_Line":
        self._is_shown = self._every is not None and _is_first_worker()
        self._is_terminal = self._is_shown and sys.stderr.isatty()
        self._next = time.monotonic() + (self._every or 0.0)
        if self._is_terminal:
            columns = ("{task.description}", _rich.BarColumn(), _rich.MofNCompleteColumn())
            told = _rich.TextColumn("{task.fields[told]}")
            console = LazyModule("rich.console").Console(stderr=True)
            self._bar = _rich.Progress(*columns, told, console=console)
            self._task = self._bar.add_task(self._description, total=self._total, told="")
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def step(self, steps: int, told: Callable[[], str]) -> None:
        """Show a step, unless something was shown a moment ago."""
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + (_SOON if self._is_terminal else self._every or 0.0)
        self._show(steps, told())

    def end(self, steps: int, told: str) -> None:
        """Show the last step."""
        if self._is_shown:
            self._show(steps, told)

    def _show(self, steps: int, told: str) -> None:
        if self._is_terminal:
            self._bar.update(self._task, completed=steps, told=told)
            return
        of = "" if self._total is None else f"/{self._total}"
        begin = f"{self._description}: " if self._description else ""
        sys.stderr.write(f"{begin}step {steps}{of}, {told}\n")
        sys.stderr.flush()


def _is_first_worker() -> bool:
    return _is_alone() or jax.process_index() == 0


def _is_alone() -> bool:
    return not jax.distributed.is_initialized()
