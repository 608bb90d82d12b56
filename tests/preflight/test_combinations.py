"""Each combination of replicate x shard x tensor, compiled for a TPU slice and for GPUs."""

import math

import numpy as np
import pytest

import replicax as rx
from tests.combinations import COMBINATIONS, LENGTH, SHAPES, TENSOR, Model
from tests.preflight.needs import needs_compiler, needs_cuda
from tests.replicas import mirrored

DEVICES = 16
SMALL = 1024  # counters and the batch
SUMS = {"all-gather", "reduce-scatter", "all-reduce"}


def state_bytes(options):
    """The bytes of weights and of both moments of Adam on each device, by hand."""
    axes = options.get("devices_per_replica", 1)
    axes = axes if isinstance(axes, dict) else {"tensor": axes}
    tensor, cores = axes["tensor"], math.prod(axes.values())
    is_sharded = options.get("variable_policy") == "sharded"
    shards = options.get("shards", DEVICES // cores) if is_sharded else 1
    sizes = {n: 4 * math.prod(s) / shards for n, s in SHAPES.items()}
    return 3 * sum(size / tensor if n in TENSOR else size for n, size in sizes.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [
        pytest.param("h100:2x8", marks=needs_cuda),
        pytest.param("v5p:2x2x4", marks=needs_compiler),
    ],
)
@pytest.mark.parametrize("name", COMBINATIONS)
def test_combination_compiles_for_other_devices(name, devices):
    options = COMBINATIONS[name]
    model = Model(mirrored(8, **options))
    batch = model.strategy.experimental_distribute_values_from_function(
        lambda _: np.zeros((2, LENGTH), np.int32)
    )

    report = rx.preflight(model.step, (batch,), devices)

    assert report.compiles, report.error
    assert report.fits
    state, kinds = state_bytes(options), {c.kind for c in report.collectives}
    if devices.startswith("h100"):  # a TPU pads arrays to whole tiles
        assert report.memory.arguments == pytest.approx(state, abs=SMALL)
        assert kinds <= SUMS
        assert ("reduce-scatter" in kinds) == (options.get("variable_policy") == "sharded")
    else:
        assert report.memory.arguments >= state
