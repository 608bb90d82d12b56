"""Elements kept on disk in several files, which a function of the user reads: snapshot."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, final

from replicax.data._blocks import RowBlock
from replicax.data._functions import ElementFunction
from replicax.data._known import fingerprint_of
from replicax.data._leaves import DatasetSpec
from replicax.data._node import UNKNOWN_CARDINALITY, Node, PassingNode, Stream
from replicax.data._nodes._flat_map import made_inside
from replicax.data._nodes._window import BlockNode
from replicax.data._saved import SavedNode, is_saved, save_elements, saved_parts
from replicax.data._seeds import Run, Seeds
from replicax.data._structure import LEAF


@final
@dataclass(frozen=True, eq=False)
class SnapshotNode(PassingNode):
    """The input, kept in a folder before its first element is given.

    Elements come as the reader gives them, also in the pass that keeps them: the order does not
    depend on whether another process was here before.
    """

    folder: str
    shard: ElementFunction | None
    reader: ElementFunction
    seeds: Seeds
    wrap: Callable[[Node], Any]
    key: int  # the fingerprint of the input when the node was made: lists may change later

    def with_inputs(self, *inputs: Node) -> Self:
        """A snapshot of another input, such as a worker's files, in a folder of its own."""
        (node,) = inputs
        return replace(self, input=node, key=int(fingerprint_of(node)))

    @property
    def random(self) -> Seeds:
        """The source of seeds for random datasets that the reader makes."""
        return self.seeds

    @property
    def cardinality(self) -> int:
        """Not known: the reader may leave elements out."""
        return UNKNOWN_CARDINALITY

    @property
    def gives_places(self) -> bool:
        """No: elements are on disk."""
        return False

    @property
    def calls_user_code(self) -> bool:
        """Yes: the functions."""
        return True

    @property
    def peeked(self) -> Node:
        """The input: nothing is written for a look at the first element."""
        return self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass over the files, which are written first if there are none."""
        path = os.path.join(self.folder, f"{self.key:016x}.shards")
        if not is_saved(path):
            shard = None if self.shard is None else self.shard.call
            save_elements(self.input, path, shard, Run().fixed())
        spec = self.input.element_spec if self.input.is_spec_known else None
        files = self.wrap(files_of(saved_parts(path, spec), self.wrap))
        node = made_inside(self.reader, files, 0, run.at(0), self.seeds)
        return node.open(run.inside(self.seeds, 0))


def files_of(parts: list[SavedNode], wrap: Callable[[Node], Any]) -> Node:
    """A node of one dataset for each file."""
    rows = RowBlock(LEAF, [(wrap(part),) for part in parts])
    return BlockNode(rows, DatasetSpec(parts[0].element_spec))
