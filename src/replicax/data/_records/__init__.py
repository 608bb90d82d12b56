"""Files of records, and the `Example` messages inside them.

Layer: above `_errors` and `_leaves`; below `_nodes` and `_readers`. Nothing here knows datasets.
"""
