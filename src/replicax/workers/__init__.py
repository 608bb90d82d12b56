"""The processes of a cluster: who is there, who is late, who is gone, and what they agree on.

Layer: above ``cluster``. The hub runs in a process of its own, without JAX's Python, so that the
modules that it imports (all that ``_hub`` names) use the standard library only.
"""
