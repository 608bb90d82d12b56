"""Cluster membership: joining, heartbeats, failure detection, and small agreements among workers.

Layer: above ``cluster``. The hub runs in a separate process that never imports JAX, for a fast
start and a small footprint, so every module that ``hub`` imports uses the standard library only.
"""
