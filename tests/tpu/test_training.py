"""Training over replicas and logical devices learns what one device learns."""

import re

import numpy as np
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.tpu.nets import ConvNet, Training, Transformer, slice_of

STEPS = 20


def on_one_device(net):
    return Training(rx.distribute.OneDeviceStrategy("CPU:0"), net).run(STEPS)


def assert_close(weights, expected):
    for w, e in zip(weights, expected, strict=True):
        np.testing.assert_allclose(w, e, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(
    ("cores", "parts"), [(8, [1, 2, 4, 1]), (4, [1, 2, 2, 1])], ids=["1x8", "2x4"]
)
def test_a_spatially_split_convolution_learns_as_on_one_device(cores, parts):
    strategy = slice_of(cores, replicas=8 // cores)

    def split(x):
        return strategy.experimental_split_to_logical_devices(x, parts)

    training = Training(strategy, ConvNet, split)
    text = training.step.get_concrete_function(training.batch(0)).as_text()

    # Each device convolves its part of the image, and asks its neighbours for the rim.
    height, width = (8 // n for n in parts[1:3])
    rows = 4 // strategy.num_replicas_in_sync
    assert re.search(rf"f32\[{rows},{height},{width},8\]\S* convolution\(", text)
    assert "collective-permute" in text
    assert_close(training.run(STEPS), on_one_device(ConvNet))


def test_a_transformer_split_over_heads_and_hidden_units_learns_as_on_one_device():
    training = Training(slice_of(cores=4, replicas=2), Transformer)
    parts = [w.read_value().addressable_shards[0].data.shape for w in training.net.weights]
    assert parts == [(16, 1, 4)] * 3 + [(1, 4, 16), (16, 16), (16, 16)]
    assert [m.cell.spec for m in training.momenta] == [w.cell.spec for w in training.net.weights]

    weights = training.run(STEPS)

    assert_close(weights, on_one_device(Transformer))
    held = [v.cell.value for v in (*training.net.weights, *training.momenta)]
    for array in held:
        assert array.addressable_shards[0].data.size * 4 == array.size


def test_sixteen_devices_as_two_replicas_of_eight_learn_as_one():
    result = run_fresh(
        f"""
        import sys
        sys.path.insert(0, {str(__file__.rsplit("/tests/", 1)[0])!r})
        import numpy as np
        import replicax as rx
        from tests.tpu.nets import ConvNet, Training, slice_of

        strategy = slice_of(cores=8, replicas=2)
        split = lambda x: strategy.experimental_split_to_logical_devices(x, [1, 2, 4, 1])
        weights = Training(strategy, ConvNet, split).run({STEPS})
        expected = Training(rx.distribute.OneDeviceStrategy("CPU:0"), ConvNet).run({STEPS})
        for w, e in zip(weights, expected):
            np.testing.assert_allclose(w, e, rtol=1e-4, atol=5e-6)
        print("equal")
        """,
        REPLICAX_TPU_TOPOLOGY="v3:4x2",
    )

    assert result.stdout.strip() == "equal", result.stderr
