"""Devices, and the placement of replicas on them.

Layer: ``topology``, on the same level as ``data``. It may import ``cluster``, ``workers`` and the
private root modules.
"""
