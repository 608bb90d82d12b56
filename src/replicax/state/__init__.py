"""Variables: where their values live, and what reading and writing them means where.

Layer: above ``context``; knows replicas and contexts, not strategies' verbs.
"""
