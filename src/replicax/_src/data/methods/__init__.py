"""The methods of `Dataset`, in one mixin class for each theme.

Layer: above `_nodes`; `_dataset` combines the mixins.
"""
