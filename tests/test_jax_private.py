"""The JAX that is installed still has what replicax asks of its inside."""

import importlib

import jax
import pytest

from replicax import _jax_private

WANTED = {
    "jax._src.distributed": ["global_state"],
    "jax._src.xla_bridge": ["_backend_factories"],
    "jaxlib._jax": [
        "get_distributed_runtime_client",
        "get_distributed_runtime_service",
        "make_gloo_tcp_collectives",
    ],
}


@pytest.mark.parametrize(("module", "names"), WANTED.items())
def test_what_the_workers_need_is_there(module, names):
    found = importlib.import_module(module)

    assert [name for name in names if not hasattr(found, name)] == []


def test_without_a_service_nothing_is_connected():
    assert not _jax_private.connect_distributed("", 0, 2, "127.0.0.1", 1)

    assert not jax.distributed.is_initialized()


def test_what_is_traced_now_is_known_as_the_public_way_knows_it():
    public = _jax_private._TraceNow()
    seen = []
    jax.jit(lambda: seen.append((_jax_private.tracing.trace, public.trace)))()

    assert _jax_private.tracing.trace is _jax_private.at_rest is public.trace
    assert all(fast is slow is not _jax_private.at_rest for fast, slow in seen)
    assert type(_jax_private.tracing) is not type(public)
