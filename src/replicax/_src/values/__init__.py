"""Per-replica and mirrored values: their representation, placement and reduction.

Layer: above ``topology``. Depends on arrays and devices, not on strategies, variables or contexts.
"""
