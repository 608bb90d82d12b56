"""The marks of tests that run a compiler for devices that are not here."""

import pytest

from replicax._src.preflight.preflight import require_compiler


def _mark(platform):
    try:
        require_compiler(platform)
    except ImportError as error:
        return pytest.mark.skip(reason=" ".join(str(error).split()))
    return pytest.mark.skipif(False, reason="")


needs_compiler = _mark("tpu")
needs_cuda = _mark("cuda")
