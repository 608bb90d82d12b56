"""Run the jitted functions of a JAX program through `strategy.run`.

The rewriting is mechanical: `nnx.jit`, `jax.jit` and `eqx.filter_jit` of the program become a
function that hands each replica its part of the rows; `grad` and `value_and_grad` inside of it give
the mean over the replicas. It holds for losses that are means over rows, which most are.
"""

import ast
import collections
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator

import numpy as np

_JITS = {("nnx", "jit"), ("jax", "jit"), ("eqx", "filter_jit"), ("equinox", "filter_jit")}
_GRADIENTS = {
    *(("nnx", "grad"), ("nnx", "value_and_grad"), ("jax", "grad"), ("jax", "value_and_grad")),
    *(("eqx", "filter_grad"), ("eqx", "filter_value_and_grad")),
    *(("equinox", "filter_grad"), ("equinox", "filter_value_and_grad")),
}
# Arguments that hold state, by their name: they are the same on all replicas.
_STATE = re.compile(r"param|state|model|opt|key|rng|weight|module|static|graphdef", re.IGNORECASE)


class Distribute(ast.NodeTransformer):
    """Rewrite the jits and gradients of a program."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Wrap ``nnx.jit`` and its like."""
        self.generic_visit(node)
        if not isinstance(node.value, ast.Name):
            return node
        name = (node.value.id, node.attr)
        if name in _JITS:
            return _wrapped("__jit__", node)
        if name in _GRADIENTS:
            return _wrapped("__gradient__", node)
        if name == ("nnx", "cached_partial"):  # caches the graph for nnx.jit, which is not there
            return ast.copy_location(ast.Name("__partial__", ast.Load()), node)
        return node


def has_steps(tree: ast.AST) -> bool:
    """Whether a program jits a function."""
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in _JITS
        for node in ast.walk(tree)
    )


def _wrapped(name: str, node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [node], []), node)


class Steps:
    """The functions that a rewritten program calls, for one strategy."""

    def __init__(self, strategy):
        self._rx = importlib.import_module("replicax")
        self._jax = importlib.import_module("jax")
        self._strategy = strategy
        self._inside = False
        self.ran = 0

    def names(self) -> dict[str, Callable]:
        """Return the names that the rewritten program uses."""
        names = {"__jit__": self._jit, "__gradient__": self._gradient}
        return names | {"__partial__": functools.partial}

    def mend_optimizers(self) -> None:
        """Let `nnx.Optimizer.update`, which adds gradients up, take the mean that `grad` gives."""
        optimizer = importlib.import_module("flax.nnx").Optimizer
        update = optimizer.update

        @functools.wraps(update)
        def mean(optimizer, model, grads, *args, **kwargs):
            if self._in_replica():
                number = self._strategy.num_replicas_in_sync
                grads = self._jax.tree.map(lambda g: g / number, grads)
            return update(optimizer, model, grads, *args, **kwargs)

        optimizer.update = mean

    def _jit(self, original: Callable) -> Callable:
        def decorate(function: Callable | None = None, **options):
            if function is None:
                return decorate
            return functools.wraps(function, updated=())(_Step(self, function))

        return decorate

    def _gradient(self, original: Callable) -> Callable:
        with_value = "value" in original.__name__

        def decorate(*args, **options):
            if not args:  # eqx.filter_grad(has_aux=True) is a decorator
                return functools.partial(decorate, **options)
            gradient = original(*args, **options)

            def call(*args, **kwargs):
                result = gradient(*args, **kwargs)
                if not self._in_replica():
                    return result
                return self._mean(result, with_value=with_value, **options)

            return functools.wraps(gradient, updated=())(call)

        return decorate

    def _mean(self, result, *, with_value: bool, has_aux: bool = False, **_):
        if not has_aux:
            return self._all_reduce(result)
        first, second = result
        if with_value:  # ((value, aux), gradients)
            return (self._all_reduce(first[0]), first[1]), self._all_reduce(second)
        return self._all_reduce(first), second  # (gradients, aux)

    def _all_reduce(self, tree):
        context = self._rx.distribute.get_replica_context()
        leaves, structure = self._jax.tree.flatten(tree)
        leaves = [context.all_reduce("MEAN", x) if self._is_float(x) else x for x in leaves]
        return self._jax.tree.unflatten(structure, leaves)

    def _is_float(self, x) -> bool:
        return hasattr(x, "dtype") and self._jax.numpy.issubdtype(x.dtype, np.inexact)

    def _in_replica(self) -> bool:
        return not self._rx.distribute.in_cross_replica_context()

    def call(
        self, function: Callable, names: list[str], compiled: Callable, args: tuple, kwargs: dict
    ):
        """Call a jitted function of the program: all replicas, if no other is being called."""
        if self._inside or self._is_tracing(args, kwargs):
            return function(*args, **kwargs)
        self.ran += 1
        self._inside = True
        try:
            result = compiled(*args, **kwargs)
        finally:
            self._inside = False
        size = self._rows(names, args, kwargs) // self._strategy.num_replicas_in_sync
        return self._combine(result, size)

    def _is_tracing(self, args: tuple, kwargs: dict) -> bool:
        # A new array is traced inside of any transform, also of one without arguments.
        leaves = [self._jax.numpy.zeros(()), *self._leaves((args, kwargs))]
        return any(isinstance(x, self._jax.core.Tracer) for x in leaves)

    def compile(self, function: Callable, names: list[str]) -> Callable:
        """Return the function that runs ``function`` on all replicas."""

        def replica(*args, **kwargs):
            rows = self._rows(names, args, kwargs)
            named = zip(names, args, strict=False)
            args = [self._part(x, rows) if self._is_data(n, x, rows) else x for n, x in named]
            return function(*args, **kwargs)

        return self._rx.function(lambda *a, **k: self._strategy.run(replica, args=a, kwargs=k))

    def _rows(self, names: list[str], args: tuple, kwargs: dict) -> int:
        """Return how many rows the data of a call has; 0 if it cannot be divided."""
        sizes = collections.Counter(
            self._size(x) for n, x in zip(names, args, strict=False) if not _STATE.search(n)
        )
        sizes.pop(0, None)
        rows = max(sizes, default=0)
        return rows if rows % self._strategy.num_replicas_in_sync == 0 else 0

    def _size(self, tree) -> int:
        """Return the number of rows if all leaves are arrays of as many, else 0."""
        leaves = self._leaves(tree)
        if not leaves or not all(self._is_array(x) for x in leaves):
            return 0
        sizes = {x.shape[0] for x in leaves}
        return sizes.pop() if len(sizes) == 1 else 0

    def _leaves(self, tree) -> list:
        return self._jax.tree.leaves(tree)

    def _is_array(self, x) -> bool:
        if not hasattr(x, "shape") or not x.shape:
            return False
        dtype = getattr(x, "dtype", None)
        is_key = dtype == np.uint32 and x.shape[-1] == 2
        return not is_key and not self._jax.numpy.issubdtype(dtype, self._jax.dtypes.prng_key)

    def _is_data(self, name: str, x, rows: int) -> bool:
        return rows > 0 and not _STATE.search(name) and self._size(x) == rows

    def _part(self, tree, rows: int):
        context = self._rx.distribute.get_replica_context()
        size = rows // self._strategy.num_replicas_in_sync
        first = context.replica_id_in_sync_group * size
        cut = self._jax.lax.dynamic_slice_in_dim
        return self._jax.tree.map(lambda x: cut(self._jax.numpy.asarray(x), first, size), tree)

    def _combine(self, result, size: int):
        """Return rows of all replicas together, and anything else that differs as their mean.

        Args:
            result: What the step returned.
            size: How many rows of data each replica had; 0 if they were not divided.
        """
        distributed = self._rx.distribute.DistributedValues
        return self._jax.tree.map(
            lambda x: self._whole(x, size) if isinstance(x, distributed) else x,
            result,
            is_leaf=lambda x: isinstance(x, distributed),
        )

    def _whole(self, value, size: int):
        first, *others = self._strategy.experimental_local_results(value)
        if self._jax.numpy.issubdtype(first.dtype, self._jax.dtypes.prng_key):
            return first
        if all(np.array_equal(x, first) for x in others):
            # An array of all devices stays one, for the next step; a number is shown.
            is_state = isinstance(value, self._rx.distribute.Mirrored) and first.shape
            return value if is_state else first
        if first.shape and first.shape[0] == size:
            return self._strategy.gather(value, axis=0)
        return self._strategy.reduce("MEAN", value, axis=None)  # as statistics of a batch


class _Step:
    """A function of the program that was jitted."""

    def __init__(self, steps: Steps, function: Callable):
        self._steps = steps
        self._function = function
        self._names = _parameters(function)
        self._compiled = steps.compile(function, self._names)

    def __call__(self, *args, **kwargs):
        return self._steps.call(self._function, self._names, self._compiled, args, kwargs)

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self, instance)


def _parameters(function: Callable) -> list[str]:
    def names() -> Iterator[str]:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                yield from (f"{name}{i}" for i in range(99))
            else:
                yield name

    return [*names()]
