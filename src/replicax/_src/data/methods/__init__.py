"""The methods of `Dataset`, in one mixin class for each theme.

Layer: above `nodes`; `dataset` combines the mixins.
"""
