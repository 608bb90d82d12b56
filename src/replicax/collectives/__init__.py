"""How replicas combine values: cross-device ops, packing, and the meeting of eager replicas.

Layer: above ``values``; knows nothing of strategies or variables.
"""
