"""Collectives: cross-device ops, packing, and the rendezvous of eager replicas.

Layer: above ``values``. Does not depend on strategies or variables.
"""
