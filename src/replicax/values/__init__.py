"""What replicas hold: per-replica and mirrored values, and how they become one.

Layer: above ``topology``; knows arrays and devices, not strategies, variables or contexts.
"""
