"""Strategies: the verbs, written once against a topology, and the topologies.

Layer: above ``input`` and ``function``.
"""
