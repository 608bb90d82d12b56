"""Integrations with Keras, Flax NNX and Ray Train, each attached by hooks.

This is the top layer: it may import every other package, and none of them imports it or needs the
libraries.
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand

if TYPE_CHECKING:
    from replicax.integrations import ray

__all__ = ["ray"]
__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {"ray": "replicax.integrations.ray"})
