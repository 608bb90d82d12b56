import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.collectives._meeting import inherited_jax_state
from tests.replicas import components, context, mirrored, replica_id


@pytest.fixture
def strategy():
    return mirrored(2)


def test_replicas_inherit_x64(strategy):
    step = lambda: (np.float64(1) * jnp.ones(2, jnp.float64)) + replica_id()  # noqa: E731

    with jax.enable_x64(True):
        wide = strategy.run(step)
    narrow = strategy.run(lambda: jnp.ones(2) + replica_id())

    assert [v.dtype for v in wide.values] == [jnp.float64] * 2
    assert [v.dtype for v in narrow.values] == [jnp.float32] * 2


def test_collectives_keep_64_bits(strategy):
    big = 2**40

    with jax.enable_x64(True):
        total = strategy.run(lambda: context().all_reduce("SUM", jnp.int64(big)))
        mean = strategy.run(lambda: context().all_reduce("MEAN", jnp.int64(big)))
        staged = strategy.run(
            lambda: jax.jit(lambda x: context().all_reduce("MEAN", x))(jnp.int64(big))
        )
        assert components(total) == [2 * big] * 2
        assert components(mean) == components(staged) == [float(big)] * 2
        assert mean.values[0].dtype == staged.values[0].dtype == jnp.float64


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("jax_enable_x64", jax.enable_x64, True),
        ("jax_debug_nans", jax.debug_nans, True),
        ("jax_debug_infs", jax.debug_infs, True),
        ("jax_disable_jit", jax.disable_jit, True),
        ("jax_default_matmul_precision", jax.default_matmul_precision, "float32"),
        ("jax_default_prng_impl", jax.default_prng_impl, "rbg"),
        ("jax_numpy_dtype_promotion", jax.numpy_dtype_promotion, "strict"),
        ("jax_numpy_rank_promotion", jax.numpy_rank_promotion, "raise"),
    ],
)
def test_a_new_thread_gets_the_settings_and_leaves_them(name, setting, value):
    seen = []

    def look():
        with enter():
            seen.append(getattr(jax.config, name))
        seen.append(getattr(jax.config, name))

    with setting(value):
        enter = inherited_jax_state()
        wanted = getattr(jax.config, name)
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()

    assert seen == [wanted, getattr(jax.config, name)]
    assert seen[0] != seen[1]


def test_a_nan_in_a_replica_is_found_when_the_caller_asks_for_it(strategy):
    with jax.debug_nans(True), pytest.raises(FloatingPointError) as error:
        strategy.run(lambda: jnp.log(replica_id() - 1))

    assert any("Raised in replica" in note for note in error.value.__notes__)


def test_each_replica_computes_on_its_own_device(strategy):
    result = strategy.run(lambda: jnp.ones(3))

    assert [v.devices() for v in result.values] == [{d} for d in jax.devices()[:2]]
    assert [v.committed for v in result.values] == [False, False]


def test_without_jit_collectives_still_meet(strategy):
    with jax.disable_jit():
        result = strategy.run(lambda: context().all_reduce("SUM", jnp.ones(2)))

    assert components(result) == [[2.0, 2.0]] * 2
