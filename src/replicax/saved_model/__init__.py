"""Functions with their variables on disk, to be loaded without the code that made them.

Example:
    >>> rx.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    'serving_default'
"""

from replicax.train._saved_model import DEFAULT as DEFAULT_SERVING_SIGNATURE_DEF_KEY
from replicax.train._saved_model import LoadOptions, SaveOptions, load, save

__all__ = ["DEFAULT_SERVING_SIGNATURE_DEF_KEY", "LoadOptions", "SaveOptions", "load", "save"]

__dir__ = __all__.copy
