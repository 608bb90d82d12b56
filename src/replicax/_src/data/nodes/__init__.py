"""The node types of the dataset graph: sources and transformations.

Each type is a `Node` and the `Stream` that its `open` returns.

Layer: above `node`, `element_blocks`, `seeds`; below `dataset`. A module imports another one only
to build on its nodes or streams: `flat_map`, for example, reads through the branches of `choose`.
"""
