"""Every optimizer of Keras, with every option of its step, trains as on one device."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, given, settings

import replicax as rx
from tests.replicas import mirrored

keras = rx.keras
RNG = np.random.default_rng(0)
X = RNG.normal(size=(44, 6)).astype("float32")  # the last batch of 8 does not divide by 8
Y = RNG.normal(size=(44, 2)).astype("float32")
EPSILON = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
NO_SHRINKING = (Phase.explicit, Phase.generate)  # a case takes seconds
OPTIMIZERS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Nadam", "Adamax", "Muon"]

clips = st.sampled_from([{}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}])
accumulations = st.sampled_from([{}, {"gradient_accumulation_steps": 3}])
averages = st.sampled_from(
    [
        {},
        {"use_ema": True, "ema_momentum": 0.5},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    ]
)
decays = st.sampled_from([{}, {"weight_decay": 0.01}])
scales = st.sampled_from([None, "factor", "dynamic"])
steps = st.builds(
    lambda *options: {name: value for part in options for name, value in part.items()},
    clips,
    accumulations,
    averages,
    decays,
)


def make(name: str, options: dict[str, Any], scale: Any, policy: str, is_eager: bool) -> Any:
    keras.utils.set_random_seed(1)
    factor = {"loss_scale_factor": 64.0} if scale == "factor" else {}
    optimizer = getattr(keras.optimizers, name)(0.05, **options, **factor)
    if scale == "dynamic":
        optimizer = keras.optimizers.LossScaleOptimizer(
            optimizer, initial_scale=128.0, dynamic_growth_steps=2
        )
    hidden = keras.layers.Dense(8, "tanh", dtype=policy)
    out = keras.layers.Dense(2, dtype=policy)
    model = keras.Sequential([keras.Input((6,)), hidden, out])
    model.compile(optimizer, "mse", run_eagerly=is_eager)
    return model


def weights(model: Any) -> list[np.ndarray]:
    return [v.numpy().astype("float64") for v in model.variables]


def trained(case: Any, strategy: Any = None, rows: Any = slice(None)) -> Any:
    with (strategy or rx.distribute.get_strategy()).scope():
        model = make(*case)
        model.fit(X[rows], Y[rows], batch_size=8, shuffle=False, verbose=0)
    return model


@settings(max_examples=5, deadline=None, derandomize=True, phases=NO_SHRINKING)
@given(
    st.sampled_from(OPTIMIZERS),
    steps,
    scales,
    st.sampled_from([2, 4]),
    st.sampled_from([False, False, False, True]),
)
def test_every_optimizer_in_float32_gives_one_devices_weights(
    name, options, scale, count, is_eager
):
    case = (name, options, scale, "float32", is_eager)
    expected, model = trained(case), trained(case, mirrored(count))

    for a, b in zip(weights(model), weights(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)
    assert int(model.optimizer.iterations) == int(expected.optimizer.iterations)


@pytest.mark.parametrize(
    ("policy", "options", "scale"),
    [
        ("mixed_bfloat16", {"clipvalue": 0.02, "gradient_accumulation_steps": 3}, None),
        ("mixed_bfloat16", {"global_clipnorm": 0.1}, None),
        ("mixed_float16", {"clipnorm": 0.1}, "dynamic"),
    ],
    ids=["clipvalue, accumulated", "global_clipnorm", "float16, scaled"],
)
def test_low_precision_differs_by_the_rounding_of_sums_alone(policy, options, scale):
    """The bound: each step is off by a few roundings of the largest gradient.

    One device whose rows of each batch are in another order keeps the same bound, and no better
    one: a sum over rows is rounded once for each replica, and once for their sum.
    """
    case = ("SGD", options, scale, policy, False)
    batches = np.split(np.arange(len(X)), range(8, len(X), 8))
    reordered = np.concatenate([rows[::-1] for rows in batches])
    start, expected = weights(make(*case)), weights(trained(case))
    moved = max(np.abs(a - b).max() for a, b in zip(start, expected, strict=True))

    for model in (trained(case, rows=reordered), trained(case, mirrored(2))):
        for a, b in zip(weights(model), expected, strict=True):
            assert np.abs(a - b).max() <= 8 * EPSILON[policy] * moved
