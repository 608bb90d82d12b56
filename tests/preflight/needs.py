"""The mark of tests that run the TPU compiler."""

import importlib.util

import pytest

_MISSING = [n for n in ("libtpu", "flatbuffers") if importlib.util.find_spec(n) is None]

needs_compiler = pytest.mark.skipif(
    bool(_MISSING),
    reason=f"the TPU compiler is not installed ({', '.join(_MISSING)}):"
    " pip install 'replicax[preflight]'",
)
