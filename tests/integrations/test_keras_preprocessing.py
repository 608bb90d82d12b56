"""Preprocessing layers of Keras: `adapt` on datasets, and layers in the functions of datasets."""

import contextlib

import numpy as np
import pytest

import replicax as rx

keras = rx.keras
layers = keras.layers
ROWS = np.random.default_rng(0).normal(3.0, 5.0, (23, 4, 3)).astype("float32")


def dataset(rows=ROWS, batch=5):
    return rx.data.Dataset.from_tensor_slices(rows).batch(batch)


@pytest.mark.parametrize("axis", [-1, (1, 2), None])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_normalization_adapts_to_a_dataset_as_to_its_rows(axis, offset, two):
    rows = ROWS + np.float32(offset)
    expected = layers.Normalization(axis=axis)
    expected.adapt(rows)
    with two.scope():
        layer = layers.Normalization(axis=axis)
        layer.adapt(dataset(rows))
        twice = layers.Normalization(axis=axis)
        twice.adapt(dataset(ROWS * 2))
        twice.adapt(dataset(rows).map(lambda x: (x, 0)))

    for found in (layer, twice):
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-6)
        # NumPy's float32 variance of numbers near 1e4 has an error of its own.
        np.testing.assert_allclose(found.variance, expected.variance, rtol=1e-5 + offset * 1e-7)
        np.testing.assert_allclose(found(rows), expected(rows), atol=1e-4 + offset * 1e-6)


def test_normalization_adapts_to_a_dataset_of_rows():
    layer, expected = layers.Normalization(), layers.Normalization()
    layer.adapt(rx.data.Dataset.from_tensor_slices(ROWS[:, 0]))
    expected.adapt(ROWS[:, 0])

    np.testing.assert_allclose(layer(ROWS[:, 0]), expected(ROWS[:, 0]), atol=1e-5)


def test_normalization_refuses_an_empty_dataset():
    with pytest.raises(ValueError, match="without elements"):
        layers.Normalization().adapt(dataset().take(0))


def test_discretization_adapts_to_a_dataset():
    layer = layers.Discretization(num_bins=4)
    layer.adapt(rx.data.Dataset.range(100).map(np.float32).batch(7))
    bounded = layers.Discretization(num_bins=4)
    bounded.adapt(rx.data.Dataset.range(1000).map(np.float32).batch(10), steps=10)

    for found in (layer, bounded):
        np.testing.assert_allclose(found.bin_boundaries, [25, 50, 75], atol=2)
    with pytest.raises(ValueError, match="num_bins"):
        layers.Discretization([0.0, 1.0]).adapt(dataset())


IMAGES = np.random.default_rng(1).random((8, 6, 6, 3)).astype("float32")


def augmentation():
    return keras.Sequential(
        [layers.RandomFlip(seed=1), layers.GaussianNoise(0.1, seed=2), layers.Rescaling(2)]
    )


@pytest.mark.parametrize("is_made_in_scope", [True, False])
@pytest.mark.parametrize("is_used_in_scope", [True, False])
def test_layers_in_functions_of_datasets_draw_as_without_a_scope(
    is_made_in_scope, is_used_in_scope, two, four
):
    def batches(strategy):
        scopes = contextlib.nullcontext if strategy is None else strategy.scope
        with scopes() if is_made_in_scope else contextlib.nullcontext():
            layer = augmentation()
        with scopes() if is_used_in_scope else contextlib.nullcontext():
            data = rx.data.Dataset.from_tensor_slices(IMAGES).batch(4)
            return [np.asarray(x) for x in data.map(lambda x: layer(x, training=True))]

    expected = batches(None)

    for strategy in (two, four):
        np.testing.assert_array_equal(batches(strategy), expected)
