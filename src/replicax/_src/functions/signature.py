"""Signatures: split the arguments of a call into a cache key and arrays, and rebuild them."""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.compat.jax import ARRAY_TYPES, settings
from replicax._src.context.current import attributes, context_key
from replicax._src.data.optional import Ahead
from replicax._src.functions.cache_keys import (
    Identity,
    describe_key,
    static_key,
    structure_key,
    unstable_part,
)
from replicax._src.functions.modes import RaggedArgument, StringArgument
from replicax._src.topology.mesh import Topology
from replicax._src.values.per_replica import (
    Distributed,
    Joined,
    PerReplica,
    Pieces,
    Stacked,
    is_opaque,
    is_ragged,
    is_text,
    pieces,
)
from replicax._src.values.placement import NUMERIC, is_array, private
from replicax._src.values.replica_functions import stacked_array, stacked_at_once
from replicax._src.values.structures import PerReplicaSpec, component_specs, in_order

_LEAVES = frozenset({*ARRAY_TYPES, np.ndarray, int, float, bool, str})
_EXACT = frozenset({tuple, list, type(None)})
_STR = frozenset({str})

Rebuild = Callable[[Any], Any]


class Arguments(NamedTuple):  # made on every call: a dataclass takes four times as long
    """The flattened arguments of one call.

    Attributes:
        key: Equal for two calls that one compiled program can serve.
        arrays: The inputs of the program.
        rebuilds: For each leaf, a function from its array to the leaf; None for other leaves.
        leaves: All leaves, as passed.
        orders: The keys of each dict in insertion order, which JAX's flattening loses.
    """

    key: Any
    arrays: list[Any]
    rebuilds: list[Rebuild | None]
    leaves: list[Any]
    treedef: Any
    orders: list[tuple[Any, ...]]

    def with_arrays(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with `arrays` as their arrays."""
        rest = iter(arrays)
        leaves = [
            x if rebuild is None else rebuild(next(rest))
            for x, rebuild in zip(self.leaves, self.rebuilds, strict=True)
        ]
        made = jax.tree.unflatten(self.treedef, leaves)
        args, kwargs = in_order(made, self.orders, leaves)
        return args, kwargs

    def named(self, func: Callable[..., Any]) -> list[tuple[str, Any]]:
        """Return each leaf with its name in messages."""
        return list(zip(self.names(func), self.leaves, strict=True))

    def names(self, func: Callable[..., Any]) -> list[str]:
        """Return the name of each leaf: the parameter of `func`, and the path inside it."""
        tree = jax.tree.unflatten(self.treedef, range(len(self.leaves)))
        paths, _ = zip(*jax.tree.leaves_with_path(tree), strict=True) if self.leaves else ((), ())
        try:
            parameters = list(inspect.signature(func).parameters)
        except (TypeError, ValueError):  # builtins have no signature
            parameters = []
        return [_parameter(path, parameters) for path in paths]


def _parameter(path: Sequence[Any], parameters: Sequence[str]) -> str:
    (kind, which), rest = path[:2], jax.tree_util.keystr(tuple(path[2:]))
    if kind.idx == 1:
        return f"argument {which.key!r}{rest}"
    known = which.idx < len(parameters)
    return f"argument {parameters[which.idx]!r}{rest}" if known else f"argument {which.idx}{rest}"


def flatten_arguments(  # noqa: C901 - one case for each kind of container
    args: tuple[Any, ...], kwargs: dict[str, Any], *, orders_keywords: bool = True
) -> Arguments:
    """Split the arguments of a call into a cache key and arrays.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        orders_keywords: Whether the order of the keyword arguments counts.

    Raises:
        RaggedArgument: If a per-replica value has components of different shapes.
        StringArgument: If an argument is an array of strings.
    """
    plain = 0  # containers whose treedefs compare exactly
    orders: list[tuple[Any, ...]] = []

    def is_leaf(x: Any) -> bool:
        nonlocal plain
        kind = type(x)
        if kind in _LEAVES:
            return False
        if kind in _EXACT:
            plain += 1
            return False
        if kind is dict or kind is defaultdict:
            if x:
                orders.append(tuple(x) if orders_keywords or x is not kwargs else tuple(sorted(x)))
            plain += kind is dict and _STR.issuperset(map(type, x))
            return False
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            plain += 1
            return False
        return hasattr(kind, "__next__") or is_opaque(x)  # JAX warns of iterators

    treedef: Any
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_leaf)
    keys: list[Any] = [treedef]
    arrays: list[Any] = []
    rebuilds: list[Rebuild | None] = []
    for x in leaves:
        key, array, rebuild = _leaf(x)
        keys.append(key)
        rebuilds.append(rebuild)
        if rebuild is not None:
            arrays.append(array)
    if len(arrays) < len(leaves):
        keys.append(_places([x for x in leaves if isinstance(x, Ahead)]))
    if plain == treedef.num_nodes - len(leaves):
        keys += orders
    else:
        keys.append(structure_key(treedef))
        keys += (tuple(map(static_key, order)) for order in orders)
    return Arguments(tuple(keys), arrays, rebuilds, leaves, treedef, orders)


def _places(iterators: list[Any]) -> tuple[int, ...]:
    """Return, for each iterator, the index of its first occurrence in the list."""
    ids = [id(x) for x in iterators]
    return tuple(map(ids.index, ids))


def _same(x: Any) -> Any:
    return x


def _leaf(x: Any) -> tuple[Any, Any, Rebuild | None]:
    if is_array(x):
        return (x.shape, x.dtype, getattr(x, "weak_type", False)), x, _same  # keys have none
    if isinstance(x, Distributed):
        return _distributed(x)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in NUMERIC:
        return (x.shape, jax.dtypes.canonicalize_dtype(x.dtype), False), private(x), _same
    if is_text(x):
        raise StringArgument
    if isinstance(x, Ahead):
        return ("iterator", type(x), Identity(x.origin)), None, None
    return static_key(x), None, None


def _distributed(x: Distributed) -> tuple[Any, Any, Rebuild | None]:
    form, kind = x.form, type(x)
    if isinstance(form, Joined):
        array, topology = form.array, form.topology
        key = ("mirrored", array.shape, array.dtype, topology, kind)
        return key, array, lambda a: kind.of(Joined(a, topology))
    if isinstance(form, Stacked):  # the usual case: the result of an earlier step
        return _stacked(form.array, form.topology, kind)
    if isinstance(form, Pieces) and (known := stacked_at_once(form)) is not None:
        return _stacked(known, form.topology, kind)  # type: ignore[arg-type]
    return _plain_or_rows(x)


def _plain_or_rows(x: Distributed) -> tuple[Any, Any, Rebuild | None]:
    """Like `_distributed`, for components that are not arrays, or are not on the replicas."""
    specs = component_specs(x)
    if not all(isinstance(s, TensorSpec) for s in specs):
        return ("plain", type(x), tuple(map(static_key, x.values))), None, None
    if is_text(x):
        raise StringArgument
    if is_ragged(x):
        raise RaggedArgument
    place, kind = x.topology, type(x)
    if place is None:  # built by user code: the strategy that runs it will place it
        rows = np.stack([np.asarray(v) for v in x.values])
        return ("rows", rows.shape, rows.dtype, kind), rows, kind
    return _stacked(stacked_array(x, place), place, kind)  # type: ignore[arg-type]


def _stacked(
    array: jax.Array, place: Topology, kind: type[Distributed]
) -> tuple[Any, Any, Rebuild | None]:
    key = ("stacked", array.shape, array.dtype, place, kind)
    return key, array, lambda a: kind.of(Stacked(a, place))


def conform(signature: Sequence[Any], args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Convert positional arguments to the specs of an ``input_signature``.

    One extra leading argument is taken as a method's `self`, and passed through.

    Raises:
        TypeError: If the arguments do not match.
    """
    is_spec = lambda x: isinstance(x, TypeSpec)  # noqa: E731
    own, args = args[: len(args) == len(signature) + 1], args[len(args) == len(signature) + 1 :]
    if len(args) != len(signature):
        raise TypeError(
            f"{name} was declared with an input_signature of {len(signature)} arguments and called"
            f" with {len(args)}."
        )
    return own + tuple(
        jax.tree.map(lambda s, x: _fit(s, x, name), spec, arg, is_leaf=is_spec)
        for spec, arg in zip(signature, args, strict=True)
    )


def _fit(spec: Any, x: Any, name: str) -> Any:
    if not isinstance(spec, TypeSpec):
        return x
    if isinstance(spec, PerReplicaSpec):
        values = x.values if isinstance(x, Distributed) else (x,)
        for part, value in zip(spec.value_specs, values, strict=False):
            _fit(part, value, name)
        return x
    if isinstance(x, PerReplica):
        for value in x.values:
            _fit(spec, value, name)
        return x
    value = x if is_array(x) or isinstance(x, np.ndarray) else _converted(spec, x)
    if not spec.is_compatible_with(value):
        raise TypeError(
            f"{name} was declared with input_signature {spec!r}, and called with a value of shape"
            f" {jnp.shape(value)} and dtype {jnp.result_type(value)}."
        )
    return value


def examples(args: Any, place: Any) -> Any:
    """Return the arguments with every spec replaced by zeros of its shape; unknown sizes are 1.

    Args:
        args: Arguments, or specs.
        place: An object with a topology, such as a strategy, for per-replica values.
    """

    def zeros(spec: Any) -> Any:
        if isinstance(spec, PerReplicaSpec):
            return pieces([zeros(s) for s in spec.value_specs], place.topology)
        if isinstance(spec, TensorSpec):
            return np.zeros([1 if n is None else n for n in spec.shape], spec.dtype)
        return spec

    return jax.tree.map(zeros, args, is_leaf=lambda x: isinstance(x, TypeSpec) or is_opaque(x))


def _converted(spec: Any, x: Any) -> Any:
    if hasattr(x, "__jax_array__"):
        return jnp.asarray(x)
    return np.asarray(x, spec.dtype) if spec.dtype is not None else np.asarray(x)


def explain(old: Any, new: Any, names: Sequence[str]) -> str:
    """Return a description of the difference between two argument keys."""
    if old[0] != new[0]:
        return f"the structure of the arguments changed from {old[0]} to {new[0]}"
    for name, a, b in zip(names, old[1:], new[1:], strict=False):
        if a != b:
            return f"{name} changed from {_words(a)} to {_words(b)}"
    if old != new:
        return "the order of a dict's items, or the type of a dict key or static field, changed"
    return "the strategy changed"


def _words(key: Any) -> str:
    parts: list[Any] = list(key) if isinstance(key, tuple) and key else [None]
    kind = parts[0]
    if len(parts) == 3 and isinstance(kind, tuple):
        weak = ", made of a Python number" if parts[2] else ""
        return f"an array of shape {kind} and dtype {parts[1]}{weak}"
    if isinstance(kind, type) and len(parts) > 1:
        return f"the Python value {describe_key(key)}"
    if kind == "stacked":
        return f"a per-replica array of shape {parts[1][1:]} and dtype {parts[2]}"
    return repr(key)


def why_new(old: Any, new: Any, names: Sequence[str]) -> str:
    """Return why the program for the key `old` could not serve a call with the key `new`."""
    for name, part in zip(names, new[0][1:], strict=False):
        if (found := unstable_part(part)) is not None:
            return f"{name} is or holds {found}"
    if old is None:
        return "an argument may change without being seen"
    if old[0] == new[0] and old[1][:-1] == new[1][:-1]:
        if old[1] != new[1]:
            return f"{attributes.last} was changed"
        return "a setting of JAX changed"
    return explain(old[0], new[0], names)


def key_of(arguments: Arguments) -> tuple[Any, ...]:
    """Return the cache key of a program: the arguments, the context and JAX's settings."""
    return arguments.key, context_key(), settings()


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an argument."""
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
