"""The node of snapshot with a `shard_func` or `reader_func`: elements stored in several files."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, final

from replicax._src.data.element_blocks import RowBlock
from replicax._src.data.graph_facts import fingerprint_of
from replicax._src.data.leaves import DatasetSpec
from replicax._src.data.node import UNKNOWN_CARDINALITY, Node, PassingNode, Stream
from replicax._src.data.nodes.flat_map import call_for_dataset
from replicax._src.data.nodes.window import BlockNode
from replicax._src.data.save_load import SavedNode, is_saved, save_elements, saved_parts
from replicax._src.data.seeds import Run, Seeds
from replicax._src.data.structure import LEAF
from replicax._src.data.user_functions import ElementFunction


@final
@dataclass(frozen=True, eq=False)
class SnapshotNode(PassingNode):
    """The input, written to a folder in full before the first element is returned.

    The pass that writes the files also reads them back through `reader`, so the order does not
    depend on whether an earlier process has written them.
    """

    folder: str
    shard: ElementFunction | None
    reader: ElementFunction
    seeds: Seeds
    wrap: Callable[[Node], Any]
    key: int  # the input's fingerprint at construction: captured lists may change later

    def with_inputs(self, *inputs: Node) -> Self:
        """Return a snapshot of another input, such as one worker's files, in its own subfolder."""
        (node,) = inputs
        return replace(self, input=node, key=int(fingerprint_of(node)))

    @property
    def random(self) -> Seeds:
        """The seeds for random datasets created in `reader`."""
        return self.seeds

    @property
    def cardinality(self) -> int:
        """Unknown: the reader may drop elements."""
        return UNKNOWN_CARDINALITY

    @property
    def yields_indices(self) -> bool:
        """Always False: elements are read from disk, so blocks contain data."""
        return False

    @property
    def calls_user_code(self) -> bool:
        """Always True: reading calls `shard` and `reader`."""
        return True

    @property
    def peeked(self) -> Node:
        """The input: reading the first element must not write the snapshot."""
        return self.input.peeked

    def open(self, run: Run) -> Stream:
        """Start a pass over the files; write them first if they do not exist."""
        path = os.path.join(self.folder, f"{self.key:016x}.shards")
        if not is_saved(path):
            shard = None if self.shard is None else self.shard.call
            save_elements(self.input, path, shard, Run().fixed())
        spec = self.input.element_spec if self.input.is_spec_known else None
        files = self.wrap(files_of(saved_parts(path, spec), self.wrap))
        node = call_for_dataset(self.reader, files, 0, run.at(0), self.seeds)
        return node.open(run.inside(self.seeds, 0))


def files_of(parts: list[SavedNode], wrap: Callable[[Node], Any]) -> Node:
    """Return a node whose elements are datasets, one for each of `parts`."""
    rows = RowBlock(LEAF, [(wrap(part),) for part in parts])
    return BlockNode(rows, DatasetSpec(parts[0].element_spec))
