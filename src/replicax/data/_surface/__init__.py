"""The methods of `Dataset`, by theme: each file is a part of that one class.

Layer: above `_nodes`; `_dataset` puts the parts together.
"""
