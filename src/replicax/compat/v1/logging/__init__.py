"""Messages under the names of `tf.compat.v1.logging`, to Python's logger "replicax".

Example:
    >>> rx.compat.v1.logging.info("step %d", 3)
"""

from replicax._src.tf_ops.v1 import (
    DEBUG,
    ERROR,
    FATAL,
    INFO,
    WARN,
    debug,
    error,
    get_verbosity,
    info,
    log,
    log_every_n,
    log_first_n,
    log_if,
    set_verbosity,
    warn,
)

warning = warn

__all__ = [
    "DEBUG",
    "ERROR",
    "FATAL",
    "INFO",
    "WARN",
    "debug",
    "error",
    "get_verbosity",
    "info",
    "log",
    "log_every_n",
    "log_first_n",
    "log_if",
    "set_verbosity",
    "warn",
    "warning",
]

__dir__ = __all__.copy
