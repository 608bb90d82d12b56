"""Datasets meet devices: which process reads what, and how a batch becomes a per-replica value.

Layer: above ``function``, whose compiled calls take elements of distributed iterators as inputs.
"""
