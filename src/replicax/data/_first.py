"""What a user's function makes of elements: learnt from one real element, once."""

from collections.abc import Callable
from typing import Any

import numpy as np

from replicax._tensor_spec import TensorSpec
from replicax.data._errors import InvalidArgumentError
from replicax.data._functions import ElementFunction
from replicax.data._leaves import leaf_spec, to_leaf
from replicax.data._node import Node
from replicax.data._seeds import Run
from replicax.data._structure import Structure, flatten


class Known:
    """What was learnt about one node, once somebody has asked for it."""

    def __init__(self) -> None:
        self.value: Any = None

    def get(self, learn: Callable[[], Any]) -> Any:
        """The value, learnt at the first call."""
        if self.value is None:
            self.value = learn()
        return self.value


class NoElementError(InvalidArgumentError):
    """There is no element that would show what a function returns."""


def first_element(node: Node, verb: str) -> tuple[Structure, list[Any]]:
    """The first element, in the order before any shuffle.

    Raises:
        NoElementError: If there is none.
    """
    stream = node.peeked.open(Run())
    try:
        block = stream.pull(1)
    finally:
        stream.close()
    if block is None:
        raise NoElementError(
            f"What the function given to {verb}() returns shows only when it is called, and the"
            " dataset has no element to call it on, so that its element_spec is unknown."
        )
    return block.structure, list(block.rows()[0])


def mapped_spec(node: Node, function: ElementFunction) -> Any:
    """The spec of the function's results: it is called on the first element."""
    structure, leaves = first_element(node, function.name)
    sizes = _open_sizes(flatten(node.element_spec)[1], leaves)
    if function.vectorize:
        leaves = [np.asarray(leaf)[None] for leaf in leaves]
    nesting, results = flatten(function.call(structure.unflatten(leaves), 0))
    if function.vectorize:
        results = [np.asarray(result)[0] for result in results]
    return nesting.unflatten([_opened(leaf_spec(to_leaf(result)), sizes) for result in results])


def _open_sizes(specs: list[Any], leaves: list[Any]) -> set[int]:
    """The sizes that the axes of unknown size have in an element."""
    sizes: set[int] = set()
    for spec, leaf in zip(specs, leaves, strict=True):
        if isinstance(spec, TensorSpec) and isinstance(leaf, np.ndarray):
            known = spec.shape if spec.shape is not None else (None,) * leaf.ndim
            sizes.update(n for n, size in zip(leaf.shape, known, strict=True) if size is None)
    return sizes


def _opened(spec: Any, sizes: set[int]) -> Any:
    """A result's spec, open where its size may follow that of an open axis (a short last batch)."""
    if not isinstance(spec, TensorSpec) or not spec.shape or not sizes:
        return spec
    others = [None if size in sizes else size for size in spec.shape[1:]]
    return TensorSpec((None, *others), spec.dtype)
