"""`fit`, `evaluate` and `predict` of Keras models created in a scope, on all replicas.

The step that Keras would compile with `jax.jit` is compiled by `rx.function`, with batches sharded
over the replicas: XLA partitions the work, and the results are those of one device. A batch whose
rows do not divide evenly is replicated, and computed in full by every replica. Weights stay in
their variables throughout, where callbacks see them.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np
from keras import Model, metrics, tree

from replicax._src.base.errors import ScopeError, TracingError, warn_user
from replicax._src.context.current import current, entered, get_strategy, is_default
from replicax._src.functions.function import function
from replicax._src.functions.gradients import keep_writes
from replicax._src.input.distributed_dataset import DistributedDataset
from replicax._src.integrations import keras_private as private
from replicax._src.integrations.keras_data import DatasetAdapter, adapted, placed, whole
from replicax._src.integrations.keras_models import home_of
from replicax._src.state.levels import Overlay, current_trace, inferring_shapes, is_staging
from replicax._src.state.variables import variable_of
from replicax._src.strategy.base import StrategyBase, live_strategies
from replicax._src.workers import group as _group

# Entering the scope.

_running: ContextVar[str] = ContextVar("replicax_keras_method", default="")
_STEPS = {
    "fit": "train_step",
    "train_on_batch": "train_step",
    "evaluate": "test_step",
    "test_on_batch": "test_step",
}


def _enter_scope(name: str) -> Callable[[Any], Any]:
    """Run a method of a model in the model's scope, because it creates slots and metrics.

    The wrapped method raises `ScopeError` in the scope of another strategy.
    """

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            _check_outside(self, name)
            home, here = home_of(self), get_strategy()
            if not is_default(here) and home is not here:
                raise ScopeError(_wrong_scope(self, name, home, here))
            if home is None:
                _warn_of_unused_strategy(self, name)
                token = _running.set(name)
                try:
                    return original(self, *args, **kwargs)
                finally:
                    _running.reset(token)
            bound = signature.bind(self, *args, **kwargs)
            if "verbose" in signature.parameters and not home.is_chief:
                _silence(bound)
            with home.scope():
                _check_parts(self, home, bound.arguments)
                if name == "fit":
                    _agree_on_order(home)
                if name == "predict" and isinstance(bound.arguments.get("x"), DistributedDataset):
                    _put_in_order(bound, home)
                token = _running.set(name)
                try:
                    return original(*bound.args, **bound.kwargs)
                finally:
                    _running.reset(token)

        return method

    return make


def _check_outside(model: Any, name: str) -> None:
    """Raise `ScopeError` if a method that distributes batches is called on a replica."""
    replica = current().replica
    if name == "compile" or replica is None or is_default(replica.strategy):
        return
    raise ScopeError(
        f"`{name}` of model {model.name!r} was called in a replica function. Call it outside of"
        " `strategy.run`: it divides each batch over the replicas itself. In `strategy.run`, call"
        " the model, `model(x, training=True)`, and apply the gradients."
    )


def _warn_of_unused_strategy(model: Any, method: str) -> None:
    """Warn that `fit` uses one device, if a strategy for several exists.

    There is no warning after a strategy was used: then a model outside of scopes is intended.
    """
    if method != "fit" or StrategyBase.is_any_used:
        return
    several = (s for s in list(live_strategies) if s.num_replicas_in_sync > 1)
    if (strategy := next(several, None)) is not None:
        warn_user(
            f"Model {model.name!r} was made outside of every scope and trains on one device,"
            f" though {strategy} has {strategy.num_replicas_in_sync} replicas. To train on all"
            " of them, make and compile the model in its scope:\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )


def _explain_optax(original: Any) -> Any:
    """Explain Keras's refusal of an Optax optimizer."""

    @functools.wraps(original)
    def compile_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            given = [*args[:1], kwargs.get("optimizer")]
            if any(hasattr(x, "init") and hasattr(x, "update") for x in given):
                error.add_note(
                    "This is an Optax optimizer, and `compile` takes those of Keras:"
                    " `rx.keras.optimizers.Adam(0.001)` and others. To use Optax, write the"
                    " training loop with `strategy.run`."
                )
            raise

    return compile_model


def _explain_data(original: Any) -> Any:
    """Explain Keras's errors for lists and for missing targets."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ValueError as error:
            given = signature.bind(self, *args, **kwargs).arguments
            x, y = given.get("x"), given.get("y")
            if "Unrecognized data type" in str(error) and any(isinstance(v, list) for v in (x, y)):
                error.add_note("Keras takes arrays, no lists of numbers: write `numpy.asarray(x)`.")
            elif "None is not a valid value" in str(error) and y is None:
                error.add_note(
                    "The loss got no targets: pass them as `y`, or in the dataset, whose elements"
                    " are then (inputs, targets)."
                )
            raise

    return method


def _silence(bound: inspect.BoundArguments) -> None:
    """Disable the progress bar, which only the first worker shows."""
    if bound.arguments.get("verbose", "auto") in ("auto", 1):
        bound.arguments["verbose"] = 0


def _put_in_order(bound: inspect.BoundArguments, home: Any) -> None:
    """Make `predict` return rows in the order they had before they were distributed to workers."""
    if not home.topology.is_fully_addressable and len(home.topology.local_replicas) > 1:
        bound.arguments["x"] = DatasetAdapter(bound.arguments["x"], home, was_dealt=True)


def _agree_on_order(strategy: Any) -> None:
    """Seed NumPy alike on all workers, because Keras shuffles rows with NumPy's global state."""
    if not strategy.topology.is_fully_addressable:
        seeds = _group.required().agree("the order of rows", int(np.random.randint(2**31)))
        np.random.seed(seeds[0])


def _wrong_scope(model: Any, name: str, home: Any, here: Any) -> str:
    made = "outside of every scope" if home is None else f"in that of another, {home}"
    return (
        f"`{name}` of model {model.name!r} was called in the scope of {here}, but the model was"
        f" made {made}. Make the model, and compile it, in the scope that it is trained in:\n"
        "    with strategy.scope():\n        model = ...\n        model.compile(...)"
    )


def _check_parts(model: Any, home: Any, bound: dict[str, Any]) -> None:
    """Raise `ScopeError` if an optimizer, metric or variable does not belong to ``home``.

    This reads the attributes in which Keras tracks them. Properties such as `metrics` may be
    overridden by the user, and name parts that `compile` or `build` create later.
    """
    optimizer = bound.get("optimizer", vars(model).get("optimizer"))
    metrics = tree.flatten([bound.get("metrics"), bound.get("weighted_metrics")])
    parts = [("optimizer", optimizer), *(("metric", metric) for metric in metrics)]
    layers = [model]
    seen = {id(model)}
    for layer in layers:
        tracked = vars(layer)
        parts += (("metric", metric) for metric in tracked.get("_metrics", ()))
        for v in _variables_of_layer(tracked):
            _check_part(v, home, f"Variable {v.path!r} of model {model.name!r}")
        new = [other for other in tracked.get("_layers", ()) if id(other) not in seen]
        seen.update(map(id, new))
        layers += new
    for kind, part in parts:
        name = f"The {kind} {getattr(part, 'name', part)!r} of model {model.name!r}"
        for v in _variables_of(part):
            _check_part(v, home, name)


def _variables_of_layer(tracked: dict[str, Any]) -> list[Any]:
    weights = tracked.get("_trainable_variables", ())
    seeds = (seed.state for seed in tracked.get("_seed_generators", ()))
    return [*weights, *tracked.get("_non_trainable_variables", ()), *seeds]


def _variables_of(part: Any) -> list[Any]:
    """Return the variables of an optimizer or a metric, including a wrapped one's."""
    tracked = getattr(part, "__dict__", {})
    inner = [tracked.get("inner_optimizer"), *tracked.get("_metrics", ())]
    wrapped = [v for other in inner if other is not None for v in _variables_of(other)]
    return [*tracked.get("_variables", ()), *wrapped]


def _check_part(v: Any, home: Any, what: str) -> None:
    has_value = "_rx" in v.__dict__ or v.__dict__.get("_value") is not None
    backing = variable_of(v) if has_value else None
    if backing is not None and backing.distribute_strategy is not home:
        raise ScopeError(
            f"{what} was made in another scope than the model, which belongs to {home}. Make it in"
            " `with strategy.scope():` too, or pass it to `compile` by name (`optimizer='adam'`,"
            " `metrics=['accuracy']`)."
        )


# The steps.


def _return_empty_state(original: Any) -> Any:
    """Return empty state: it stays in the variables, and is not passed through the step."""

    def get_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _keeps_state(self):
            return original(self, *args, **kwargs)
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        return tuple(
            []
            for name, wanted in arguments.items()
            if name.endswith("_variables") and wanted and not name.startswith("purge")
        )

    return get_state


_GROUPS = {
    "train": ("trainable_variables", "non_trainable_variables", "optimizer", "metrics_variables"),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


def _keeps_state(model: Any) -> bool:
    """Whether the steps of a model use its variables, instead of passing state in and out.

    This holds for models created in a scope, and for all steps with TensorFlow's signature.
    """
    steps = ("train_step", "test_step", "predict_step")
    return home_of(model) is not None or any(
        _has_tensorflow_signature(getattr(model, name)) for name in steps
    )


def _placement(topology: Any, *, is_compiled: bool) -> Callable[[Any, Any], Any]:
    """Return the function that places the batches of a step on devices."""
    if topology is None:
        return _as_arrays
    return placed if is_compiled or topology.is_fully_addressable else whole


def _as_arrays(data: Any, topology: Any) -> Any:
    """Return a batch as JAX's arrays, which a step that runs eagerly expects; texts stay."""

    def made(x: Any) -> Any:
        is_number = isinstance(x, np.ndarray) and x.dtype.kind not in "OSU"
        return jax.numpy.asarray(x) if is_number else x

    return jax.tree.map(made, data)


def _with_variables(model: Any, kind: str, made: Any) -> Any:
    """Adapt the step function of a model outside of scopes to layers with variables of replicax.

    Layers that draw random numbers with `rx.random`, or have an `rx.Variable`, cannot be traced by
    `jax.jit`. If that is found when the first step is traced, `rx.function` compiles the steps.
    """
    if model.run_eagerly or not model.jit_compile:
        return made
    attribute = f"{kind}_function"

    def first(state: Any, iterator: Any) -> Any:
        taken: list[Any] = []
        try:
            result = made(state, _recorded(iterator, taken))
        except TracingError:
            joins = kind == "predict"
            step = function(_predicting(model) if joins else getattr(model, f"{kind}_step"))
            setattr(model, attribute, model._make_function(step, concatenate_outputs=joins))
            return getattr(model, attribute)(state, itertools.chain(taken, iterator))
        setattr(model, attribute, made)
        return result

    return first


def _predicting(model: Any) -> Callable[..., Any]:
    """Return the step of `predict`, with the state that the next step takes."""

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        outputs, new = model.predict_step(state, data)
        return outputs, (state[0], new)

    return step


def _recorded(iterator: Iterator[Any], taken: list[Any]) -> Iterator[Any]:
    for batch in iterator:
        taken.append(batch)
        yield batch


def _compile_with_function(kind: str) -> Callable[[Any], Any]:
    """Compile the train, test or predict function of a model with `rx.function`."""
    attribute = f"{kind}_function"

    def make(original: Any) -> Any:
        def make_function(self: Any, force: bool = False) -> None:  # noqa: FBT001, FBT002
            if getattr(self, attribute) is not None and not force:
                return
            if not _keeps_state(self):
                original(self, force)
                setattr(self, attribute, _with_variables(self, kind, getattr(self, attribute)))
                return
            home = home_of(self)
            topology = None if home is None else home.topology
            run, is_compiled = _step(self, kind), self.jit_compile and not self.run_eagerly
            if is_compiled:
                run = function(run, reduce_retracing=True)
            place = _placement(topology, is_compiled=is_compiled)

            def one(state: Any, data: Any) -> tuple[Any, Any]:
                return run(place(data, topology)), state

            joins = kind == "predict"
            setattr(self, attribute, self._make_function(one, concatenate_outputs=joins))

        return make_function

    return make


def _step(model: Any, kind: str) -> Callable[[Any], Any]:
    """Return a function of a batch that runs one step of ``model`` on its variables."""
    method = getattr(model, f"{kind}_step")
    is_called = _has_tensorflow_signature(method)

    def step(data: Any) -> Any:
        level, home = current().level, home_of(model)
        if level is not None and home is not None:  # even if the model has no variables
            level.uses(home.topology, f"model {model.name!r}")
        if not is_called:
            return _stateless_step(model, kind, method, data)
        outputs = method(data)
        if not model.built and type(model).build is Model.build:
            # The step has built the layers by calling them, but did not call the model itself.
            # Keras does not save the weights of a model that is not marked as built.
            model.built = True
        return outputs

    step.__name__ = step.__qualname__ = f"{kind}_step"
    return step


def _has_tensorflow_signature(step: Callable[..., Any]) -> bool:
    """Whether a step has TensorFlow's signature ``step(data)``, and so updates variables itself."""
    known = inspect.signature(step).parameters.values()
    by_place = [p for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in by_place if p.default is p.empty]
    return len(needed) == 1 and all(p.name != "data" for p in by_place[1:])


def _accept_tensorflow_step(kind: str) -> Callable[[Any], Any]:
    """Let a user's step with TensorFlow's signature call ``super().train_step(data)``."""

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not _keeps_state(self) or len(args) + len(kwargs) != 1:
                return original(self, *args, **kwargs)
            return _stateless_step(self, kind, partial(original, self), *args, **kwargs)

        return step

    return make


def _skip_symbolic_build(original: Any) -> Any:
    """Do not build the model before a step with TensorFlow's signature, whose first call does.

    Keras would build the model by calling it on the data. Such a step may call it on something
    else, and some models, such as a GAN, cannot be called.
    """

    def symbolic_build(self: Any, *args: Any, **kwargs: Any) -> None:
        step = _STEPS.get(_running.get(), "")
        builds = step and _has_tensorflow_signature(getattr(self, step))
        if not _keeps_state(self) or not (builds or type(self).call is Model.call):
            with inferring_shapes():
                original(self, *args, **kwargs)

    return symbolic_build


def _stateless_step(model: Any, kind: str, step: Callable[..., Any], data: Any) -> Any:
    """Run Keras's stateless step: read the variables, compute, and assign changed values."""
    groups = [
        model.optimizer.variables if name == "optimizer" else getattr(model, name)
        for name in _GROUPS[kind]
    ]
    old = tuple([v.value for v in group] for group in groups)
    outputs, new = step(old, data)
    if kind == "predict":  # it returns only the non-trainable variables
        new = (old[0], new)
    for group, before, after in zip(groups, old, new, strict=True):
        for v, a, b in zip(group, before, after, strict=True):
            if a is not b:
                v.assign(b)
    return outputs


@jax.tree_util.register_pytree_node_class
class _WithWrites:
    """The auxiliary output of a loss function, and its writes to variables.

    Keras differentiates the loss with JAX, which does not carry writes; they take effect when
    Keras unpacks this, in the trace around the loss.
    """

    def __init__(self, aux: Any, values: list[Any], overlay: Overlay) -> None:
        self._parts = aux, values
        self._overlay = overlay

    def __iter__(self) -> Iterator[Any]:
        """Apply the writes, and iterate over the auxiliary output that Keras unpacks."""
        aux, values = self._parts
        keep_writes(self._overlay, values)
        return iter(aux)

    def tree_flatten(self) -> tuple[Any, Overlay]:
        """Return the pytree children (arrays), and the written variables as static data."""
        return self._parts, self._overlay

    @classmethod
    def tree_unflatten(cls, overlay: Overlay, parts: Any) -> "_WithWrites":
        """Rebuild the object with other arrays."""
        aux, values = parts
        return cls(aux, values, overlay)


def _carry_writes(original: Any) -> Any:
    """Carry what layers write to variables of replicax, such as the state of `rx.random`."""

    def compute_loss_and_updates(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current().level is None and is_staging():  # `jax.jit`, where it is an error
            return original(self, *args, **kwargs)
        overlay = Overlay({}, current_trace())
        with overlay.active():
            loss, aux = original(self, *args, **kwargs)
        writes = list(overlay.writes.values())
        return loss, _WithWrites(aux, writes, overlay) if writes else aux

    return compute_loss_and_updates


def _skip_batch_placement(original: Any) -> Any:
    """Do not place batches on devices while iterating: the step does."""

    def get_iterator(self: Any) -> Any:
        if get_strategy().topology is None:
            return original(self)
        return self.data_adapter.get_jax_iterator()

    return get_iterator


def _skip_data_placement(original: Any) -> Any:
    """Do not place data by keras.distribution in a scope."""

    def distribute_data(data: Any, layouts: Any = None) -> Any:
        return original(data, layouts) if get_strategy().topology is None else data

    return distribute_data


# Callbacks.


def _run_on_chief(original: Any) -> Any:
    """Run a callback's method that writes files on the first worker only."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        home = home_of(self.model)
        if home is None or home.is_chief:
            # Leave the scope: when Keras saves, it creates a temporary optimizer. In the scope,
            # creating its variables would be a collective, in which the others do not take part.
            with entered(strategy=None):
                original(self, *args, **kwargs)

    return method


# Attributes of Keras 2's models that Keras 3 has with TensorFlow alone.


class _CompiledMetrics:
    """The object behind `self.compiled_metrics`, for steps that are written for Keras 2."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Update the metrics of the model; a `Mean` gets the predictions, as in Keras."""
        for metric in self._model.metrics:
            given = (y_pred,) if isinstance(metric, metrics.Mean) else (y, y_pred)
            metric.update_state(*given, sample_weight=sample_weight)


def compiled_loss(
    self: Any, y: Any, y_pred: Any, sample_weight: Any = None, regularization_losses: Any = None
) -> Any:
    """Return the loss set by `compile`, plus the losses that layers have added."""
    return self.compute_loss(x=None, y=y, y_pred=y_pred, sample_weight=sample_weight)


OLDER_ATTRIBUTES = {"compiled_loss": compiled_loss, "compiled_metrics": property(_CompiledMetrics)}


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.COMPILE, lambda original: _enter_scope("compile")(_explain_optax(original))),
    (private.FIT, lambda original: _enter_scope("fit")(_explain_data(original))),
    (private.EVALUATE, lambda original: _enter_scope("evaluate")(_explain_data(original))),
    (private.PREDICT, _enter_scope("predict")),
    (private.TRAIN_ON_BATCH, _enter_scope("train_on_batch")),
    (private.TEST_ON_BATCH, _enter_scope("test_on_batch")),
    (private.PREDICT_ON_BATCH, _enter_scope("predict_on_batch")),
    (private.GET_STATE, _return_empty_state),
    (private.LOSS_AND_UPDATES, _carry_writes),
    (private.TRAIN_STEP, _accept_tensorflow_step("train")),
    (private.TEST_STEP, _accept_tensorflow_step("test")),
    (private.PREDICT_STEP, _accept_tensorflow_step("predict")),
    (private.SYMBOLIC_BUILD, _skip_symbolic_build),
    (private.EPOCH_BATCHES, _skip_batch_placement),
    (private.DISTRIBUTE_DATA, _skip_data_placement),
    (private.MAKE_TRAIN_FUNCTION, _compile_with_function("train")),
    (private.MAKE_TEST_FUNCTION, _compile_with_function("test")),
    (private.MAKE_PREDICT_FUNCTION, _compile_with_function("predict")),
    (private.GET_DATA_ADAPTER, adapted),
    (private.SAVE_CHECKPOINT, _run_on_chief),
    (private.CSV_BEGIN, _run_on_chief),
    (private.CSV_EPOCH, _run_on_chief),
    (private.CSV_END, _run_on_chief),
)
