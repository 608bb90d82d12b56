"""One transformation or source per file; each is a node and the stream it opens into.

Layer: above `_node`, `_blocks`, `_seeds`; below `_dataset`. A node knows no other node's file,
except the few that are made of another (`_readers` interleaves, `_enumerate` zips).
"""
