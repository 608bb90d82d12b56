"""`rx.function`: trace a Python function once per signature, then run the compiled program."""

# mypy: disable-error-code="no-any-return"
# (to type checkers, a traced function returns what the Python function returns)

from __future__ import annotations

import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    final,
    overload,
)

import jax

from replicax._src.base.advice import advise
from replicax._src.base.errors import TracingError, VariableError
from replicax._src.base.forks import is_forked, refuse_fork
from replicax._src.base.tracebacks import shorten
from replicax._src.cluster.checks import WorkerLostError
from replicax._src.compat.jax import at_rest, settings, traced, undisturbed
from replicax._src.context.current import ambient_strategy, context_key, current, within
from replicax._src.functions.boundary import Fields, Outputs, with_iterator_arguments
from replicax._src.functions.cache_keys import Identity, receivers, unstable_part
from replicax._src.functions.iterator_inputs import run_in_python
from replicax._src.functions.jaxpr.lift import lift
from replicax._src.functions.modes import (
    FunctionOptions,
    HostDriven,
    PythonFallback,
    ShapeMismatch,
    late_creation,
    needs_value,
    runs_eagerly,
)
from replicax._src.functions.program import ConcreteFunction, Program, notify_watcher
from replicax._src.functions.reachable import refuse_leaked, refuse_lost
from replicax._src.functions.recovery import repeat_if_interrupted, run_as_step
from replicax._src.functions.signature import (
    Arguments,
    conform,
    examples,
    flatten_arguments,
    key_of,
    shape_of,
    why_new,
)
from replicax._src.state.declaration import notify_of_new_variables
from replicax._src.state.hooks import created_variables
from replicax._src.state.levels import TraceLevel
from replicax._src.state.variables import CHECKS_EVERY_CALL, check_carried
from replicax._src.topology.mesh import Topology
from replicax._src.workers import elastic

_MANY_TRACES = 6
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_log = logging.getLogger("replicax")


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R = TypeVar("_R")
_R_co = TypeVar("_R_co", covariant=True)


class _Decorator(Protocol):
    def __call__(self, func: Callable[_P, _R], /) -> Function[_P, _R]: ...


@overload
def function(
    func: Callable[_P, _R],
    input_signature: Sequence[Any] | None = None,
    **options: Unpack[FunctionOptions],
) -> Function[_P, _R]: ...


@overload
def function(
    func: None = None,
    input_signature: Sequence[Any] | None = None,
    **options: Unpack[FunctionOptions],
) -> _Decorator: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[Any] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    **ignored: Any,
) -> Any:
    """Compile a function: its Python body runs once for each signature of its arguments.

    Arrays are distinguished by shape and dtype, Python values by value. Variables that the body
    reads and writes automatically become inputs and outputs of the compiled program; assignments,
    random state and `strategy.run` inside it are supported. A function called by another one is
    inlined into it.

    Args:
        func: The function; without it, a decorator is returned.
        input_signature: Specs of the positional arguments, checked on every call.
        autograph: Accepted for compatibility with TensorFlow; Python control flow is not rewritten.
            Use `rx.cond`, `rx.scan` and `rx.while_loop` for control flow on array values.
        jit_compile: Accepted for compatibility with TensorFlow; XLA always compiles.
        reduce_retracing: Do not warn about repeated retracing.
        **ignored: TensorFlow's experimental options, accepted for compatibility.

    Example:
        >>> count = rx.Variable(0)
        >>> @rx.function
        ... def add(x):
        ...     count.assign_add(1)
        ...     return x * 2
        >>> float(add(jnp.float32(4)))
        8.0
        >>> int(count)
        1
    """
    if unknown := ignored.keys() - FunctionOptions.__annotations__:
        raise TypeError(f"rx.function has no option {', '.join(sorted(unknown))}.")
    if func is None:
        return functools.partial(
            function, input_signature=input_signature, reduce_retracing=reduce_retracing
        )
    return Function(func, input_signature, quiet=reduce_retracing)


@final
class Function(Generic[_P, _R_co]):
    """A compiled function, as returned by `rx.function`.

    Example:
        >>> f = rx.function(lambda x: x + 1)
        >>> int(f(jnp.int32(1))), f.experimental_get_tracing_count()
        (2, 1)
    """

    def __init__(
        self,
        func: Callable[_P, _R_co],
        input_signature: Sequence[Any] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        if not callable(func):
            raise TypeError(f"rx.function needs a function, got {func!r}.")
        self._python: Callable[..., Any] = func
        self._signature = tuple(input_signature) if input_signature is not None else None
        self._quiet = quiet
        self._orders_keywords = _takes_any_keyword(func)
        # Several programs per key if iterators yield elements of several shapes.
        self._programs: dict[Any, list[Program]] = {}
        self._traces = 0
        self._traces_before = 0  # those for other devices, before a resize of an elastic run
        self._started = False
        self._is_host_driven = False
        self._lock = threading.RLock()
        self._methods: dict[Identity, Function[..., Any]] = {}
        self.runs: dict[Any, Function[..., Any]] = {}
        functools.update_wrapper(self, func, updated=())
        _functions.add(self)

    @property
    def python_function(self) -> Callable[_P, _R_co]:
        """The Python function."""
        return self._python

    @property
    def input_signature(self) -> tuple[Any, ...] | None:
        """The declared specs of the arguments."""
        return self._signature

    def experimental_get_tracing_count(self) -> int:
        """Return the number of signatures that the function was traced for."""
        return self._traces

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        given: tuple[Any, ...] = args
        named: dict[str, Any] = kwargs
        if self._signature is not None:
            given, named = self._conformed(given, named), {}
        if current().level is not None or traced.value is not at_rest or runs_eagerly[0]:
            return self._python(*given, **named)
        if self._is_host_driven:
            return self._run_in_python(given, named)
        try:
            return self._run_compiled(given, named)
        except Exception as error:
            raise shorten(advise(error))  # noqa: B904 - the same error

    def _run_compiled(self, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the compiled program; Python runs a body that takes elements depending on values."""
        try:
            return repeat_if_interrupted(self._run_step, given, named)
        except HostDriven:
            self._is_host_driven = True
            return self._run_in_python(given, named)

    def _run_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the program for the arguments; if no program can take them, run the body instead."""
        try:
            return self._run(self._flatten_arguments(args, kwargs))
        except PythonFallback:
            run = functools.partial(self._run_in_python, args, kwargs)
        return run_as_step(run)

    def _flatten_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Split the arguments; a collective if workers must agree on the shapes of their parts."""
        try:
            return flatten_arguments(args, kwargs, orders_keywords=self._orders_keywords)
        except WorkerLostError as error:
            raise elastic.interruption(error) from error

    def forget_programs(self) -> None:
        """Drop all programs: the devices have changed."""
        self._programs.clear()
        self._traces_before = self._traces

    def _run(self, arguments: Arguments) -> Any:
        """Run the program for these arguments; trace it if there is none."""
        if is_forked[0]:
            refuse_fork()
        if CHECKS_EVERY_CALL:
            check_carried(self, arguments.named(self._python), self._name)
        # Inlines `key_of`: this is on the path of every step.
        programs = self._programs.get((arguments.key, context_key(), settings()), ())
        for program in programs:
            try:
                return program(arguments.arrays, arguments.leaves)
            except ShapeMismatch:
                continue
        refuse_leaked(self._name, arguments.arrays)
        program = self._traced(arguments, len(programs))
        return program(arguments.arrays, arguments.leaves)

    def _run_in_python(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the body in Python; each `strategy.run` in it is still compiled."""
        return run_in_python(lambda: self._python(*args, **kwargs))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(
        self: Function[Concatenate[Any, _Q], _R_co], instance: object, owner: Any = None
    ) -> BoundFunction[_Q, _R_co]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        key = Identity(instance)
        with self._lock:
            own = self._methods.get(key)
            if own is None:
                # Every object has its own variables, which its own first call may create.
                own = Function(self._python, self._signature, quiet=self._quiet)
                receivers.add(type(instance))
                alive = {k: f for k, f in self._methods.items() if k.target() is not None}
                self._methods = {**alive, key: own}
        return BoundFunction(own, instance)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Return the compiled program for these arguments, or for arguments of these specs.

        Example:
            >>> f = rx.function(lambda x: x + 1)
            >>> g = f.get_concrete_function(rx.TensorSpec([2], "float32"))
            >>> g(jnp.zeros(2)).tolist()
            [1.0, 1.0]
        """
        if not args and not kwargs and self._signature is not None:
            args = self._signature
        given, named = examples((args, kwargs), ambient_strategy())
        try:
            arguments = flatten_arguments(given, named, orders_keywords=self._orders_keywords)
        except PythonFallback:
            raise TypeError(
                f"{self._name} has no compiled program for these arguments: texts, and parts of"
                " different shapes, are processed in Python. Call the function itself."
            ) from None
        key = key_of(arguments)
        programs = self._programs.get(key) or [self._traced(arguments, 0)]
        return ConcreteFunction(self, programs[0], arguments)

    def _conformed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        assert self._signature is not None
        known = inspect.signature(self._python)
        wanted = len(self._signature) + (next(iter(known.parameters), "") == "self")
        if kwargs or len(args) < wanted:
            try:
                bound = known.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(
                    f"{self._name} was declared with an input_signature of {len(self._signature)}"
                    f" arguments and called with {len(args) + len(kwargs)}: {error}."
                ) from None
            given = len(bound.args)
            bound.apply_defaults()  # of arguments that are left out, up to the last one with a spec
            args = bound.args[: max(given, wanted)]
        return conform(self._signature, args, self._name)

    def _traced(self, arguments: Arguments, tried: int) -> Program:
        """Return a program other than the first `tried` for this key; trace it if there is none."""
        with self._lock:
            key = key_of(arguments)
            programs = self._programs.get(key, [])
            if len(programs) > tried:
                return programs[-1]
            program, created = self._trace_isolated(arguments)
            if created:
                if self._started:
                    raise VariableError(late_creation(self._name, created))
                notify_of_new_variables()
                # Trace again now that the variables exist: this is the program of all later calls.
                program, again = self._trace_isolated(arguments)
                if again:
                    raise VariableError(late_creation(self._name, again))
            self._started = True
            self._count_trace(key, arguments)
            if unstable_part(key) is None:  # it would not be found again
                self._programs[key] = [*programs, program]
            notify_watcher(self, arguments, program)
            return program

    def _trace_isolated(self, arguments: Arguments) -> tuple[Program, list[Any]]:
        traced: tuple[Program, list[Any]] = within(
            lambda: undisturbed(lambda: self._trace(arguments))
        )
        return traced

    def _trace(self, arguments: Arguments) -> tuple[Program, list[Any]]:
        """Trace the function once; return the program and the variables that it created."""
        level = TraceLevel(in_replica=False)
        outputs = Outputs()
        log: list[Any] = []
        given = arguments._replace(leaves=with_iterator_arguments(arguments.leaves))
        fields = Fields(arguments.treedef, arguments.leaves)

        def topology() -> Topology | None:
            if not level.topologies and (place := ambient_strategy().topology) is not None:
                level.uses(place, "a per-replica value")
            return next(iter(level.topologies), None)

        @functools.wraps(self._python)  # JAX shows the name of the traced function in its messages
        def body(*arrays: Any) -> list[Any]:
            args, kwargs = given.with_arrays(arrays)
            return outputs.take(self._python(*args, **kwargs), topology, fields)

        token = created_variables.set(log)
        try:
            lifted = lift(body, [shape_of(x) for x in arguments.arrays], level)
        except _NEEDS_VALUE as error:
            raise TracingError(needs_value(self._name, error)) from error
        finally:
            created_variables.reset(token)
        refuse_leaked(self._name, lifted.consts)
        refuse_lost(self._name, self._python, arguments.leaves)
        return Program(lifted, level, outputs, self._name), log

    def _count_trace(self, key: Any, arguments: Arguments) -> None:
        """Count a trace, and warn if the function is traced too often."""
        self._traces += 1
        if self._traces - self._traces_before != _MANY_TRACES or self._quiet:
            return
        last = next(reversed(self._programs), None)
        _log.warning(
            "%s has been traced %d times, and each trace compiles a new program. Last, %s. Pass"
            " numbers that change as arrays (jnp.asarray(x)), keep batch shapes equal"
            " (drop_remainder=True), and make the rx.function once, outside of loops.",
            self._name,
            _MANY_TRACES,
            why_new(last, key, arguments.names(self._python)),
        )

    @property
    def _name(self) -> str:
        return getattr(self._python, "__name__", type(self._python).__name__).replace(
            "<lambda>", "lambda_"
        )

    def __repr__(self) -> str:
        return f"<rx.function {self._name}>"


_functions: weakref.WeakSet[Function[..., Any]] = weakref.WeakSet()


def _forget_all_programs() -> None:
    for one in list(_functions):
        one.forget_programs()


elastic.after.register(elastic.PROGRAMS, _forget_all_programs)


def _takes_any_keyword(func: Callable[..., Any]) -> bool:
    """Whether a function has a ``**`` parameter, in which it sees the order of keywords."""
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # a callable of C has none
        return True
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


@final
class BoundFunction(Generic[_P, _R_co]):
    """An `rx.function` on a method, bound to its object.

    Example:
        >>> class Model:
        ...     @rx.function
        ...     def double(self, x):
        ...         return x * 2
        >>> int(Model().double(jnp.int32(4)))
        8
    """

    def __init__(self, unbound: Function[Any, _R_co], instance: Any) -> None:
        self._unbound = unbound
        self._instance = instance
        # Of the bound method: Keras reads the signature of `call`, which has no `self`.
        method = types.MethodType(unbound.python_function, instance)
        functools.update_wrapper(self, method, updated=())

    @property
    def python_function(self) -> Callable[_P, _R_co]:
        """The bound Python method."""
        return functools.partial(self._unbound.python_function, self._instance)

    @property
    def instance(self) -> Any:
        """The object to which the method is bound."""
        return self._instance

    @property
    def input_signature(self) -> tuple[Any, ...] | None:
        """The declared specs of the arguments."""
        return self._unbound.input_signature

    @property
    def runs(self) -> dict[Any, Function[..., Any]]:
        """The compiled forms of this method for `strategy.run`."""
        return self._unbound.runs

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co:
        return self._unbound(self._instance, *args, **kwargs)

    def get_concrete_function(self, *args: Any, **kwargs: Any) -> ConcreteFunction:
        """Return the compiled program for these arguments."""
        return self._unbound.get_concrete_function(self._instance, *args, **kwargs)

    def experimental_get_tracing_count(self) -> int:
        """Return the number of signatures that the function was traced for."""
        return self._unbound.experimental_get_tracing_count()
