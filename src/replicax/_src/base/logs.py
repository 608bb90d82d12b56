"""The log handler of programs that do not configure logging."""

import logging
import sys


class PrefixedHandler(logging.Handler):
    """Write warnings to stderr with the prefix ``replicax:``, unless the root logger has handlers.

    Python's own handler of last resort would show the bare message, without its origin.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        if not logging.getLogger().handlers:
            sys.stderr.write(f"replicax: {self.format(record)}\n")


def install() -> None:
    """Attach the handler to the logger of replicax."""
    logger = logging.getLogger("replicax")
    if not logger.handlers:
        logger.addHandler(PrefixedHandler(logging.WARNING))
