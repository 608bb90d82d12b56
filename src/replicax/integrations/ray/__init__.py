"""Ray Train: the backend that makes its workers a cluster of replicax."""

from replicax.integrations._ray import Config

__all__ = ["Config"]
__dir__ = __all__.copy
