"""Keras 3 in strategies: Keras variables are backed by `rx.Variable`, and some functions hooked.

All reads and writes of Keras go through one attribute of its variables, ``_value``. A descriptor
in its place stores the value of a variable created in a scope in an `rx.Variable`, which behaves in
traces and strategies like any other. The remaining hooks are for operations in which the replicas
must act together: optimizers, random seeds, control flow, building layers, and statistics. Without
a trace level or replica, every hook does what Keras does.
"""

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from replicax._src.base.errors import ScopeError
from replicax._src.base.types import TensorSpec, VariableAggregation, VariableSynchronization
from replicax._src.compat.jax import accept_as_array, at_rest, concrete, traced
from replicax._src.context.current import attributes, current, entered, get_strategy
from replicax._src.data.seeds import set_global_seed
from replicax._src.integrations import (
    keras_backend,
    keras_backup,
    keras_functional,
    keras_preprocessing,
    keras_tensorboard,
    keras_trainer,
)
from replicax._src.integrations import keras_private as private
from replicax._src.integrations.hook import refuse_in_scopes, replicas
from replicax._src.integrations.keras_models import remembering
from replicax._src.integrations.keras_private import (
    CONTRACT,
    get_input_signature,
    in_stateless_scope,
)
from replicax._src.integrations.keras_slots import find_part, find_slot
from replicax._src.integrations.registry import Integration
from replicax._src.state.declaration import is_planning, notify_of_new_variables
from replicax._src.state.levels import TraceLevel, is_transformed
from replicax._src.state.policy import Merge
from replicax._src.state.variable import Variable
from replicax._src.state.variables import allow_reads, read_global
from replicax._src.values.per_replica import plain
from replicax._src.values.placement import is_traced

# The storage.


class KerasBackedValue:
    """The descriptor for ``_value`` of Keras variables, which reads and writes the backing.

    The backing `rx.Variable` is in the instance's ``__dict__`` as ``_rx``. Without one, the value
    itself is there as ``_value``.
    """

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is None:
            return self
        CONTRACT.check_read(v)
        frame = current()
        needs_backing = frame.level is not None or frame.tapes
        backing = _backing_variable(v) if needs_backing else v.__dict__.get("_rx")
        if backing is None:
            if "_value" not in v.__dict__:
                raise AttributeError("_value")
            return v.__dict__["_value"]
        if not in_stateless_scope():
            return read_global(backing)
        # Here Keras only infers shapes, and keeps no values.
        if is_planning() and traced.value is not at_rest:
            return jnp.zeros(backing.shape, backing.dtype)  # of the trace: it takes no memory
        with allow_reads():
            return read_global(backing)

    def __set__(self, v: Any, x: Any) -> None:
        x = plain(x)
        backing = v.__dict__.get("_rx") if current().level is None else _backing_variable(v)
        is_new = v.__dict__.get("_value") is None
        if backing is not None:
            if x is not None:  # Keras's trainer assigns None to free memory
                _check_metric(v, backing)
                backing.assign(x)
        elif x is not None and is_new and get_strategy().topology is not None:
            with keras_backend.laid_out(v):
                v.__dict__["_rx"] = _variable(v, x)
        else:
            v.__dict__["_value"] = x


def _backing_variable(v: Any) -> Variable | None:
    """Return the `rx.Variable` behind a Keras variable.

    One is created for a variable with a concrete value that was created outside of scopes. Return
    None if the variable has no concrete value.
    """
    backing: Variable | None = v.__dict__.get("_rx")
    x = v.__dict__.get("_value")
    if backing is None and isinstance(x, jax.Array) and not is_traced(x):
        with (
            concrete(),
            entered(strategy=None, replica=None, level=None, body=None),
        ):
            backing = v.__dict__["_rx"] = _variable(v, x)
        del v.__dict__["_value"]
    return backing


def is_pending(v: Any) -> bool:
    """Whether a Keras variable has no value yet: Keras is inferring shapes."""
    return "_rx" not in v.__dict__ and v.__dict__.get("_value") is None


def _variable(v: Any, x: Any) -> Variable:
    on_read = v.synchronization == "on_read"
    variable = Variable(
        x,
        trainable=v.trainable and not on_read,
        name=v.path,
        synchronization=(
            VariableSynchronization.ON_READ if on_read else VariableSynchronization.AUTO
        ),
        aggregation=VariableAggregation[v.aggregation.upper()],
    )
    if on_read and (current().level or current().replica) is None and np.any(np.asarray(x)):
        variable.assign(x)  # the initial value is the total, not that of each replica's copy
    if v.aggregation == "none" and not v.trainable and jnp.issubdtype(x.dtype, jnp.inexact):
        variable.cell.averages = True  # moving statistics of batch normalization
    return variable


def _check_metric(v: Any, backing: Variable) -> None:
    """Raise `ScopeError` if replicas update a metric that was created outside of their scope.

    They would all add to one number, where each needs a copy.
    """
    if v.synchronization == "on_read" and backing.topology is None and replicas() is not None:
        raise ScopeError(
            f"Variable {v.path!r} of a metric is updated by the replicas of {get_strategy()}, but"
            " the metric was made outside of its scope, and would count what one of them saw. Make"
            " it in `with strategy.scope():`."
        )


def _state(v: Any) -> dict[str, Any]:
    """Return the state for pickling a variable: its value, without its placement."""
    state = dict(v.__dict__)
    backing = state.pop("_rx", None)
    return state if backing is None else {**state, "_value": backing.numpy()}


def _set_state(v: Any, state: dict[str, Any]) -> None:
    value = state.pop("_value", None)
    v.__dict__.update(state)
    v._value = value if value is None else jnp.asarray(value)


def _copied(v: Any, memo: dict[int, Any]) -> Any:
    """Deep-copy a variable within the strategy that it belongs to."""
    backing = v.__dict__.get("_rx")
    home = None if backing is None or backing.topology is None else backing.distribute_strategy
    twin = memo[id(v)] = object.__new__(type(v))
    with entered(strategy=home):
        _set_state(twin, copy.deepcopy(_state(v), memo))
    return twin


# Hooks. Each function takes the original function of Keras and returns its replacement.


def _mix_in_replica(original: Any) -> Any:
    """Mix the replica id into drawn seeds: replicas draw different numbers from equal states."""

    def draw(self: Any, ordered: bool = True) -> Any:  # noqa: FBT001, FBT002 - Keras's signature
        replica = replicas()
        backing = None
        if replica is not None or isinstance(current().level, TraceLevel):
            backing = _backing_variable(self.state)
        if backing is not None:  # the drawn numbers may be the initial value of a variable
            backing.cell.draws = True
        if replica is None:
            return original(self, ordered)
        if (
            backing is None
            or backing.topology is not None
            or isinstance(current().level, TraceLevel)
        ):
            seed = original(self, ordered)
        else:  # all replicas' threads share one state, which must advance once
            step = Merge(
                f"a seed of {self.name}",
                lambda _: original(self, ordered),
                {"the seed generator": self},
                once=True,
            )
            seed = replica.merge_call(step)
        number = jnp.asarray(replica.replica_id_in_sync_group, jnp.uint32)
        return seed.at[0].add((number * jnp.uint32(0x9E3779B9)).astype(seed.dtype))

    return draw


_making_global_seed = threading.Lock()


def _allow_unseeded(original: Any) -> Any:
    """Allow unseeded random operations in scopes and in functions, which carry the seed's state.

    Keras refuses them in traces, where the seed would become a constant. It still does in its
    stateless functions and under `jax.jit`.
    """

    def global_seed_generator() -> Any:
        is_carried = current().level is not None and not in_stateless_scope()
        with (
            _making_global_seed,  # replicas' threads must not create two
            concrete() if is_carried else contextlib.nullcontext(),
            entered(strategy=None, replica=None, level=None, body=None),
        ):
            return original()

    return global_seed_generator


def _seed_all(original: Any) -> Any:
    """Also seed `rx.random` and the datasets, as Keras seeds TensorFlow on every backend."""
    seed_before = CONTRACT.get(private.GET_SEED)()
    if seed_before is not None:
        set_global_seed(seed_before)

    def set_random_seed(seed: int) -> None:
        original(seed)
        set_global_seed(seed)

    return set_random_seed


def _build_once(original: Any) -> Any:
    """Build a layer once for all eager replicas, which would otherwise each create weights."""

    def maybe_build(self: Any, call_spec: Any) -> Any:
        if self.built:
            return original(self, call_spec)
        replica = replicas()
        if replica is None or isinstance(current().level, TraceLevel):
            built = original(self, call_spec)
        else:
            build = lambda _: original(self, call_spec)  # noqa: E731
            merge = Merge(f"the building of {self.name}", build, {"the layer": self}, once=True)
            built = replica.merge_call(merge)
        notify_of_new_variables()
        return built

    return maybe_build


class Losses:
    """The descriptor for ``_losses`` of Keras layers: a separate list per replica and trace.

    The lists are dropped with their replica or trace, because they may contain tracers.
    """

    def __init__(self) -> None:
        self._by_owner: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None:
            return self
        level = current().level
        owner = replicas() or (level if isinstance(level, TraceLevel) else None)
        if owner is not None:
            return self._by_owner.setdefault(owner, {}).setdefault(id(layer), [])
        losses = layer.__dict__["_losses"]
        if losses and not is_transformed() and any(map(is_traced, losses)):
            losses.clear()
        return losses

    def __set__(self, layer: Any, losses: Any) -> None:
        layer.__dict__["_losses"] = losses


def _accept_synchronized(original: Any) -> Any:
    """Accept ``synchronized=True`` in batch normalization, which Keras refuses on JAX."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        synchronized = bound.arguments.pop("synchronized", False)
        original(*bound.args, **bound.kwargs)
        self.synchronized = synchronized

    return init


_MEANS = ("mean", "mean_with_sample_weight", "sum_over_batch_size")


def _note_means(original: Any) -> Any:
    """Record losses that are means over one replica's rows; see `note_local_mean`."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, replica = original(self, *args, **kwargs), replicas()
        if replica is not None and self.reduction in _MEANS:
            replica.note_local_mean(loss)
        return loss

    return call


REPLACEMENTS = (
    (private.NEXT_SEED, _mix_in_replica),
    (private.GLOBAL_SEED, _allow_unseeded),
    (private.SET_SEED, _seed_all),
    (private.MAYBE_BUILD, _build_once),
    (private.NORMALIZATION, _accept_synchronized),
    *keras_backend.REPLACEMENTS,
    *keras_trainer.REPLACEMENTS,
    *keras_backup.REPLACEMENTS,
    *keras_preprocessing.REPLACEMENTS,
    *keras_tensorboard.REPLACEMENTS,
)


def _forward(model: Any) -> tuple[Any, Any]:
    """Return a model's forward pass and its argument specs, for `rx.saved_model.save`.

    Raises:
        ValueError: The input shapes of the model are unknown.
    """
    CONTRACT.require(private.SAVED_MODEL)
    try:
        inputs = get_input_signature(model)
    except ValueError as error:
        raise ValueError(
            f"The inputs of model {model.name!r} are not known yet ({error}). Call it once on a"
            " batch, fit it, or begin it with `keras.Input(shape)`, before it is saved."
        ) from None
    specs = keras.tree.map_structure(lambda s: TensorSpec(s.shape, s.dtype), inputs)
    return functools.partial(model, training=False), specs


def _record_trainable(trainable: Any) -> Any:
    """Record changes of ``trainable``, so compiled functions that depend on it are retraced."""

    def freeze(self: Any, value: Any) -> None:
        before = trainable.fget(self)
        trainable.fset(self, value)
        if current().level is None:
            attributes.note(self, "trainable", before, trainable.fget(self))

    return property(trainable.fget, freeze, doc=trainable.__doc__)


def _check_init(original: Any) -> Any:
    """Check that the constructor of a variable stored its value through the descriptor."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_stored = "_rx" in self.__dict__ or "_value" in self.__dict__
        if not is_stored and get_strategy().topology is not None:
            fault = f"keeps the value of {self.path!r} elsewhere than in {private.VALUE.place}"
            raise ScopeError(CONTRACT.explain(private.VARIABLES, fault))

    return init


def _export_current_values(export: Any) -> Any:
    """Allow an export to read variables while it traces: the file keeps their current values."""

    @functools.wraps(export)
    def export_values(self: Any, *args: Any, **kwargs: Any) -> Any:
        with allow_reads():
            return export(self, *args, **kwargs)

    return export_values


def attach() -> Integration:
    """Attach the hooks to Keras; if its version is unsupported, refuse variables in scopes."""
    variable: Any = keras.Variable
    metric: Any = keras.metrics.Metric
    model: Any = keras.Model
    variables = {keras.Variable: _backing_variable}
    why = _why_not()
    if not why:
        CONTRACT.attach(REPLACEMENTS)
        why = CONTRACT.lacks(private.VARIABLES)
    if why:
        variable.__init__ = refuse_in_scopes(variable.__init__, "A Keras variable", why.rstrip("."))
        return Integration(variables, pending={variable: is_pending})
    variable.__init__ = _check_init(variable.__init__)
    variable._value = KerasBackedValue()
    variable.__getstate__, variable.__setstate__ = _state, _set_state
    variable.__deepcopy__ = _copied
    variable.__array_priority__ = Variable.__array_priority__
    operation: Any = keras.Operation
    operation.compute_output_spec = keras_functional.inferring(operation.compute_output_spec)
    keras.losses.Loss.__call__ = _note_means(keras.losses.Loss.__call__)
    accept_as_array(keras.Variable, lambda v: jax.typeof(v.value), lambda v: v.value)
    if not CONTRACT.lacks(private.LOSSES):
        keras.Layer._losses = Losses()
    keras.Layer.trainable = _record_trainable(keras.Layer.trainable)
    variable.trainable = _record_trainable(variable.trainable)
    model.__new__ = functools.wraps(model.__new__)(remembering(model.__new__))
    model.export = _export_current_values(model.export)
    for name, value in keras_trainer.OLDER_ATTRIBUTES.items():
        if not hasattr(model, name):
            setattr(model, name, value)
    if not hasattr(metric, "reset_states"):  # Keras 2's name
        metric.reset_states = lambda self: self.reset_state()
    return Integration(
        variables,
        pending={variable: is_pending},
        bookkeeping=dict.fromkeys((keras.Operation, keras.Metric, keras.Loss), private.RECORDS),
        exports={keras.Model: _forward},
        checkpoint_children={keras.optimizers.Optimizer: find_part},
        checkpoint_slots={keras.optimizers.Optimizer: find_slot},
    )


def _why_not() -> str:
    """Return why this configuration of Keras is unsupported; an empty string if it is supported."""
    if keras.backend.backend() != "jax":
        return (
            f"Keras runs on {keras.backend.backend()}. Set KERAS_BACKEND=jax in the environment of"
            ' the program, or write `os.environ["KERAS_BACKEND"] = "jax"` before the first import'
            " of keras"
        )
    if keras.config.is_nnx_enabled():
        return (
            "Keras keeps its variables in Flax NNX. Start the program without KERAS_NNX_ENABLED;"
            " models of both libraries may be used side by side without it"
        )
    return ""
