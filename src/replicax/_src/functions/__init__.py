"""`rx.function` and its relatives: tracing, lifting of state, compiled programs, gradients.

Layer: above ``state``. Depends on levels and cells, not on the methods of strategies.
"""
