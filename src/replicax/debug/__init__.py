"""Looking for what should not be.

Example:
    >>> rx.debug.check_in_sync()
"""

from replicax.variables._held import check_in_sync

__all__ = ["check_in_sync"]

__dir__ = __all__.copy
