"""TensorSpec: a shape and a dtype, equal by value."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax import TensorSpec
from replicax.data import Dataset, DatasetSpec

_SHAPES = st.lists(st.one_of(st.none(), st.integers(0, 4)), max_size=4)
_DTYPES = st.sampled_from([np.float32, np.int64, bool, object, jnp.bfloat16])


@given(shape=_SHAPES, dtype=_DTYPES)
def test_equal_arguments_make_equal_specs(shape, dtype):
    first, second = TensorSpec(shape, dtype), TensorSpec(tuple(shape), dtype)

    assert first == second
    assert hash(first) == hash(second)
    assert pickle.loads(pickle.dumps(first)) == first
    assert first.is_compatible_with(second)


@given(shape=_SHAPES, dtype=_DTYPES)
def test_an_array_of_the_shape_fits(shape, dtype):
    concrete = [3 if size is None else size for size in shape]
    array = np.zeros(concrete, np.dtype(dtype))

    assert TensorSpec(shape, dtype).is_compatible_with(array)
    assert TensorSpec(None, dtype).is_compatible_with(array)
    assert TensorSpec.from_tensor(array) == TensorSpec(concrete, dtype)


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 4), np.float32), np.zeros((2, 3)), np.zeros(3, np.float32), "text", object()],
)
def test_other_shapes_and_dtypes_do_not_fit(value):
    assert not TensorSpec([None, 3], np.float32).is_compatible_with(value)


def test_differences_are_seen():
    spec = TensorSpec([None, 3], np.float32)

    assert spec != TensorSpec([2, 3], np.float32)
    assert spec != TensorSpec([None, 3], np.float64)
    assert spec != TensorSpec([None, 3], np.float32, name="x")
    assert spec != "spec"


def test_strings_are_objects_on_the_host():
    assert TensorSpec([], str) == TensorSpec([], bytes) == TensorSpec([], object)
    assert TensorSpec.from_tensor("text") == TensorSpec([], object)


def test_specs_look_like_tensorflows():
    assert repr(TensorSpec([None, 3], np.float32, "x")) == (
        "TensorSpec(shape=(None, 3), dtype=dtype('float32'), name='x')"
    )
    assert TensorSpec(3).shape == (3,)


def test_a_nested_dataset_has_a_spec_of_its_own():
    spec = Dataset.range(7).window(3).element_spec

    assert spec == DatasetSpec(TensorSpec([], np.int64))
    assert hash(spec) == hash(DatasetSpec(TensorSpec([], np.int64)))
    assert spec.is_compatible_with(Dataset.range(3))
    assert not TensorSpec([], np.int64).is_compatible_with(spec)
