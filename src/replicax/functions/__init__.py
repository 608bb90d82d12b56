"""The compiler of replicax: trace once, lift state to inputs and outputs, keep the result.

Layer: above ``variables``; knows levels and cells, not strategies' verbs.
"""
