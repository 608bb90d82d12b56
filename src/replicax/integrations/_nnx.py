"""Flax NNX in strategies: its variables hold an rx.Variable, and a few of its functions are hooked.

Everything that NNX reads and writes ends at one slot of its variables, ``_raw_value``. A descriptor
over it keeps the value of a variable that was made in a scope in an `rx.Variable`, and from there
on levels and policies do what they do for every other. The rest is where n replicas must act as
one: optimizers, random keys, statistics. All hooks do what NNX does where there is no replica.
"""

import inspect
import threading
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from flax import nnx

from replicax._blocks import contextmanager
from replicax._errors import TracingError
from replicax._jax_private import unrecorded
from replicax.context._current import attributes, current
from replicax.integrations import _flax_private as private
from replicax.integrations._hook import refused, replicas
from replicax.integrations._nnx_storage import (
    NNXHeldValue,
    adopted,
    held_by,
    is_free,
    is_outermost,
    keeps_one,
    later,
    outermost,
    slot,
    write,
)
from replicax.state._levels import at_end
from replicax.state._policy import Merge
from replicax.state._variable import Variable
from replicax.topology._mesh import REPLICA_AXIS
from replicax.values._per_replica import keep_whole
from replicax.values._placement import is_array, is_traced

_here = threading.local()
_nothing = object()


# What is hooked.


def _held_from_the_start(original: Any) -> Any:
    def init(self: Any, value: Any, **metadata: Any) -> None:
        original(self, value, **metadata)
        frame = current()
        is_made_here = frame.strategy is not None and frame.level is None and is_outermost(self)
        if is_made_here and is_free(slot.__get__(self), frame.strategy):
            adopted(self, frame.strategy)

    return init


def _written_in_any_level(original: Any) -> Any:
    return lambda self: None if _is_of_level(self) else original(self)


def _is_of_level(v: Any) -> bool:
    """Whether a level keeps what is written to the variable, in whatever trace it was made."""
    return current().level is not None and held_by(v) is not None


def _known_to_functions(original: Any) -> Any:
    """A module that is changed, as by `eval()`, is another one for compiled functions."""

    def set_attribute(self: Any, name: str, value: Any) -> None:
        is_inside = current().level is not None
        if is_inside:
            _forget_at_end(self)
            old = vars(self).get(name)
            if value is not old and is_array(old) and id(self) not in _being_made():
                _replaced.setdefault(current().level, set()).add((type(self), name))
        if is_inside or id(self) in _being_made():
            original(self, name, value)
            return
        # Only what is stored: to read the attribute could run a property, or `__getattr__`.
        before = dict(vars(self))
        original(self, name, value)
        for key, new in vars(self).items():
            old = before.get(key, _nothing)
            if old is _nothing and key == name:
                old = inspect.getattr_static(type(self), key, _nothing)  # a default of its class
            if old is not new and old is not _nothing and not private.is_state_name(key):
                attributes.note(self, key, old, new)

    return set_attribute


def _forget_at_end(node: Any) -> None:
    """When the level ends, take out of an object what exists only in its trace."""
    before, replaced = dict(vars(node)), _replaced.setdefault(current().level, set())

    def end() -> str:
        lost = []
        for key, value in list(vars(node).items()):
            if value is before.get(key, _nothing) or not _is_of_trace(value):
                continue
            if key in before:
                old = vars(node)[key] = before[key]
                if is_array(old) and not is_traced(old) and (type(node), key) in replaced:
                    lost.append(key)
            else:
                del vars(node)[key]
        return _lost_arrays(node, lost) if lost else ""

    at_end((_forget_at_end, id(node)), end)


# For each level, the attributes that the program itself set to another array, of modules or of the
# copies that transformations of NNX make of them. These transformations also hand arrays back that
# nobody changed, as new tracers.
_replaced: WeakKeyDictionary[Any, set[tuple[type, str]]] = WeakKeyDictionary()


def _lost_arrays(node: Any, names: list[str]) -> str:
    """Return the error for plain arrays that a trace replaced: only variables outlive it."""
    name, first = type(node).__name__, names[0]
    return (
        f"A compiled function set {', '.join(f'{name}.{key}' for key in names)} to another array."
        " A plain array is a Python attribute, which is read when the function is traced, so that"
        f" the new value would be lost. Keep it in a variable: `self.{first} = nnx.Variable(...)`"
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


def _being_made() -> set[int]:
    made: set[int] = _here.__dict__.setdefault("made", set())
    return made


def _made_before_it_is_changed(original: Any) -> Any:
    def construct(cls: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        _being_made().add(id(self))
        try:
            original(cls, self, *args, **kwargs)
        finally:
            _being_made().discard(id(self))

    return construct


def _changed_in_any_level(original: Any) -> Any:
    def check(self: Any, error_msg: Any) -> None:
        if current().level is None:
            original(self, error_msg)

    return check


def _written_when_it_is_whole(original: Any) -> Any:
    """Update objects in place, and write to their variables when all of them are whole again.

    NNX empties an object and fills it again; replicas that meet in between would see half of it.
    It also gives the object a new mark of the trace in which that happens. An object of the user's
    stays where it was made: in a level the trace ends, and the object does not.
    """

    def unflatten(*args: Any, **kwargs: Any) -> Any:
        if later.get() is not None or current().level is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        nodes = [
            (node, state)
            for node in (given.get("outer_index_outer_ref") or {}).values()
            if isinstance(node, nnx.Pytree) and (state := private.module_state(node)) is not None
        ]
        for node, _ in nodes:
            _forget_at_end(node)
        writes: list[tuple[Any, Any]] = []
        token = later.set(writes)
        try:
            node = original(*args, **kwargs)
        finally:
            later.reset(token)
            for updated, state in nodes:
                new = private.module_state(updated)
                if new is not None:
                    new._trace_state = state._trace_state
        for v, x in writes:
            write(v, x)
        return node

    signature = inspect.signature(original)
    return unflatten


def _through_tapes(original: Any) -> Any:
    def current_jax_trace() -> Any:
        if not current().tapes:
            return original()
        with unrecorded():  # a tape only listens
            return original()

    return current_jax_trace


def _stepped_once(original: Any) -> Any:
    """Gradients are added up, and then the step happens once for all replicas."""

    def update(self: Any, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        replica = replicas()
        if replica is None:
            return original(self, model, grads, **kwargs)
        if kwargs:
            raise TypeError(
                f"nnx.Optimizer.update was given {', '.join(kwargs)} besides the gradients in a"
                " replica function, where each replica has its own. Return them from"
                " `strategy.run`, reduce them, and call it outside of the replica function."
            )
        leaves, treedef = jax.tree.flatten(grads)
        summed = jax.tree.unflatten(treedef, replica.all_reduce("SUM", leaves))
        step = lambda _: original(self, model, summed)  # noqa: E731
        subject = {"the optimizer": self, "the model": model}
        return replica.merge_call(Merge("a step of nnx.Optimizer", step, subject))

    return update


def _drawn_apart(original: Any) -> Any:
    """Each replica draws its own numbers, from a state that is the same on all."""

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


def _statistics_of_all_rows(original: Any) -> Any:
    """With ``axis_name="replica"``, the moments of all replicas' rows, however many each has."""
    signature = inspect.signature(original)

    def compute_stats(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["axis_name"] != REPLICA_AXIS:
            return original(*args, **kwargs)
        replica, given.arguments["axis_name"] = replicas(), None
        if replica is None:
            return original(*given.args, **given.kwargs)
        return _moments(replica, **given.arguments)

    return compute_stats


def _moments(replica: Any, *, x: Any, axes: Any, dtype: Any, mask: Any, **how: Any) -> Any:
    if how["axis_index_groups"] is not None:
        raise NotImplementedError("axis_index_groups: statistics are of all replicas, or of one.")
    x = jnp.asarray(x, jnp.promote_types(dtype or x.dtype, jnp.float32))
    axes = tuple(a % x.ndim for a in ((axes,) if isinstance(axes, int) else axes))
    there = jnp.broadcast_to(jnp.asarray(True) if mask is None else mask, x.shape)

    def of_all(*ys: Any) -> Any:
        return replica.all_reduce("SUM", [y.sum(axes, where=there) for y in ys])

    count, total, squares = of_all(jnp.ones_like(x), x, jnp.square(jnp.abs(x)))
    if not how["use_mean"]:
        return jnp.zeros_like(squares), squares / count
    mean = total / count
    if how["use_fast_variance"]:
        return mean, jnp.maximum(0.0, squares / count - jnp.square(jnp.abs(mean)))
    (apart,) = of_all(jnp.square(jnp.abs(x - jnp.expand_dims(mean, axes))))
    return mean, apart / count


@contextmanager
def _one_for_all() -> Iterator[None]:
    token = keeps_one.set(True)
    try:
        yield
    finally:
        keeps_one.reset(token)


def _kept_equal(original: Any) -> Any:
    """Means and variances do not add up: all replicas keep those of all rows."""

    def init(self: Any, argname: str = "values") -> None:
        with _one_for_all():
            original(self, argname)

    return init


def _updated_by_all_rows(original: Any) -> Any:
    def update(self: Any, **kwargs: Any) -> None:
        replica = replicas()
        if replica is None or self.argname not in kwargs:
            original(self, **kwargs)
            return
        values = jnp.asarray(kwargs[self.argname], self.mean.dtype)
        size = jnp.asarray(values.size, self.mean.dtype)
        count, total = replica.all_reduce("SUM", [size, values.sum()])
        mean = total / count
        apart = replica.all_reduce("SUM", jnp.square(values - mean).sum())
        before, off = self.count[...], mean - self.mean[...]
        self.count[...] = before + count.astype(before.dtype)
        self.mean[...] += off * count / self.count[...]
        self.m2[...] += apart + off * off * count * before / self.count[...]

    return update


def _refused(original: Any) -> Any:
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
    (private.VARIABLE_INIT, _held_from_the_start),
    (private.CHECK_UPDATE, _written_in_any_level),
    (private.CHECK_CONTEXT, _changed_in_any_level),
    (private.SET_ATTRIBUTE, _known_to_functions),
    (private.CONSTRUCT, _made_before_it_is_changed),
    (private.CURRENT_TRACE, _through_tapes),
    (private.UNFLATTEN, _written_when_it_is_whole),
    (private.OPTIMIZER_UPDATE, _stepped_once),
    (private.DRAW, _drawn_apart),
    (private.COMPUTE_STATS, _statistics_of_all_rows),
    (private.WELFORD_INIT, _kept_equal),
    (private.WELFORD_UPDATE, _updated_by_all_rows),
    (private.JIT_CALL, _refused),
    (private.SIMPLE_JIT_CALL, _refused),
    (private.SIMPLE_JIT_PARTIAL_CALL, _refused),
)


class _CheckedValue(NNXHeldValue):
    """The value of a variable, refused where a feature that this Flax lacks may be in use."""

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is not None:
            private.CONTRACT.check_read(v)
        return super().__get__(v, owner)


def install() -> None:
    """Attach to Flax NNX, once it is imported; where that cannot be, refuse variables in scopes."""
    kind: Any = nnx.Variable
    contract = private.CONTRACT
    contract.attach(REPLACEMENTS)
    why = contract.lacks(private.VARIABLES)
    if why:
        kind.__init__ = refused(kind.__init__, "An NNX variable", why.rstrip("."))
        return
    kind._raw_value = _CheckedValue() if contract.lost else NNXHeldValue()
    if not contract.lacks(private.UPDATES):
        can_update: Any = nnx.Variable._can_update
        kind._can_update = property(lambda v: _is_of_level(v) or can_update.fget(v))
    kind.__rx_variable__ = held_by
    # A variable with an array of its own is data, as NNX's functional code passes it.
    kind.__rx_opaque__ = lambda v: isinstance(slot.__get__(v), Variable)
    nnx.Pytree.__rx_opaque__ = lambda _: True  # type: ignore[attr-defined]
    keep_whole(nnx.Pytree, nnx.Variable)


install()
