"""The libraries that people bring: Keras and Flax NNX, each joined to the core by a few hooks.

May import everything below; nothing below imports it, or needs the libraries.
"""
