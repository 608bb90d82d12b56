"""The Ray Train backend, which connects Ray's workers to a replicax cluster."""

from replicax._src.integrations.ray import Config

__all__ = ["Config"]
__dir__ = __all__.copy
