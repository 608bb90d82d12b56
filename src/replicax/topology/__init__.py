"""Devices and how replicas lie on them.

Layer: ``topology``, beside ``data``. It may import ``cluster`` and the private root modules.
"""
