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

    def __init__(self, value: Any = None) -> None:
        self.value = value

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
    given = structure.leaves_of(node.element_spec)
    if function.vectorize:
        leaves = [np.asarray(leaf)[None] for leaf in leaves]
    nesting, results = flatten(function.call(structure.unflatten(leaves), 0))
    known = {id(leaf): spec for leaf, spec in zip(leaves, given, strict=True)}
    is_open = any(_is_open(spec) for spec in given)
    specs: list[Any] = []
    for result in results:
        found = leaf_spec(to_leaf(np.asarray(result)[0] if function.vectorize else result))
        # What the function hands on is as it was; of anything else no size is sure.
        specs.append(known.get(id(result), opened(found)) if is_open else found)
    return nesting.unflatten(specs)


def opened(spec: Any) -> Any:
    """A spec that leaves every size open: one element does not tell those of others."""
    if not isinstance(spec, TensorSpec) or spec.shape is None:
        return spec
    return TensorSpec((None,) * len(spec.shape), spec.dtype)


def first_spec(node: Node) -> Any:
    """The spec of the first element alone, in the order before any shuffle."""
    structure, leaves = first_element(node, "map")
    return structure.unflatten([leaf_spec(leaf) for leaf in leaves])


def _is_open(spec: Any) -> bool:
    """Whether elements of this spec may differ in size, as a short last batch does."""
    return isinstance(spec, TensorSpec) and (spec.shape is None or None in spec.shape)
