"""File formats (TFRecord, CSV, images) and the `Example` messages in records.

Layer: above `leaves`, below `nodes` and `readers`. Independent of datasets.
"""
