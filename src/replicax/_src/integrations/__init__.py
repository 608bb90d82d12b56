"""Keras, Flax NNX and Ray Train: the hooks that make their variables and steps distributed."""
