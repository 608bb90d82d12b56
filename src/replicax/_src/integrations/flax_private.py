"""The contract with Flax NNX: its private parts that replicax relies on, by feature.

Code outside of this module may name a module below ``flax.nnx`` or a private attribute of NNX only
if it is listed in `CONTRACT`. The contract test checks all of them.
"""

from typing import Any

from replicax._src.base.contract import Contract, LibraryFeature, PrivatePart, never
from replicax._src.base.lazy import LazyModule
from replicax._src.context.current import current
from replicax._src.integrations.hook import in_replicas, is_inside
from replicax._src.state.levels import TraceLevel
from replicax._src.topology.mesh import REPLICA_AXIS

nnx: Any = LazyModule("flax.nnx")

_VARIABLE = "variablelib:Variable."
_OPTIMIZER = "training.optimizer:Optimizer."
_WELFORD = "training.metrics:Welford."
_JIT = "transforms.compilation:JitWrapped.__call__"
_SIMPLE_JIT = "transforms.compilation:SimpleJitWrapped.__call__"
_SIMPLE_JIT_PARTIAL = "transforms.compilation:SimpleJitPartialWrapped.__call__"

# Predicates for whether a feature is in use. The arguments are those of a gate function, or one
# variable that is read.


def _in_function(*_: Any, **__: Any) -> bool:
    return current().level is not None or current().replica is not None


def _is_compiled(*_: Any, **__: Any) -> bool:
    return isinstance(current().level, TraceLevel)


def _draws(x: Any = None, *_: Any, **__: Any) -> bool:
    return in_replicas() and (not isinstance(x, nnx.Variable) or isinstance(x, nnx.RngState))


def _steps(x: Any = None, *_: Any, **__: Any) -> bool:
    return in_replicas() and (not isinstance(x, nnx.Variable) or isinstance(x, nnx.OptState))


def _is_recorded(*_: Any, **__: Any) -> bool:
    return bool(current().tapes)


def _names_replicas(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(x, str) and x == REPLICA_AXIS for x in (*args, *kwargs.values()))


VARIABLES = LibraryFeature("NNX variables in scopes", "make the model outside of scopes")
UPDATES = LibraryFeature(
    "updates of NNX variables in replica functions and rx.functions",
    "return the new values, and assign them outside",
    (
        f"{_VARIABLE}set_value",
        f"{_VARIABLE}set_raw_value",
        f"{_VARIABLE}__setitem__",
        f"{_VARIABLE}__setattr__",
    ),
    _in_function,
    is_checked_by_library=True,
)
CONTEXT = LibraryFeature(
    "NNX modules in replica functions and rx.functions that set attributes or use NNX transforms",
    "use `jax.grad` on `nnx.split` state, and set attributes outside",
    (
        "pytreelib:Pytree._check_valid_context",
        "pytreelib:Pytree.__setattr__",
    ),
    _in_function,
    is_checked_by_library=True,
)
CHANGES = LibraryFeature(
    "NNX modules in compiled functions, which must see when an attribute is changed",
    "use `nnx.split` and functions of the state",
    (),  # no gates: checked when a variable is read
    _is_compiled,
)
CONSTRUCTION = LibraryFeature(
    "programs that stay compiled when another NNX module is made",
    "make all modules before the first call of a compiled function",
    when=never,  # without it, functions are recompiled, with the same results
)
TAPES = LibraryFeature(
    "NNX variables under an rx.GradientTape",
    "use `rx.grad`, `jax.grad` or `nnx.grad`",
    (),  # no gates: checked when a variable is read
    _is_recorded,
)
TRANSFORMS = LibraryFeature(
    "NNX transforms (`nnx.grad`, `nnx.merge`, ...) in replica functions",
    "use `jax.grad` on the variables' values",
    ("graphlib:unflatten", "graphlib:_graph_unflatten", "graphlib:_tree_unflatten"),
    in_replicas,
)
OPTIMIZERS = LibraryFeature(
    "nnx.Optimizer in replica functions",
    "return the gradients from `strategy.run`, reduce them, and update outside",
    (f"{_OPTIMIZER}update",),
    _steps,
)
KEYS = LibraryFeature(
    "random keys of NNX that differ between replicas",
    "give each replica a key of its own as an argument",
    ("rnglib:RngStream.__call__",),
    _draws,
)
STATISTICS = LibraryFeature(
    f"normalization layers of NNX with axis_name={REPLICA_AXIS!r}",
    "leave `axis_name` out",
    (
        "nn.normalization:_compute_stats",
        *(
            f"nn.normalization:{name}.__init__"
            for name in ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
        ),
    ),
    _names_replicas,
)
WELFORD = LibraryFeature(
    "nnx.metrics.Welford",
    "use `nnx.metrics.Average`",
    (f"{_WELFORD}__init__", f"{_WELFORD}update"),
    is_inside,
)
JIT = LibraryFeature(
    "nnx.jit in replica functions and rx.functions, where it is always refused",
    "leave nnx.jit out there",
    (_JIT, "transforms.compilation:JitWrapped._get_pure_args_kwargs"),
    _in_function,
)
SIMPLE_JIT = LibraryFeature(
    "nnx.jit without graph updates in replica functions and rx.functions, where it is always"
    " refused",
    "leave nnx.jit out there",
    (_SIMPLE_JIT, "transforms.compilation:SimpleJitWrapped._maybe_to_tree"),
    _in_function,
)

# Storage.
VARIABLE_INIT = PrivatePart(
    f"{_VARIABLE}__init__",
    VARIABLES,
    "self, value, *, hijax, ref, eager_sharding, **metadata",
    is_transparent=True,
)
RAW_VALUE = PrivatePart(f"{_VARIABLE}_raw_value", VARIABLES)
TRACE_STATE = PrivatePart(f"{_VARIABLE}_trace_state", VARIABLES)
JAX_TRACE = PrivatePart("tracers:TraceState._jax_trace", VARIABLES)
CHECK_UPDATE = PrivatePart(f"{_VARIABLE}_check_can_update", UPDATES, "self")
CAN_UPDATE = PrivatePart(f"{_VARIABLE}_can_update", UPDATES)

# Modules.
CHECK_CONTEXT = PrivatePart("pytreelib:Pytree._check_valid_context", CONTEXT, "self, error_msg")
SET_ATTRIBUTE = PrivatePart("pytreelib:Pytree.__setattr__", CHANGES, "self, name, value, /")
CONSTRUCT = PrivatePart(
    "pytreelib:PytreeMeta._pytree_meta_construct", CONSTRUCTION, "cls, self, *args, **kwargs"
)
CURRENT_TRACE = PrivatePart("tracers:current_jax_trace", TAPES, "")
UNFLATTEN = PrivatePart(
    "graphlib:unflatten",
    TRANSFORMS,
    "graphdef, state, /, *, index_ref, outer_index_outer_ref, copy_variables, recreate_variables",
    is_transparent=True,
)

# Operations in which the replicas act together.
OPTIMIZER_UPDATE = PrivatePart(f"{_OPTIMIZER}update", OPTIMIZERS, "self, model, grads, /, **kwargs")
DRAW = PrivatePart("rnglib:RngStream.__call__", KEYS, "self")
COMPUTE_STATS = PrivatePart(
    "nn.normalization:_compute_stats",
    STATISTICS,
    "x, axes, dtype, axis_name, axis_index_groups, use_mean, use_fast_variance, mask",
)
WELFORD_INIT = PrivatePart(f"{_WELFORD}__init__", WELFORD, "self, argname='values'")
WELFORD_UPDATE = PrivatePart(f"{_WELFORD}update", WELFORD, "self, **kwargs")
JIT_CALL = PrivatePart(_JIT, JIT, "self, *args, **kwargs")
SIMPLE_JIT_CALL = PrivatePart(_SIMPLE_JIT, SIMPLE_JIT, "self, *args, **kwargs")
SIMPLE_JIT_PARTIAL_CALL = PrivatePart(_SIMPLE_JIT_PARTIAL, SIMPLE_JIT, "self, *args, **kwargs")

CONTRACT = Contract(
    "Flax",
    "flax",
    "flax.nnx",
    "0.12.8 or a newer 0.12",
    VARIABLES,
    [part for part in vars().values() if isinstance(part, PrivatePart)],
)

__getattr__ = CONTRACT.lazily(
    raw_value=(RAW_VALUE, None),
    trace_state=(TRACE_STATE, None),
    current_jax_trace=(CURRENT_TRACE, lambda: None),
)


def is_state_name(name: str) -> bool:
    """Whether an attribute of a module belongs to NNX's own bookkeeping."""
    return name.startswith("_pytree__")


def module_state(module: Any) -> Any:
    """Return NNX's bookkeeping of a module, which includes the trace that created it, or None."""
    return vars(module).get("_pytree__state")
