"""A progress line for training loops: throughput, input wait and user-supplied numbers."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from replicax._src.base.lazy import LazyModule
from replicax._src.values.per_replica import Distributed
from replicax._src.workers.watchdog import load

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    T = TypeVarWithDefault("T", default=Any)
else:
    T = TypeVar("T")

_rich = LazyModule("rich.progress")
_SOON = 0.1  # seconds between two updates of a terminal


class StepEstimate(Protocol):
    """The parts of an `rx.preflight` report that a progress line uses."""

    @property
    def compute_seconds(self) -> float:
        """The time of the arithmetic of one step at the peak rate of the devices."""
        ...


class ProgressBar(Generic[T]):
    """An iterable that shows the progress of the loop over it; see `progress`.

    Example:
        >>> steps = rx.train.progress(range(2), every=None)
        >>> for x in steps:
        ...     steps.update(loss=0.5 * x)
        >>> steps.steps
        2
    """

    def __init__(
        self,
        elements: Iterable[T],
        line: "_Line",
        batch_size: int | None,
        useful: float | None,
    ) -> None:
        self._elements = elements
        self._line = line
        self._batch_size = batch_size
        self._useful = useful  # seconds of arithmetic of a step at peak rate
        # Seconds until the end of the first step, which compiles, and of input waits until then.
        self._first = (0.0, 0.0)
        self.steps = 0
        self.examples: int | None = 0
        self._waited = 0.0
        self._numbers: dict[str, Any] = {}
        self._shown: dict[str, float] = {}

    def update(self, **numbers: Any) -> None:
        """Set numbers to show in the progress line.

        Args:
            **numbers: Numbers by name, such as ``loss=loss``. An array that is still being
                computed is shown as soon as it is ready; this never blocks.

        Example:
            >>> steps = rx.train.progress([1, 2], every=None)
            >>> for x in steps:
            ...     steps.update(loss=1.0 / x)
        """
        self._numbers.update(numbers)

    def __iter__(self) -> Iterator[T]:
        self.steps, self.examples, self._waited, self._first = 0, 0, 0.0, (0.0, 0.0)
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
                if self.steps == 1:
                    self._first = time.perf_counter() - began, self._waited
                load.useful += self._useful or 0.0
                self._count(element)
                self._line.step(self.steps, lambda: self._status(began))
            self._line.end(self.steps, self._status(began, wait=True))

    def _count(self, element: Any) -> None:
        more = _rows(element) if self._batch_size is None else self._batch_size
        self.examples = None if more is None or self.examples is None else self.examples + more

    def _status(self, began: float, *, wait: bool = False) -> str:
        """Format the status line: throughput, share of time spent on input, and metrics.

        A metric that devices are still computing keeps its last value; with ``wait``, wait for it.
        """
        seconds = max(time.perf_counter() - began, 1e-9)
        parts = [f"{self.steps / seconds:,.1f} steps/s"]
        if self.examples is not None:
            of = "" if self._batch_size is not None or _is_alone() else " of this worker"
            parts.insert(0, f"{self.examples / seconds:,.0f} examples/s{of}")
        parts.append(f"input wait {self._waited / seconds:.0%}")
        before, waited = self._first
        after = max(seconds - before, 1e-9)
        productive = max(after - (self._waited - waited), 0.0) if self.steps else 0.0
        parts.append(f"goodput {productive / seconds:.0%}")
        if self._useful is not None and self.steps > 1:
            parts.append(f"MFU {(self.steps - 1) * self._useful / after:.1%}")
        for name, value in self._numbers.items():
            if wait or _is_computed(value):
                self._shown[name] = float(np.asarray(value))
        parts += [f"{name} {value:.4g}" for name, value in self._shown.items()]
        return ", ".join(parts)


def progress(  # noqa: PLR0913
    iterable: Iterable[T],
    *,
    total: int | None = None,
    batch_size: int | None = None,
    description: str = "",
    every: float | None = 10.0,
    preflight: "StepEstimate | None" = None,
) -> ProgressBar[T]:
    """Show the progress of a training loop: examples per second, input wait, goodput and MFU.

    Goodput is the part of the time that goes to steps, without the first one, which compiles, and
    without waiting for input.

    On a terminal the line is updated in place; in a log file (standard error) and in a notebook
    (standard output), a line is written periodically. With several workers, only the first one
    shows it.

    Args:
        iterable: The iterable to loop over: a dataset, a distributed dataset, a range.
        total: The number of elements; by default the length or cardinality, if known.
        batch_size: Examples per element, over all workers. If None, the rows of this worker's
            arrays are counted.
        description: The text at the start of the line.
        every: Seconds between two lines without a terminal; None disables all output.
        preflight: The report of `rx.preflight` on one step, on the devices that you train on. It
            knows the flops of a step and the peak rate of a device, from which the MFU (model flops
            utilization) is computed, here, in ``replicax top`` and in the report of a run.

    Returns:
        An iterable with the same elements. Its `update` method sets numbers to show.

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
    useful = None if preflight is None else preflight.compute_seconds
    return ProgressBar(iterable, line, batch_size, useful)


def _is_computed(value: Any) -> bool:
    is_ready = getattr(value, "is_ready", None)  # a method of JAX arrays
    return is_ready is None or bool(is_ready())


def _length(iterable: Any) -> int | None:
    try:
        return len(iterable)
    except TypeError:  # infinite, of unknown length, or a distributed dataset
        known = getattr(iterable, "cardinality", None)
        return known if isinstance(known, int) and known >= 0 else None


def _rows(element: Any) -> int | None:
    """Return the number of rows of the first array in an element; None if it has none."""
    leaves = jax.tree.leaves(element, is_leaf=lambda x: isinstance(x, Distributed))
    first: Any = leaves[0] if leaves else None
    parts: tuple[Any, ...] = first.values if isinstance(first, Distributed) else (first,)
    shapes = [np.shape(part) for part in parts if hasattr(part, "shape")]
    if not shapes or not all(shapes):
        return None
    return sum(int(shape[0]) for shape in shapes)


class _Line(AbstractContextManager["_Line"]):
    """The output of the progress line: a terminal, a stream, or nowhere."""

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
            status = _rich.TextColumn("{task.fields[status]}")
            console = LazyModule("rich.console").Console(stderr=True)
            self._bar = _rich.Progress(*columns, status, console=console)
            self._task = self._bar.add_task(self._description, total=self._total, status="")
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)

    def step(self, steps: int, status: Callable[[], str]) -> None:
        """Show a step, unless the last update was too recent."""
        now = time.monotonic()
        if not self._is_shown or now < self._next:
            return
        self._next = now + (_SOON if self._is_terminal else self._every or 0.0)
        self._show(steps, status())

    def end(self, steps: int, status: str) -> None:
        """Show the last step."""
        if self._is_shown:
            self._show(steps, status)

    def _show(self, steps: int, status: str) -> None:
        if self._is_terminal:
            self._bar.update(self._task, completed=steps, status=status)
            return
        of = "" if self._total is None else f"/{self._total}"
        begin = f"{self._description}: " if self._description else ""
        # A notebook shows standard error in a red box.
        stream = sys.stdout if _is_notebook() else sys.stderr
        stream.write(f"{begin}step {steps}{of}, {status}\n")
        stream.flush()


def _is_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


def _is_first_worker() -> bool:
    return _is_alone() or jax.process_index() == 0


def _is_alone() -> bool:
    return not jax.distributed.is_initialized()
