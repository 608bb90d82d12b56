"""Strategies: their methods, written once against a topology, and the classes of `tf.distribute`.

Layer: above ``input`` and ``functions``.
"""
