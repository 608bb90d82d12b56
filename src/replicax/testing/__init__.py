"""Helpers for testing distributed programs.

Example:
    >>> import os
    >>> len(set(rx.testing.run_in_processes(os.getpid, 2)))
    2
"""

from replicax._src.testing.processes import Fault, InjectedFaultError, fault_point, run_in_processes

__all__ = ["Fault", "InjectedFaultError", "fault_point", "run_in_processes"]

__dir__ = __all__.copy
