"""What a user's function makes of elements: learnt from the first one, without a pass."""

from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction, zeros_for
from replicax.data._leaves import common_shape, leaf_spec, to_leaf
from replicax.data._node import Node
from replicax.data._seeds import Run
from replicax.data._structure import Structure, flatten


class KnownSpec:
    """The spec of one node's results, once somebody has asked for it."""

    def __init__(self) -> None:
        self._spec: Any = None

    def get(self, learn: Callable[[], Any]) -> Any:
        """The spec, learnt at the first call."""
        if self._spec is None:
            self._spec = learn()
        return self._spec


def first_element(node: Node) -> tuple[Structure, list[Any]]:
    """The first element in any order, or a made-up one that fits if there is none."""
    stream = node.open(Run())
    try:
        block = stream.pull(1)
    finally:
        stream.close()
    if block is None:
        return zeros_for(node.element_spec)
    return block.structure, list(block.rows()[0])


def mapped_spec(node: Node, function: ElementFunction) -> Any:
    """The spec of the function's results.

    An axis of unknown size in the input (a last batch may be short) may show up in the result: a
    second call with shorter axes tells which sizes follow it.
    """
    structure, leaves = first_element(node)
    nesting, results = _call(function, structure, leaves)
    specs = [leaf_spec(result) for result in results]
    shorter = _shorter(flatten(node.element_spec)[1], leaves)
    if shorter is not None:
        specs = _compare(function, structure, shorter, specs)
    return nesting.unflatten(specs)


def _call(
    function: ElementFunction, structure: Structure, leaves: list[Any]
) -> tuple[Structure, list[Any]]:
    if function.vectorize:
        columns = [np.asarray(leaf)[None] for leaf in leaves]
        nesting, results = flatten(function.call(structure.unflatten(columns), 0))
        return nesting, [to_leaf(np.asarray(result)[0]) for result in results]
    nesting, results = flatten(function.call(structure.unflatten(leaves), 0))
    return nesting, [to_leaf(result) for result in results]


def _shorter(specs: list[Any], leaves: list[Any]) -> list[Any] | None:
    """The element with every unknown axis one shorter (or doubled), or None if all are known."""
    is_open, result = False, []
    for spec, leaf in zip(specs, leaves, strict=True):
        if isinstance(spec, TensorSpec) and isinstance(leaf, np.ndarray):
            unknown = [k for k in range(leaf.ndim) if spec.shape is None or spec.shape[k] is None]
            for axis in unknown:
                is_open = True
                size = leaf.shape[axis]
                places = np.arange(size - 1 if size > 1 else 2 * size)
                leaf = leaf.take(places % max(size, 1), axis)
        result.append(leaf)
    return result if is_open else None


def _compare(
    function: ElementFunction, structure: Structure, leaves: list[Any], specs: list[Any]
) -> list[Any]:
    try:
        _, results = _call(function, structure, leaves)
    except InvalidArgumentError:
        return [_open_first(spec) for spec in specs]
    if len(results) != len(specs):
        return specs
    found = [leaf_spec(result) for result in results]
    return [_merge(a, b) for a, b in zip(specs, found, strict=True)]


def _merge(left: Any, right: Any) -> Any:
    if isinstance(left, TensorSpec) and isinstance(right, TensorSpec):
        return TensorSpec(common_shape(left.shape, right.shape), left.dtype)
    return left


def _open_first(spec: Any) -> Any:
    if isinstance(spec, TensorSpec) and spec.shape:
        return TensorSpec((None, *spec.shape[1:]), spec.dtype)
    return spec
