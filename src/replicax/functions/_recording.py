"""Recordings: who listens is told every operation that JAX does in a thread."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
from jax.extend import core as jaxprs

from replicax._blocks import contextmanager
from replicax._jax_private import Listening, traced
from replicax.functions._jaxpr._lift import taking_consts


class Recorder(Protocol):
    """Is told every operation while `recorded` is open."""

    @abstractmethod
    def follows(self, x: Any) -> bool:
        """Whether it needs to know what becomes of the array ``x``."""

    @abstractmethod
    def record(
        self, call: Callable[..., list[Any]], args: list[Any], *, opaque: bool = False
    ) -> list[Any]:
        """Run one operation on what surrounds the recording.

        Args:
            call: The operation, a function of ``args`` that JAX can differentiate.
            args: What it is applied to, closed-over arrays included.
            opaque: Whether it is Python code with derivatives of its own, which may close over
                arrays that are not among ``args``.
        """


class _Recording(Listening):
    """What JAX asks to process each operation; values stay the arrays that they are."""

    def __init__(self, parent: Any, recorder: Recorder) -> None:
        super().__init__(parent)
        self.requires_low = parent.requires_low
        self._recorder = recorder

    def stage_value(self, val: Any) -> Any:
        return self.parent.stage_value(val)

    def process_primitive(self, primitive: Any, args: Any, params: Any) -> Any:
        args = list(args)
        if primitive.name == "stop_gradient":
            # The recordings and transformations around this one must stop here too.
            with jaxprs.set_current_trace(self.parent):
                stopped = primitive.bind(*args, **params)
                return jax.numpy.copy(stopped) if stopped is args[0] else stopped
        closed = params.get("jaxpr")
        if any(map(self._recorder.follows, getattr(closed, "consts", ()))):
            # A jitted function closed over such an array: it becomes an argument.
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
            return self._recorder.record(call, args, opaque=opaque)

    def _bind(self, primitive: Any, args: Any, params: Any) -> Any:
        call = lambda *xs: list(primitive.bind(*xs, **params))  # noqa: E731
        return self._record(call, list(args), opaque=True)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` every operation that this thread does until the block ends."""
    with jaxprs.set_current_trace(_Recording(traced.value, recorder)):
        yield
