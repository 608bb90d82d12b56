"""Saved models: functions with their variables, loadable without the Python code of the model.

A saved model is a checkpoint that contains, in addition to the variables, the functions as
StableHLO, exported by `jax.export` for CPU, GPU and TPU. It can be loaded on any number of
devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import TracingError
from replicax._src.base.tf_errors import DataLossError, NotFoundError
from replicax._src.base.types import TensorSpec, TypeSpec
from replicax._src.files.paths import user_path
from replicax._src.functions.function import Function, function
from replicax._src.functions.jaxpr.lift import Lifted, lift
from replicax._src.state.cell import Cell
from replicax._src.state.levels import TraceLevel
from replicax._src.state.variable import Variable, live_variables
from replicax._src.state.variables import variable_of
from replicax._src.train import store
from replicax._src.train.checkpoint import saved_value
from replicax._src.train.checkpoint_files import is_stored
from replicax._src.train.object_contents import contents_of
from replicax._src.train.object_graph import graph_of, is_variable
from replicax._src.train.stored_checkpoint import Stored
from replicax._src.values.placement import is_array
from replicax._src.workers import group as _group

DEFAULT = "serving_default"
_PLATFORMS = ("cpu", "cuda", "tpu")
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def save(obj: Any, export_dir: str, signatures: Any = None, options: Any = None) -> None:
    """Save an object's functions with its variables, to be loaded without its code.

    This saves every attribute that is an `rx.function` with an ``input_signature``, including
    ``__call__``; the forward pass of a Keras model; and ``signatures``. A dimension that is None
    in a signature stays dynamic.

    Args:
        obj: A Keras model, or any object with variables and functions.
        export_dir: The folder to save into.
        signatures: A function with an ``input_signature``, or a dict of these by name. By default
            ``__call__``, or the only function, is the serving signature.
        options: A `SaveOptions`.

    Raises:
        ValueError: The argument specs of a function are unknown.

    Example:
        >>> import tempfile
        >>> class Line:
        ...     def __init__(self):
        ...         self.slope = rx.Variable(3.0)
        ...
        ...     @rx.function(input_signature=[rx.TensorSpec([None], "float32")])
        ...     def __call__(self, x):
        ...         return self.slope * x
        >>> folder = tempfile.mkdtemp()
        >>> rx.saved_model.save(Line(), folder)
        >>> rx.saved_model.load(folder)(jnp.arange(3.0)).tolist()
        [0.0, 3.0, 6.0]
    """
    functions = dict(_functions_of(obj))
    serving = _signatures(signatures, functions)
    wanted = {**functions, **{f"signatures/{name}": f for name, f in serving.items()}}
    if not wanted:
        raise ValueError(
            f"There is nothing to save of {obj!r}: it has no function whose arguments are known."
            " Decorate one with `@rx.function(input_signature=[rx.TensorSpec([None, 4],"
            ' "float32")])`, pass `signatures=`, or call a Keras model once on a batch.'
        )
    found = graph_of(obj)
    pairs = [(_cell(x), key.removesuffix(_SUFFIX)) for key, x in found.objects.items()]
    names = {cell: name for cell, name in pairs if cell is not None}
    arrays: dict[str, Any] = {}
    description: dict[str, Any] = {"functions": {}, "variables": {}}
    for name, (python, specs) in wanted.items():
        lifted, exported = _export(python, specs, name)
        for cell in dict.fromkeys((*lifted.reads, *lifted.writes)):
            if cell not in names:
                used = set(names.values())
                free = (f"captured/{i}" for i in itertools.count(len(names)))
                names[cell] = next(new for new in free if new not in used)
        arrays[f"functions/{name}"] = np.frombuffer(exported.serialize(vjp_order=1), np.uint8)
        description["functions"][name] = {
            "reads": [names[c] for c in lifted.reads],
            "writes": [names[c] for c in lifted.writes],
        }
    of_cell = {v.cell: v for v in live_variables}
    for cell, name in names.items():
        variable = of_cell[cell]
        arrays[f"variables/{name}"] = saved_value(variable, name)  # each worker writes its shards
        description["variables"][name] = {"trainable": variable.trainable}
    group = _group.current()
    ticket = 0 if group is None else group.new_ticket()
    content = store.Content([], arrays, {"saved_model": description})
    store.write(user_path(export_dir), content, ticket)


def load(export_dir: str, tags: Any = None, options: Any = None) -> Loaded:
    """Load a saved model; inside a strategy's scope, its variables belong to that strategy.

    Args:
        export_dir: The folder.
        tags: Accepted for compatibility with TensorFlow.
        options: A `LoadOptions`.

    Returns:
        An object with the saved functions as attributes, ``signatures`` and ``variables``. It is
        callable if the saved object was.

    Raises:
        NotFoundError: There is no saved model.
        DataLossError: The saved model is damaged, or is a checkpoint without functions.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> double = rx.function(lambda x: x * 2, input_signature=[rx.TensorSpec([], "float32")])
        >>> rx.saved_model.save(double, folder)
        >>> float(rx.saved_model.load(folder)(4.0))
        8.0
    """
    try:
        stored = Stored(user_path(export_dir))
    except NotFoundError:
        raise NotFoundError(
            f"There is no saved model in {export_dir!r}. `rx.saved_model.save(obj, folder)` and"
            " `model.export(folder)` write one. `rx.keras.models.load_model` reads .keras files."
        ) from None
    if "saved_model" not in stored.states:
        raise DataLossError(
            f"{export_dir!r} is a checkpoint without functions. Restore it with"
            " `rx.train.Checkpoint(...).restore(path)`."
        )
    description = stored.states["saved_model"]
    variables = {
        name: Variable(stored.read(f"variables/{name}"), trainable=v["trainable"], name=name)
        for name, v in description["variables"].items()
    }
    functions = {}
    for name, f in description["functions"].items():
        program = jax.export.deserialize(bytearray(stored.read(f"functions/{name}").tobytes()))
        reads = [variables[n] for n in f["reads"]]
        writes = [variables[n] for n in f["writes"]]
        functions[name] = function(_loaded(program, reads, writes, name))
    return Loaded(functions, list(variables.values()))


def contains_saved_model(export_dir: str) -> bool:
    """Whether a folder contains a saved model that `save` wrote.

    Example:
        >>> rx.saved_model.contains_saved_model("/no/such/folder")
        False
    """
    path = user_path(export_dir)
    return is_stored(path) and "saved_model" in Stored(path).states


class Loaded:
    """A loaded saved model.

    Attributes:
        signatures: The serving signatures, by name: functions that return a dict of arrays.
        variables: All variables.
    """

    def __init__(self, functions: Mapping[str, Any], variables: list[Variable]) -> None:
        self.signatures = {
            name.removeprefix("signatures/"): f
            for name, f in functions.items()
            if name.startswith("signatures/")
        }
        self.variables = variables
        for name, f in functions.items():
            if "/" not in name:
                setattr(self, name, f)

    @property
    def trainable_variables(self) -> list[Variable]:
        """The trainable variables."""
        return [v for v in self.variables if v.trainable]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self).get("__call__")
        if call is None:
            has = sorted(set(vars(self)) - {"signatures", "variables"})
            raise TypeError(f"The saved object could not be called; it has {', '.join(has)}.")
        return call(*args, **kwargs)


def _functions_of(obj: Any) -> Iterator[tuple[str, tuple[Callable[..., Any], Any]]]:
    ask = getattr(type(obj), "__rx_export__", None)
    if ask is not None:
        yield "__call__", ask(obj)
    if isinstance(obj, Function) and obj.input_signature is not None:
        yield "__call__", (obj.python_function, obj.input_signature)
    for name in dir(type(obj)) if not isinstance(obj, Function) else ():
        if isinstance(getattr(type(obj), name, None), Function):
            yield from _with_specs(name, getattr(obj, name))
    for name, x in contents_of(obj).named.items():
        if isinstance(x, Function):
            yield from _with_specs(name, x)


def _with_specs(name: str, f: Any) -> Iterator[tuple[str, tuple[Callable[..., Any], Any]]]:
    if f.input_signature is not None:
        yield name, (f.python_function, f.input_signature)


def _signatures(requested: Any, functions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the serving signatures, by name: pairs of a function and its argument specs."""
    if requested is None:
        only = next(iter(functions.values())) if len(functions) == 1 else None
        call = functions.get("__call__", only)
        return {} if call is None else {DEFAULT: (_as_dict(call[0]), call[1])}
    named = requested if isinstance(requested, Mapping) else {DEFAULT: requested}
    serving = {}
    for name, f in named.items():
        specs = getattr(f, "input_signature", None)
        if specs is None:
            raise ValueError(
                f"Signature {name!r} is {f!r}, whose arguments are not known. Decorate it with"
                ' `@rx.function(input_signature=[rx.TensorSpec([None, 4], "float32")])`.'
            )
        serving[name] = (_as_dict(f.python_function), specs)
    return serving


def _as_dict(python: Callable[..., Any]) -> Callable[..., Any]:
    def serve(*args: Any) -> dict[str, Any]:
        result = python(*args)
        if isinstance(result, Mapping):
            return dict(result)
        return {f"output_{i}": x for i, x in enumerate(jax.tree.leaves(result))}

    return serve


def _cell(x: Any) -> Cell | None:
    variable = variable_of(x) if is_variable(x) else None
    return None if variable is None else variable.cell


def _export(python: Callable[..., Any], specs: Any, name: str) -> tuple[Lifted, Any]:
    scope = jax.export.SymbolicScope()
    leaves, treedef = jax.tree.flatten(tuple(specs), is_leaf=lambda s: isinstance(s, TypeSpec))
    shapes = [_shape(s, i, scope, name) for i, s in enumerate(leaves)]
    trees: list[Any] = []

    def body(*arrays: Any) -> list[Any]:
        result = python(*jax.tree.unflatten(treedef, arrays))
        outs, tree = jax.tree.flatten(result)
        trees.append(tree)
        return [jnp.asarray(x) for x in outs]

    level = TraceLevel(in_replica=False)
    lifted = lift(body, shapes, level)
    if level.topologies and any(t.num_replicas > 1 for t in _run_on(level)):
        raise TracingError(
            f"Function {name!r} runs a strategy's replicas, and a saved function is loaded on any"
            " number of devices. Save the function of one replica, and call `strategy.run` on"
            " the loaded one."
        )

    def pure(args: Any, state: list[Any]) -> Any:
        # The exported function takes and returns logical values; sharded variables are stored
        # padded or flattened here, so convert to and from the stored form.
        pairs = zip(lifted.reads, state, strict=True)
        stored = [x if (layout := c.shard_layout) is None else layout.stored(x) for c, x in pairs]
        results = lifted.call(*jax.tree.leaves(args), *stored)
        outs = jax.tree.unflatten(trees[-1], results[: lifted.num_outs])
        pairs = zip(lifted.writes, results[lifted.num_outs :], strict=True)
        return outs, [
            x if (layout := c.shard_layout) is None else layout.whole(x) for c, x in pairs
        ]

    state = [jax.ShapeDtypeStruct(c.shape, c.dtype) for c in lifted.reads]
    args = jax.tree.unflatten(treedef, shapes)
    return lifted, jax.export.export(jax.jit(pure), platforms=_PLATFORMS)(args, state)


def _run_on(level: TraceLevel) -> list[Any]:
    return [t for t, why in level.topologies.items() if not isinstance(why, str)]


def _shape(spec: Any, number: int, scope: Any, name: str) -> jax.ShapeDtypeStruct:
    if not isinstance(spec, TensorSpec) or spec.shape is None:
        raise ValueError(
            f"Argument {number} of {name!r} is declared as {spec!r}; a saved function needs an"
            " rx.TensorSpec with a shape, in which None is a size that stays open."
        )
    # The dynamic first dimensions of all arguments are one batch size; others are independent.
    sizes = [
        ("batch" if axis == 0 else f"size_{number}_{axis}") if n is None else str(n)
        for axis, n in enumerate(spec.shape)
    ]
    shape = jax.export.symbolic_shape(",".join(sizes), scope=scope) if sizes else ()
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(spec.dtype))


def _loaded(
    program: Any, reads: list[Variable], writes: list[Variable], name: str
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        treedef: Any = jax.tree.structure(args)
        want = program.in_tree.unflatten(range(program.in_tree.num_leaves))[0][0]
        if treedef != jax.tree.structure(want):
            raise TypeError(
                f"Saved function {name!r} takes arguments built like {want}, got {args!r}."
            )
        arrays = jax.tree.map(lambda x: x if is_array(x) else jnp.asarray(x), args)
        results, new = program.call(arrays, [v.read_value() for v in reads])
        for variable, value in zip(writes, new, strict=True):
            variable.assign(value)
        return results

    call.__name__ = name.replace("/", "_")
    return call
