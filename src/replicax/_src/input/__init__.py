"""Distributed input: which process reads which data, and how batches become per-replica values.

Layer: above `functions`, whose compiled calls accept elements of distributed iterators; below
`strategy`, whose methods distribute datasets.
"""
