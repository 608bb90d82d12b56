"""File formats (TFRecord, CSV, images) and the `Example` messages in records.

Layer: above `_errors` and `_leaves`, below `_nodes` and `_readers`. Independent of datasets.
"""
