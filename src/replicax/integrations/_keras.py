"""Keras 3 in strategies: its variables hold an rx.Variable, and a few of its functions are hooked.

Everything that Keras reads and writes ends at one attribute of its variables, ``_value``. A
descriptor in its place keeps the value of a variable that was made in a scope in an `rx.Variable`,
and from there on levels and policies do what they do for every other. The rest is where n replicas
must act as one: optimizers, random seeds, control flow, the building of layers, and statistics.
All hooks do what Keras does where there is no level and no replica.
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

from replicax._errors import ScopeError
from replicax._jax_private import accept_as_array, concrete
from replicax._types import TensorSpec, VariableAggregation, VariableSynchronization
from replicax.context._current import attributes, current, entered, get_strategy
from replicax.data._seeds import set_global_seed
from replicax.integrations import (
    _keras_backend,
    _keras_backup,
    _keras_preprocessing,
    _keras_trainer,
)
from replicax.integrations import _keras_private as private
from replicax.integrations._hook import refused, replicas
from replicax.integrations._keras_models import remembering
from replicax.integrations._keras_private import CONTRACT, get_input_signature, in_stateless_scope
from replicax.integrations._keras_slots import find_part, find_slot
from replicax.state._declaration import tell_newcomers
from replicax.state._held import read_global, trusted
from replicax.state._levels import TraceLevel, is_transformed
from replicax.state._policy import Merge
from replicax.state._variable import Variable
from replicax.values._per_replica import plain
from replicax.values._placement import is_traced

# The storage.


class KerasHeldValue:
    """``_value`` of a Keras variable: in the object, or in the variable that it holds."""

    def __get__(self, v: Any, owner: Any = None) -> Any:
        if v is None:
            return self
        CONTRACT.check_read(v)
        frame = current()
        meets = frame.level is not None or frame.tapes
        held = _held(v) if meets else v.__dict__.get("_rx")
        if held is None:
            if "_value" not in v.__dict__:
                raise AttributeError("_value")
            return v.__dict__["_value"]
        if not in_stateless_scope():
            return read_global(held)
        with trusted():  # Keras infers shapes, and keeps nothing but them
            return read_global(held)

    def __set__(self, v: Any, x: Any) -> None:
        x = plain(x)
        held = v.__dict__.get("_rx") if current().level is None else _held(v)
        is_new = v.__dict__.get("_value") is None
        if held is not None:
            if x is not None:  # the trainer's way to free memory
                _check_metric(v, held)
                held.assign(x)
        elif x is not None and is_new and get_strategy().topology is not None:
            with _keras_backend.laid_out(v):
                v.__dict__["_rx"] = _variable(v, x)
        else:
            v.__dict__["_value"] = x


def _held(v: Any) -> Variable | None:
    """The variable that holds a Keras variable's value, also if it was made outside of scopes."""
    held: Variable | None = v.__dict__.get("_rx")
    x = v.__dict__.get("_value")
    if held is None and isinstance(x, jax.Array) and not is_traced(x):
        with (
            concrete(),
            entered(strategy=None, replica=None, level=None, body=None),
        ):
            held = v.__dict__["_rx"] = _variable(v, x)
        del v.__dict__["_value"]
    return held


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
        variable.assign(x)  # what all copies have together, as on one device
    if v.aggregation == "none" and not v.trainable and jnp.issubdtype(x.dtype, jnp.inexact):
        variable.cell.averages = True  # the statistics of batch normalization
    return variable


def _check_metric(v: Any, held: Variable) -> None:
    """Refuse that replicas add to one number where each should have its own."""
    if v.synchronization == "on_read" and held.topology is None and replicas() is not None:
        raise ScopeError(
            f"Variable {v.path!r} of a metric is updated by the replicas of {get_strategy()}, but"
            " the metric was made outside of its scope, and would count what one of them saw. Make"
            " it in `with strategy.scope():`."
        )


def _state(v: Any) -> dict[str, Any]:
    """What a pickle of a variable has: its value, but not where it lives."""
    state = dict(v.__dict__)
    held = state.pop("_rx", None)
    return state if held is None else {**state, "_value": held.numpy()}


def _set_state(v: Any, state: dict[str, Any]) -> None:
    value = state.pop("_value", None)
    v.__dict__.update(state)
    v._value = value if value is None else jnp.asarray(value)


def _copied(v: Any, memo: dict[int, Any]) -> Any:
    held = v.__dict__.get("_rx")
    home = None if held is None or held.topology is None else held.distribute_strategy
    twin = memo[id(v)] = object.__new__(type(v))
    with entered(strategy=home):
        _set_state(twin, copy.deepcopy(_state(v), memo))
    return twin


# Where replicas act as one.


def _drawn_apart(original: Any) -> Any:
    """Each replica draws its own numbers, from a state that is the same on all."""

    def draw(self: Any, ordered: bool = True) -> Any:  # noqa: FBT001, FBT002 - Keras's signature
        replica = replicas()
        held = None
        if replica is not None or isinstance(current().level, TraceLevel):
            held = _held(self.state)
        if held is not None:  # what is drawn may be the initial value of a variable
            held.cell.draws = True
        if replica is None:
            return original(self, ordered)
        if held is None or held.topology is not None or isinstance(current().level, TraceLevel):
            seed = original(self, ordered)
        else:  # one state for all threads, which must step once
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


def _carried_seed(original: Any) -> Any:
    """Let unseeded operations draw in every scope, and in functions, which carry the state.

    Keras refuses them in traces, where the seed would become a constant. It still does in those of
    its stateless functions and of `jax.jit`.
    """

    def global_seed_generator() -> Any:
        is_carried = current().level is not None and not in_stateless_scope()
        with (
            _making_global_seed,  # by one of several replicas
            concrete() if is_carried else contextlib.nullcontext(),
            entered(strategy=None, replica=None, level=None, body=None),
        ):
            return original()

    return global_seed_generator


def _seeding_all(original: Any) -> Any:
    """Seed `rx.random` and the datasets too, as Keras seeds TensorFlow on every backend."""
    seed_before = CONTRACT.get(private.GET_SEED)()
    if seed_before is not None:
        set_global_seed(seed_before)

    def set_random_seed(seed: int) -> None:
        original(seed)
        set_global_seed(seed)

    return set_random_seed


def _built_once(original: Any) -> Any:
    """Eager replicas build a layer once for all; each would track weights of its own."""

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
        tell_newcomers()
        return built

    return maybe_build


class Losses:
    """``_losses`` of a Keras layer: each replica and trace has its own, and none outlives it."""

    def __init__(self) -> None:
        self._own: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def __get__(self, layer: Any, owner: Any = None) -> Any:
        if layer is None:
            return self
        level = current().level
        owner = replicas() or (level if isinstance(level, TraceLevel) else None)
        if owner is not None:
            return self._own.setdefault(owner, {}).setdefault(id(layer), [])
        losses = layer.__dict__["_losses"]
        if losses and not is_transformed() and any(map(is_traced, losses)):
            losses.clear()
        return losses

    def __set__(self, layer: Any, losses: Any) -> None:
        layer.__dict__["_losses"] = losses


def _synchronizable(original: Any) -> Any:
    """Keras refuses synchronized batch normalization on JAX; here it is there."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        synchronized = given.arguments.pop("synchronized", False)
        original(*given.args, **given.kwargs)
        self.synchronized = synchronized

    return init


REPLACEMENTS = (
    (private.NEXT_SEED, _drawn_apart),
    (private.GLOBAL_SEED, _carried_seed),
    (private.SET_SEED, _seeding_all),
    (private.MAYBE_BUILD, _built_once),
    (private.NORMALIZATION, _synchronizable),
    *_keras_backend.REPLACEMENTS,
    *_keras_trainer.REPLACEMENTS,
    *_keras_backup.REPLACEMENTS,
    *_keras_preprocessing.REPLACEMENTS,
)


def _forward(model: Any) -> tuple[Any, Any]:
    """What `rx.saved_model.save` saves of a model: its forward pass, and what it takes."""
    CONTRACT.require(private.SAVED_MODEL)
    try:
        inputs = get_input_signature(model)
    except ValueError as error:
        raise ValueError(
            f"What model {model.name!r} takes is not known yet ({error}). Call it once on a batch,"
            " fit it, or begin it with `keras.Input(shape)`, before it is saved."
        ) from None
    specs = keras.tree.map_structure(lambda s: TensorSpec(s.shape, s.dtype), inputs)
    return functools.partial(model, training=False), specs


def _known_to_functions(trainable: Any) -> Any:
    """What is frozen after a function was compiled is frozen in it."""

    def freeze(self: Any, value: Any) -> None:
        before = trainable.fget(self)
        trainable.fset(self, value)
        if current().level is None:
            attributes.note(self, "trainable", before, trainable.fget(self))

    return property(trainable.fget, freeze, doc=trainable.__doc__)


def _kept(original: Any) -> Any:
    """Check that the value of a variable made in a scope went to where it is distributed."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        is_kept = "_rx" in self.__dict__ or "_value" in self.__dict__
        if not is_kept and get_strategy().topology is not None:
            fault = f"keeps the value of {self.path!r} elsewhere than in {private.VALUE.place}"
            raise ScopeError(CONTRACT.explain(private.VARIABLES, fault))

    return init


def install() -> None:
    """Attach to Keras, once it is imported, or refuse its variables in scopes."""
    variable: Any = keras.Variable
    metric: Any = keras.metrics.Metric
    model: Any = keras.Model
    if "__rx_variable__" in variable.__dict__:
        return
    variable.__rx_variable__ = _held
    why = _why_not()
    if not why:
        CONTRACT.attach(REPLACEMENTS)
        why = CONTRACT.lacks(private.VARIABLES)
    if why:
        variable.__init__ = refused(variable.__init__, "A Keras variable", why.rstrip("."))
        return
    variable.__init__ = _kept(variable.__init__)
    variable._value = KerasHeldValue()
    variable.__getstate__, variable.__setstate__ = _state, _set_state
    variable.__deepcopy__ = _copied
    accept_as_array(keras.Variable, lambda v: jax.typeof(v.value), lambda v: v.value)
    if not CONTRACT.lacks(private.LOSSES):
        keras.Layer._losses = Losses()
    keras.Layer.trainable = _known_to_functions(keras.Layer.trainable)
    variable.trainable = _known_to_functions(variable.trainable)
    model.__new__ = functools.wraps(model.__new__)(remembering(model.__new__))
    model.__rx_export__ = _forward
    optimizer: Any = keras.optimizers.Optimizer
    optimizer.__rx_part__, optimizer.__rx_slot__ = find_part, find_slot
    if not hasattr(metric, "reset_states"):  # as Keras 2 called it
        metric.reset_states = lambda self: self.reset_state()


def _why_not() -> str:
    """Say what keeps this Keras from being distributed at all; empty if nothing does."""
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


install()
