"""The execution context: the ambient strategy, and the running replica if there is one.

Layer: above ``collectives``. Strategies appear in annotations only.
"""
