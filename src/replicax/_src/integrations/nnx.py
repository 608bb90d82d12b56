"""Flax NNX in strategies: NNX variables are backed by `rx.Variable`, and some functions hooked.

All reads and writes of NNX go through one slot of its variables, ``_raw_value``. A descriptor over
that slot stores the value of a variable created in a scope in an `rx.Variable`, which behaves in
traces and strategies like any other. The remaining hooks are for operations in which the replicas
must act together: optimizers, random keys, statistics. Without a replica, every hook does what NNX
does.
"""

import inspect
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._src.base.errors import TracingError
from replicax._src.base.managers import contextmanager
from replicax._src.compat.jax import unrecorded
from replicax._src.context.current import attributes, current
from replicax._src.integrations import flax_private as private
from replicax._src.integrations.hook import refuse_in_scopes, replicas
from replicax._src.integrations.nnx_storage import (
    NNXBackedValue,
    adopt,
    backing_variable,
    deferred_writes,
    is_free,
    is_outermost,
    mirrors_metrics,
    outermost,
    slot,
    write,
)
from replicax._src.integrations.registry import Integration
from replicax._src.state.levels import at_end
from replicax._src.state.policy import Merge
from replicax._src.state.variable import Variable
from replicax._src.topology.mesh import REPLICA_AXIS
from replicax._src.values.placement import is_array, is_traced

_here = threading.local()
_nothing = object()


# Hooks. Each function takes the original function of NNX and returns its replacement.


def _back_at_creation(original: Any) -> Any:
    """Back variables by an `rx.Variable` if they are created in a scope, outside of any trace."""

    def init(self: Any, value: Any, **metadata: Any) -> None:
        frame = current()
        has_mesh = frame.level is None and not jax.sharding.get_abstract_mesh().empty
        by_strategy = frame.strategy is not None and not has_mesh
        # A strategy shards by `out_sharding` itself; NNX would require a mesh.
        with nnx.use_eager_sharding(False) if by_strategy else nullcontext():
            original(self, value, **metadata)
        is_made_here = frame.strategy is not None and frame.level is None and is_outermost(self)
        if is_made_here and is_free(slot.__get__(self), frame.strategy):
            adopt(self, frame.strategy)

    return init


def _allow_writes_in_levels(original: Any) -> Any:
    """Skip NNX's check that a variable is written in the trace in which it was created."""
    return lambda self: None if _is_of_level(self) else original(self)


def _is_of_level(v: Any) -> bool:
    """Whether the current trace level tracks writes to the variable, whatever trace created it."""
    return current().level is not None and backing_variable(v) is not None


def _record_attribute_changes(original: Any) -> Any:
    """Record changes of a module's attributes, as by `eval()`, to retrace compiled functions."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        is_inside = current().level is not None
        if is_inside:
            _forget_at_end(self)
            old = vars(self).get(name)
            if (
                value is not old
                and _is_state(old)
                and id(self) not in _modules_under_construction()
            ):
                _replaced.setdefault(current().level, set()).add((type(self), name))
        if is_inside or id(self) in _modules_under_construction():
            original(self, name, value)
            return
        # Compare `__dict__` only: reading the attribute could run a property or `__getattr__`.
        before = dict(vars(self))
        original(self, name, value)
        for key, new in vars(self).items():
            old = before.get(key, _nothing)
            if old is _nothing and key == name:
                old = inspect.getattr_static(type(self), key, _nothing)  # a class attribute
            if old is not new and old is not _nothing and not private.is_state_name(key):
                attributes.note(self, key, old, new)

    return set_attribute


def _forget_at_end(node: Any) -> None:
    """When the trace level ends, remove or restore attributes of ``node`` set to its tracers."""
    before, replaced = dict(vars(node)), _replaced.setdefault(current().level, set())

    def end() -> str:
        lost = []
        for key, value in list(vars(node).items()):
            if value is before.get(key, _nothing) or not _is_of_trace(value):
                continue
            if key in before:
                old = vars(node)[key] = before[key]
                if _is_state(old) and not _is_of_trace(old) and (type(node), key) in replaced:
                    lost.append(key)
            else:
                del vars(node)[key]
        return _lost_values(node, lost, before) if lost else ""

    at_end((_forget_at_end, id(node)), end)


# For each trace level, the (class, attribute) pairs that the program itself set to another array or
# variable, on modules or on the copies that NNX transforms make of them. Needed because NNX
# transforms also return unchanged arrays as new tracers.
_replaced: WeakKeyDictionary[Any, set[tuple[type, str]]] = WeakKeyDictionary()


def _is_state(value: Any) -> bool:
    """Whether an attribute's value is an array or a variable, or a container of some."""
    is_leaf = lambda x: isinstance(x, nnx.Variable | nnx.Pytree)  # noqa: E731
    leaves = jax.tree.leaves(value, is_leaf=is_leaf)
    return any(is_array(x) or isinstance(x, nnx.Variable) for x in leaves)


def _lost_values(node: Any, names: list[str], before: dict[str, Any]) -> str:
    """Return the error message for attributes replaced in a trace: only variables outlive it."""
    name, first = type(node).__name__, names[0]
    what = f"A compiled function set {', '.join(f'{name}.{key}' for key in names)} to another"
    if isinstance(before[first], nnx.Variable):
        return (
            f"{what} variable. What a compiled function creates ends with it, so the new value"
            f" would be lost. Assign to the variable that is there: `self.{first}[...] = new`; or"
            " take the new one out with `nnx.pop` before the function returns."
        )
    return (
        f"{what} array."
        " A plain array is a Python attribute, which is read when the function is traced, so the"
        f" new value would be lost. Keep it in a variable: `self.{first} = nnx.Variable(...)`"
        f" (nnx.Param if it is trained) and `self.{first}[...] = new`."
    )


def _is_of_trace(value: Any) -> bool:
    is_leaf = lambda x: isinstance(x, nnx.Variable | nnx.Pytree)  # noqa: E731
    return any(map(_leaf_is_of_trace, jax.tree.leaves(value, is_leaf=is_leaf)))


def _leaf_is_of_trace(leaf: Any) -> bool:
    if isinstance(leaf, nnx.Variable):
        return not is_outermost(leaf)
    if isinstance(leaf, nnx.Pytree):
        state = private.module_state(leaf)
        return state is not None and bool(state.trace_state.jax_trace != outermost)
    return is_traced(leaf)


def _modules_under_construction() -> set[int]:
    """Return the ids of the modules that this thread is constructing."""
    made: set[int] = _here.__dict__.setdefault("made", set())
    return made


def _track_construction(original: Any) -> Any:
    """Mark a module as being constructed, during which setting attributes is not a change."""

    def construct(cls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        _modules_under_construction().add(id(self))
        try:
            original(cls, self, *args, **kwargs)
        finally:
            _modules_under_construction().discard(id(self))

    return construct


def _allow_changes_in_levels(original: Any) -> Any:
    """Skip NNX's check that a module is changed in the trace in which it was created."""

    def check(self: Any, error_msg: Any) -> None:
        if current().level is None:
            original(self, error_msg)

    return check


def _defer_writes(original: Any) -> Any:
    """Defer writes to variables until NNX has rebuilt all objects.

    NNX clears an object and fills it again. A write in between may synchronize the replicas, which
    would then see half an object. NNX also marks the object with the current trace; this is undone,
    because the user's object outlives the trace.
    """

    def unflatten(*args: Any, **kwargs: Any) -> Any:
        if deferred_writes.get() is not None or current().level is None:
            return original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs).arguments
        nodes = [
            (node, state)
            for node in (arguments.get("outer_index_outer_ref") or {}).values()
            if isinstance(node, nnx.Pytree) and (state := private.module_state(node)) is not None
        ]
        for node, _ in nodes:
            _forget_at_end(node)
        writes: list[tuple[Any, Any]] = []
        token = deferred_writes.set(writes)
        try:
            node = original(*args, **kwargs)
        finally:
            deferred_writes.reset(token)
            for updated, state in nodes:
                new = private.module_state(updated)
                if new is not None:
                    new._trace_state = state._trace_state
        for v, x in writes:
            write(v, x)
        return node

    signature = inspect.signature(original)
    return unflatten


def _hide_tapes(original: Any) -> Any:
    """Hide the trace of an `rx.GradientTape`, which NNX would take for another trace."""

    def current_jax_trace() -> Any:
        if not current().tapes:
            return original()
        with unrecorded():  # a tape records operations without changing them
            return original()

    return current_jax_trace


def _aggregate_gradients(original: Any) -> Any:
    """Sum the gradients over the replicas, then apply one update for all of them."""

    def update(self: Any, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        replica = replicas()
        if replica is None:
            return original(self, model, grads, **kwargs)
        if kwargs:
            raise TypeError(
                f"nnx.Optimizer.update was given {', '.join(kwargs)} besides the gradients in a"
                " replica function, where each replica has its own value. Return them from"
                " `strategy.run`, reduce them, and call it outside of the replica function."
            )
        leaves, treedef = jax.tree.flatten(grads)
        summed = jax.tree.unflatten(treedef, replica.all_reduce("SUM", leaves))
        step = lambda _: original(self, model, summed)  # noqa: E731
        subject = {"the optimizer": self, "the model": model}
        return replica.merge_call(Merge("a step of nnx.Optimizer", step, subject))

    return update


def _fold_in_replica(original: Any) -> Any:
    """Fold the replica id into the drawn key: replicas draw different numbers from equal states.

    Replica 0 keeps the original key, so its numbers equal those of a run on one device.
    """

    def draw(self: Any) -> Any:
        key, replica = original(self), replicas()
        if replica is None:
            return key
        number = replica.replica_id_in_sync_group
        fold = lambda k: jax.random.key_data(jax.random.fold_in(k, number))  # noqa: E731
        for _ in range(key.ndim):
            fold = jax.vmap(fold)
        numbers = jnp.where(number == 0, jax.random.key_data(key), fold(key))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(key))

    return draw


def _synchronize_statistics(original: Any) -> Any:
    """Support ``axis_name="replica"``: moments over the rows of all replicas, weighted by count."""
    signature = inspect.signature(original)

    def compute_stats(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments["axis_name"] != REPLICA_AXIS:
            return original(*args, **kwargs)
        replica, bound.arguments["axis_name"] = replicas(), None
        if replica is None:
            return original(*bound.args, **bound.kwargs)
        return _moments(replica, **bound.arguments)

    return compute_stats


def _moments(replica: Any, *, x: Any, axes: Any, dtype: Any, mask: Any, **how: Any) -> Any:
    if how["axis_index_groups"] is not None:
        raise NotImplementedError("axis_index_groups: statistics are of all replicas, or of one.")
    x = jnp.asarray(x, jnp.promote_types(dtype or x.dtype, jnp.float32))
    axes = tuple(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes))
    is_valid = jnp.broadcast_to(jnp.asarray(True) if mask is None else mask, x.shape)

    def global_sums(*ys: Any) -> Any:
        return replica.sum_statistics([y.sum(axes, where=is_valid) for y in ys])

    count, total, squares = global_sums(jnp.ones_like(x), x, jnp.square(jnp.abs(x)))
    if not how["use_mean"]:
        return jnp.zeros_like(squares), squares / count
    mean = total / count
    if how["use_fast_variance"]:
        return mean, jnp.maximum(0.0, squares / count - jnp.square(jnp.abs(mean)))
    (deviations,) = global_sums(jnp.square(jnp.abs(x - jnp.expand_dims(mean, axes))))
    return mean, deviations / count


@contextmanager
def _mirrored_metrics() -> Iterator[None]:
    token = mirrors_metrics.set(True)
    try:
        yield
    finally:
        mirrors_metrics.reset(token)


def _mirror_welford(original: Any) -> Any:
    """Mirror the state of ``Welford``: means and variances of replicas cannot simply be summed."""

    def init(self: Any, argname: str = "values") -> None:
        with _mirrored_metrics():
            original(self, argname)

    return init


def _synchronize_welford(original: Any) -> Any:
    """Update the mirrored state of ``Welford`` on every replica with the rows of all replicas."""

    def update(self: Any, **kwargs: Any) -> None:
        replica = replicas()
        if replica is None or self.argname not in kwargs:
            original(self, **kwargs)
            return
        values = jnp.asarray(kwargs[self.argname], self.mean.dtype)
        size = jnp.asarray(values.size, self.mean.dtype)
        count, total = replica.sum_statistics([size, values.sum()])
        mean = total / count
        (deviations,) = replica.sum_statistics([jnp.square(values - mean).sum()])
        before, off = self.count[...], mean - self.mean[...]
        self.count[...] = before + count.astype(before.dtype)
        self.mean[...] += off * count / self.count[...]
        self.m2[...] += deviations + off * off * count * before / self.count[...]

    return update


def _refuse_jit(original: Any) -> Any:
    """Raise if a function with ``nnx.jit`` is called in a replica or a compiled function."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = current()
        if frame.level is None and frame.replica is None:
            return original(self, *args, **kwargs)
        raise TracingError(
            f"A function with nnx.jit, {getattr(self, '__name__', self)!r}, was called in a replica"
            " function or an rx.function. It would keep what the first replica's trace saw. Leave"
            " nnx.jit out there: `rx.function` compiles all of it."
        )

    return call


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.VARIABLE_INIT, _back_at_creation),
    (private.CHECK_UPDATE, _allow_writes_in_levels),
    (private.CHECK_CONTEXT, _allow_changes_in_levels),
    (private.SET_ATTRIBUTE, _record_attribute_changes),
    (private.CONSTRUCT, _track_construction),
    (private.CURRENT_TRACE, _hide_tapes),
    (private.UNFLATTEN, _defer_writes),
    (private.OPTIMIZER_UPDATE, _aggregate_gradients),
    (private.DRAW, _fold_in_replica),
    (private.COMPUTE_STATS, _synchronize_statistics),
    (private.WELFORD_INIT, _mirror_welford),
    (private.WELFORD_UPDATE, _synchronize_welford),
    (private.JIT_CALL, _refuse_jit),
    (private.SIMPLE_JIT_CALL, _refuse_jit),
    (private.SIMPLE_JIT_PARTIAL_CALL, _refuse_jit),
)


class _CheckedValue(NNXBackedValue):
    """The descriptor for Flax versions without some features: reads raise where they are needed."""

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is not None:
            private.CONTRACT.check_read(v)
        return super().__get__(v, owner)


def attach() -> Integration:
    """Attach the hooks to Flax NNX; if its version is unsupported, refuse variables in scopes."""
    kind: Any = nnx.Variable
    contract = private.CONTRACT
    contract.attach(REPLACEMENTS)
    why = contract.lacks(private.VARIABLES)
    if why:
        kind.__init__ = refuse_in_scopes(kind.__init__, "An NNX variable", why.rstrip("."))
        return Integration()
    kind._raw_value = _CheckedValue() if contract.lost else NNXBackedValue()
    if not contract.lacks(private.UPDATES):
        can_update: Any = nnx.Variable._can_update
        kind._can_update = property(lambda v: _is_of_level(v) or can_update.fget(v))
    return Integration(
        variables={nnx.Variable: backing_variable},
        # A variable without a backing variable is data: NNX's functional code passes it as a
        # pytree.
        opaque={
            nnx.Pytree: lambda _: True,
            nnx.Variable: lambda v: isinstance(slot.__get__(v), Variable),
        },
    )
