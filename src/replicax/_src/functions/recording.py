"""Record every JAX operation that runs on the current thread."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
from jax.extend import core as jaxprs

from replicax._src.base.managers import contextmanager
from replicax._src.compat.jax import Listening, traced
from replicax._src.functions.jaxpr.lift import taking_consts


class Recorder(Protocol):
    """Receives every operation that runs inside `recorded`."""

    @abstractmethod
    def follows(self, x: Any) -> bool:
        """Whether operations on the array `x` must be recorded."""

    @abstractmethod
    def record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        """Run one operation in the enclosing trace.

        Args:
            call: The operation, a function of `args` that JAX can differentiate.
            args: Its arguments, including captured arrays.
            opaque: Whether it is Python code with custom derivatives, which may capture arrays
                that are not among `args`.
        """


class _Recording(Listening):
    """The JAX trace that intercepts each operation; values stay ordinary arrays."""

    def __init__(self, parent: Any, recorder: Recorder) -> None:
        super().__init__(parent)
        self.requires_low = parent.requires_low
        self.recorder = recorder

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def process_primitive(self, primitive: Any, args: Any, params: Any) -> Any:
        args = list(args)
        if primitive.name == "stop_gradient":
            # Enclosing recordings and transformations must stop here too.
            with jaxprs.set_current_trace(self.parent):
                stopped = primitive.bind(*args, **params)
                return jax.numpy.copy(stopped) if stopped is args[0] else stopped
        closed = params.get("jaxpr")
        if any(map(self.recorder.follows, getattr(closed, "consts", ()))):
            # A jitted function captured a followed array: pass it as an argument.
            return self._record(taking_consts(closed), [*args, *closed.consts])
        if primitive.multiple_results:
            return self._record(lambda *xs: list(primitive.bind(*xs, **params)), args)
        return self._record(lambda *xs: [primitive.bind(*xs, **params)], args)[0]

    def process_call(self, primitive: Any, f: Any, args: Any, params: Any) -> Any:
        return self._bind(primitive, args, {**params, "subfuns": (f,)})

    def process_custom_jvp_call(
        self, primitive: Any, fun: Any, jvp: Any, args: Any, **params: Any
    ) -> Any:
        return self._bind(primitive, args, {**params, "subfuns": (fun, jvp)})

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Any, **params: Any
    ) -> Any:
        return self._bind(primitive, args, {**params, "subfuns": (fun, fwd, bwd)})

    def process_shard_map(self, primitive: Any, fun: Any, args: Any, **params: Any) -> Any:
        trees: list[Any] = []

        def call(*xs: Any) -> list[Any]:
            trees[:] = [primitive.bind(*xs, subfuns=(fun,), **params)]
            return list(trees[0])

        outs = self._record(call, list(args), opaque=True)
        return trees[0].update(outs)

    def _record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        with jaxprs.set_current_trace(self.parent):
            return self.recorder.record(call, args, opaque=opaque)

    def _bind(self, primitive: Any, args: Any, params: Any) -> Any:
        call = lambda *xs: list(primitive.bind(*xs, **params))  # noqa: E731
        return self._record(call, list(args), opaque=True)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Pass every operation that this thread runs in the block to `recorder`."""
    with jaxprs.set_current_trace(_Recording(traced.value, recorder)):
        yield


def is_recorded_by(recorder: Recorder) -> bool:
    """Whether ``recorder`` receives the operations that this thread runs now."""
    trace = traced.value
    while isinstance(trace, Listening):
        if isinstance(trace, _Recording) and trace.recorder is recorder:
            return True
        trace = trace.parent
    return False
