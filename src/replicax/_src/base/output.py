"""Filter the output that native libraries write directly to standard output and standard error."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Gloo prints this line on every worker once it has connected to the others.
GLOO_GREETING = re.compile(rb"\[Gloo\] Rank \d+ is connected")


@contextmanager
def filter_output(stream: int, noise: re.Pattern[bytes]) -> Iterator[None]:
    """Drop matching lines that native libraries write to a stream while the block runs.

    Args:
        stream: The file descriptor: 1 for standard output, 2 for standard error. All other output
            is buffered, and written when the block ends.
        noise: The pattern that the dropped lines contain.
    """
    with suppress(AttributeError, ValueError, OSError):  # the stream is None, closed or replaced
        (sys.stdout if stream == 1 else sys.stderr).flush()
    try:
        original = os.dup(stream)
    except OSError:  # a program that has closed this stream
        yield
        return
    with open(original, "wb") as output, tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), stream)
        try:
            yield
        finally:
            os.dup2(original, stream)
            captured.seek(0)
            with suppress(OSError):  # a pipe without a reader
                output.writelines(line for line in captured if not noise.search(line))
                output.flush()
