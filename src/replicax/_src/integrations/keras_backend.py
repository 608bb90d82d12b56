"""Hooks into Keras's backend: variable creation, optimizers, statistics and control flow."""

import contextlib
import math
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.base.errors import ScopeError
from replicax._src.compat.jax import concrete
from replicax._src.context.current import current, get_strategy
from replicax._src.functions.control_flow import cond, scan, while_loop
from replicax._src.functions.function import function
from replicax._src.integrations import keras_private as private
from replicax._src.integrations.hook import replicas
from replicax._src.integrations.keras_private import in_stateless_scope
from replicax._src.state.declaration import laid_out_like
from replicax._src.state.policy import Merge
from replicax._src.state.variables import allow_reads, variable_of
from replicax._src.topology.mesh import partition_spec
from replicax._src.values.placement import is_traced

# Variables.


def _initialize_eagerly(original: Any) -> Any:
    """Compute initial values eagerly, even while a function is traced."""

    def initialize(self: Any, initializer: Any) -> None:
        with concrete():
            original(self, initializer)

    return initialize


def _skip_layout(original: Any) -> Any:
    """Skip Keras's layout in a scope: the strategy places variables, sharded by `laid_out`."""

    def initialize_layout(self: Any) -> None:
        if get_strategy().topology is None:
            original(self)

    return initialize_layout


def laid_out(v: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which a new variable gets its keras.distribution layout.

    The layout shards the variable over the logical devices of each replica.
    """
    strategy: Any = get_strategy()
    known = keras.distribution.distribution()
    layout = v._layout if v._layout is not None or known is None else known.get_variable_layout(v)
    if layout is None:
        return contextlib.nullcontext()
    sharding = getattr(layout, "backend_layout", layout)
    parts = _parts(v, sharding, strategy)
    v._layout = None
    if math.prod(parts) == 1:
        return contextlib.nullcontext()
    spread, shape = strategy.topology, tuple(v.shape)
    spec = partition_spec(spread, parts, shape, what=f"variable {v.path!r}", may_repeat=True)
    return laid_out_like(SimpleNamespace(topology=spread, shape=shape, spec=spec))


def _parts(v: Any, sharding: Any, strategy: Any) -> list[int]:
    """Return the number of shards along each axis of a variable.

    Raises:
        ScopeError: The mesh of the keras.distribution does not match the strategy's devices, or
            shards the variable over the replicas.
    """
    mesh, spread, known = sharding.mesh, strategy.topology, keras.distribution.distribution()
    batch = mesh.axis_names[0] if known is None else known.batch_dim_name
    if set(mesh.devices.flat) != set(spread.devices) or mesh.shape[batch] != spread.num_replicas:
        raise ScopeError(
            f"A keras.distribution gave variable {v.path!r} a place on a mesh {dict(mesh.shape)}"
            f" inside a scope of {strategy}: two would decide where it lives. Take a mesh of the"
            f" strategy's {len(spread.devices)} device(s) with {spread.num_replicas} along its axis"
            f" {batch!r}, one for each replica; or make the model without"
            " `keras.distribution.set_distribution`: what cuts weights over the logical devices of"
            " each replica is `rx.tpu.LayoutMap({'dense/kernel': [1, 2]}).scope()` too."
        )
    names = [(a,) if isinstance(a, str) else tuple(a or ()) for a in sharding.spec]
    if any(batch in axes for axes in names):
        raise ScopeError(
            f"A keras.distribution shards variable {v.path!r} along the axis {batch!r} of its mesh,"
            " which is that of the replicas: each has the whole variable. Shard it along the axes"
            " of the logical devices; `MirroredStrategy(variable_policy='sharded')` shards"
            " variables over replicas."
        )
    names += [()] * (len(v.shape) - len(names))
    return [math.prod(mesh.shape[a] for a in axes) for axes in names]


def _skip_tensor_layout(original: Any) -> Any:
    """Return no layout for layers' outputs in a scope: XLA decides their sharding."""

    def get_tensor_layout(self: Any, path: str) -> Any:
        return original(self, path) if get_strategy().topology is None else None

    return get_tensor_layout


# Optimizers.


def _aggregate_gradients(original: Any) -> Any:
    """Sum the gradients over the replicas, then apply one update for all of them."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        replica = replicas()
        if replica is None:
            with allow_reads():  # Keras uses jax.lax.cond with branches that are new in every call
                return original(self, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        _check_home(variables or [], replica.strategy)
        summed = _sum_gradients(self, list(grads), variables, replica)

        def merge(_: Any) -> None:
            with allow_reads():
                _apply_step(self, original, summed, variables)

        subject = {"the optimizer": self, "the variables": variables}
        return replica.merge_call(Merge(f"a step of {type(self).__name__}", merge, subject))

    return apply


_Program = tuple[list[Any], Any]
_programs: weakref.WeakKeyDictionary[Any, list[_Program]] = weakref.WeakKeyDictionary()
_MOST_PROGRAMS = 4  # compiled per optimizer; if its configuration keeps changing, run eagerly


def _apply_step(optimizer: Any, original: Any, grads: list[Any], variables: Any) -> None:
    """Apply an optimizer step; in eager code as one compiled program, if that is safe.

    It is safe if the step's configuration can be compared: see `_configuration`.
    """
    frame = current()
    is_eager = not (frame.level or frame.tapes or any(map(is_traced, grads)))
    if is_eager and variables is not None and not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    configuration = _configuration([optimizer, variables]) if is_eager and optimizer.built else []
    step = _program(optimizer, original, variables, configuration) if configuration else None
    if step is None:
        original(optimizer, grads, variables)
    else:
        step(grads)


def _program(optimizer: Any, original: Any, variables: Any, configuration: list[Any]) -> Any:
    """Return the compiled step for ``configuration``; None if there are too many already."""
    known = _programs.setdefault(optimizer, [])
    for old, step in known:
        if len(old) == len(configuration) and all(map(_is_same, old, configuration)):
            return step
    if len(known) == _MOST_PROGRAMS:
        return None
    proxy = weakref.proxy(optimizer)  # the program must not keep the optimizer alive
    step = function(lambda summed: original(proxy, summed, variables))
    known.append((configuration, step))
    return step


_CONFIGURED = (
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
    keras.constraints.Constraint,
)


def _configuration(x: Any) -> list[Any]:
    """Return everything that an optimizer's step depends on, except the values of variables.

    Return an empty list if it contains user code, which may have side effects or branch on values,
    and so must not be compiled.
    """
    found: list[Any] = []
    stack = [x]
    while stack:
        x = stack.pop()
        if isinstance(x, dict):
            stack += [*x.keys(), *x.values()]
        elif isinstance(x, list | tuple | set | frozenset):
            stack += x
        elif isinstance(x, keras.Variable):
            found.append(x)
            stack += [x.constraint, getattr(x, "overwrite_with_gradient", False)]
        elif isinstance(x, _CONFIGURED) and type(x).__module__.startswith("keras."):
            stack += vars(x).items()
        elif isinstance(x, _CONFIGURED) or callable(x):
            return []
        else:
            found.append(x)
    return found


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str) and a == b)


def _sum_gradients(optimizer: Any, grads: list[Any], variables: Any, replica: Any) -> list[Any]:
    known = variables if variables is not None else optimizer._trainable_variables
    at = [i for i, g in enumerate(grads) if g is not None]
    overwrite = [i for i in at if getattr(known[i], "overwrite_with_gradient", False)]
    for i in overwrite:  # float8 scaling statistics: take the maximum over the replicas
        grads[i] = replica.all_gather(jnp.asarray(grads[i])[None], axis=0).max(axis=0)
    at = [i for i in at if i not in overwrite]
    for i, g in zip(at, replica.all_reduce("SUM", [grads[i] for i in at]), strict=True):
        grads[i] = g
    return grads


def _check_home(variables: list[Any], strategy: Any) -> None:
    for v in variables:
        backing = variable_of(v)
        if backing is None or backing.distribute_strategy is not strategy:
            raise ScopeError(
                f"An optimizer steps in the replicas of {strategy}, but variable"
                f" {getattr(v, 'path', v)!r} was not made in its scope. Make the model in"
                " `with strategy.scope():`."
            )


def _shard_like_weight(original: Any) -> Any:
    """Shard an optimizer slot like its weight over the logical devices of each replica."""

    def add(
        self: Any, reference_variable: Any, name: Any = None, initializer: Any = "zeros"
    ) -> Any:
        backing = vars(reference_variable).get("_rx")
        with contextlib.nullcontext() if backing is None else laid_out_like(backing.cell):
            return original(self, reference_variable, name, initializer)

    return add


# Statistics.


def _synchronize_moments(original: Any) -> Any:
    """Support ``synchronized=True``: moments over the rows of all replicas, weighted by count."""

    def moments(
        x: Any,
        axes: Any,
        keepdims: bool = False,  # noqa: FBT001, FBT002 - Keras's signature
        synchronized: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        replica = replicas()
        if not synchronized or replica is None:
            return original(x, axes, keepdims, False)
        dtype, x, axes = x.dtype, x.astype(jnp.promote_types(x.dtype, jnp.float32)), tuple(axes)
        rows = jnp.asarray(np.prod([x.shape[a] for a in axes]), x.dtype)
        total, count = replica.sum_statistics([x.sum(axes, keepdims=True), rows])
        mean = total / count
        squares = jnp.square(x - mean).sum(axes, keepdims=True)
        (squares,) = replica.sum_statistics([squares])
        variance = squares / count
        return tuple(
            (m if keepdims else jnp.squeeze(m, axes)).astype(dtype) for m in (mean, variance)
        )

    return moments


# Control flow.


def _carry_variables(stateful: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace control flow by ``stateful``, which carries variables, in scopes and functions."""

    def make(original: Any) -> Any:
        def flow(*args: Any, **kwargs: Any) -> Any:
            frame = current()
            is_carried = (frame.level or frame.strategy) is not None and not in_stateless_scope()
            return (stateful if is_carried else original)(*args, **kwargs)

        return flow

    return make


def _while_loop(cond: Any, body: Any, loop_vars: Any, maximum_iterations: int | None = None) -> Any:
    several = isinstance(loop_vars, tuple | list)

    def proceed(state: Any) -> Any:
        count, values = state
        more = cond(*values)
        return more if maximum_iterations is None else more & (count < maximum_iterations)

    def iterate(state: Any) -> Any:
        count, values = state
        new = body(*values)
        return count + 1, tuple(new) if several else (new,)

    start = tuple(loop_vars) if several else (loop_vars,)
    _, values = while_loop(proceed, iterate, (jnp.int32(0), start))
    return values if several else values[0]


def _switch(index: Any, branches: Any, *operands: Any) -> Any:
    if len(branches) == 1:
        return branches[0](*operands)
    rest = lambda *xs: _switch(index - 1, branches[1:], *xs)  # noqa: E731
    return cond(jnp.asarray(index) <= 0, branches[0], rest, *operands)


def _fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any) -> Any:
    if isinstance(lower, int) and isinstance(upper, int) and lower < upper:
        steps = jnp.arange(lower, upper)  # reverse-mode gradients work for scan, not for while
        return scan(lambda value, i: (body_fun(i, value), None), init_val, steps)[0]
    return while_loop(
        lambda state: state[0] < upper,
        lambda state: (state[0] + 1, body_fun(*state)),
        (jnp.asarray(lower), init_val),
    )[1]


def _map(f: Any, xs: Any) -> Any:
    return scan(lambda carry, x: (carry, f(x)), (), xs)[1]


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.APPLY, _aggregate_gradients),
    (private.LOSS_SCALE_APPLY, _aggregate_gradients),
    (private.ADD_SLOT, _shard_like_weight),
    (private.INITIALIZE, _initialize_eagerly),
    (private.INITIALIZE_LAYOUT, _skip_layout),
    (private.TENSOR_LAYOUT, _skip_tensor_layout),
    (private.MOMENTS, _synchronize_moments),
    (private.COND, _carry_variables(cond)),
    (private.SCAN, _carry_variables(scan)),
    (private.WHILE_LOOP, _carry_variables(_while_loop)),
    (private.SWITCH, _carry_variables(_switch)),
    (private.FORI_LOOP, _carry_variables(_fori_loop)),
    (private.MAP, _carry_variables(_map)),
)
