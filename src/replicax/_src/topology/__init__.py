"""Devices, and the placement of replicas on them.

Layer: ``topology``, on the same level as ``data``. It may import ``workers``, ``cluster`` and the
packages below them.
"""
