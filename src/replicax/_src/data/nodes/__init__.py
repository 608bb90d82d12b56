"""The node types of the dataset graph: sources and transformations.

Each type is a `Node` and the `Stream` that its `open` returns.

Layer: above `_node`, `_blocks`, `_seeds`; below `_dataset`. A module imports another one only to
build on its nodes or streams: `_flat_map`, for example, reads through the branches of `_choose`.
"""
