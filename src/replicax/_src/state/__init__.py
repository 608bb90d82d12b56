"""Variables: storage, synchronization policies, and tracing of their reads and writes.

Layer: above ``context``. Depends on replicas and contexts, not on the methods of strategies.
"""
