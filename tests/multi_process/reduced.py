"""Print what `reduce` gives for many dtypes, shapes and axes, beside NumPy's result."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

strategy = rx.distribute.MultiWorkerMirroredStrategy()
# The third is too large for a gathered sum, integers and bools are all-reduced; the
# fourth is small after the sum along its axis.
CASES = [
    ("float32", (), "SUM", None),
    ("float32", (3,), "MEAN", None),
    ("float32", (600_000,), "SUM", None),
    ("float32", (700, 1000), "MEAN", 0),
    ("bfloat16", (4, 5), "MEAN", -1),
    ("int32", (4, 5), "SUM", 0),
    ("bool", (3,), "SUM", None),
    ("complex64", (4, 5), "MEAN", None),
    ("float32", (0, 3), "SUM", 0),
]


def value_of(replica, shape, dtype):
    """Whole numbers, so that the order of additions does not matter."""
    x = (np.arange(np.prod(shape, dtype=int)).reshape(shape) * 3 + replica) % 7
    return np.asarray(x, jnp.dtype(dtype))


def main():
    for case in CASES:
        compare(*case)
    compare_gradient()
    sys.stdout.write(f"COMPARED={len(CASES)}\n")


def compare(dtype, shape, op, axis):
    rank, number = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
    mine = jnp.asarray(value_of(rank, shape, dtype))
    eager = strategy.reduce(op, strategy.run(lambda: mine), axis=axis)
    compiled = rx.function(lambda: strategy.reduce(op, strategy.run(lambda: mine), axis=axis))()
    rows = jnp.stack([jnp.asarray(value_of(r, shape, dtype)) for r in range(number)])
    over = (0,) if axis is None else (0, axis % len(shape) + 1)
    wide = rows if op == "MEAN" or dtype != "bool" else rows.astype(eager.dtype)
    right = jnp.mean(wide, axis=over) if op == "MEAN" else jnp.sum(wide, over, dtype=wide.dtype)
    for found in (eager, compiled):
        case = f"{op} of {dtype}{list(shape)}, axis {axis}"
        assert found.dtype == right.dtype, f"{case}: {found.dtype} for {right.dtype}"
        np.testing.assert_allclose(
            np.asarray(found, np.complex64), np.asarray(right, np.complex64), 1e-2, err_msg=case
        )


def compare_gradient():
    """The gradient of the sum of all replicas' values has the share of each."""
    x = jnp.arange(3.0)

    @rx.function
    def gradient(scale):
        def total(s):
            return jnp.sum(strategy.reduce("SUM", strategy.run(lambda: s * x), axis=None))

        return jax.grad(total)(scale)

    np.testing.assert_allclose(gradient(2.0), 3.0 * strategy.num_replicas_in_sync)


if __name__ == "__main__":
    main()
