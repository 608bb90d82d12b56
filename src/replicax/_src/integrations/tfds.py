"""TensorFlow Datasets as `rx.data` datasets: `replicax.compat.tfds`."""

import importlib
from typing import Any

import numpy as np

from replicax._src.base.types import TensorSpec
from replicax._src.data.dataset import Dataset
from replicax._src.data.experimental_functions import assert_cardinality


def original() -> Any:
    """Return `tensorflow_datasets`."""
    try:
        return importlib.import_module("tensorflow_datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"TensorFlow Datasets could not be imported ({error}). Install it with TensorFlow,"
            " which reads its files: `pip install tensorflow-datasets tensorflow-cpu`. Or read"
            " the data with `rx.data`, for example with `from_tensor_slices` or `TFRecordDataset`."
        ) from error


def find(name: str) -> Any:
    """Return a name of `tensorflow_datasets` that replicax does not replace.

    Raises:
        AttributeError: If there is no such name, or no such package: `hasattr` must not raise.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        package = original()
    except ModuleNotFoundError as error:
        raise AttributeError(f"There is no {name!r} here. {error}") from error
    return getattr(package, name)


def load(name: str, **options: Any) -> Any:
    """Load datasets by name, as `tensorflow_datasets.load` does.

    Args:
        name: The name of the datasets.
        options: The options of `tensorflow_datasets.load`.

    Returns:
        Datasets in the structure of ``split``; with the information about them if ``with_info``.

    Example:
        >>> train = tfds.load("mnist", split="train", as_supervised=True)  # doctest: +SKIP
    """
    return _converted(original().load(name, **options))


def builder(name: str, **options: Any) -> Any:
    """Return the builder of datasets, whose `as_dataset` returns `rx.data` datasets.

    Example:
        >>> builder = tfds.builder("mnist")  # doctest: +SKIP
        >>> train = builder.as_dataset(split="train")  # doctest: +SKIP
    """
    return _Builder(original().builder(name, **options))


class _Builder:
    """A builder of TensorFlow Datasets that returns `rx.data` datasets."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def as_dataset(self, *args: Any, **options: Any) -> Any:
        """Return the datasets of the builder."""
        return _converted(self._builder.as_dataset(*args, **options))


def as_numpy(dataset: Any) -> Any:
    """Return datasets whose elements are NumPy values: `rx.data` datasets have no others.

    Example:
        >>> [int(x) for x in tfds.as_numpy(rx.data.Dataset.range(3))]  # doctest: +SKIP
        [0, 1, 2]
    """
    return dataset


def as_dataframe(dataset: Any, ds_info: Any = None) -> Any:
    """Return the elements of a dataset as a pandas DataFrame.

    Args:
        dataset: A dataset of dictionaries, tuples or single values.
        ds_info: Ignored.

    Example:
        >>> table = tfds.as_dataframe(train.take(10))  # doctest: +SKIP
    """
    del ds_info
    pandas = importlib.import_module("pandas")
    return pandas.DataFrame(list(dataset))


def _converted(value: Any) -> Any:
    """Return a structure with `rx.data` datasets in place of TensorFlow's."""
    if isinstance(value, dict):
        return {key: _converted(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(each) for each in value)
    if hasattr(value, "as_numpy_iterator"):
        return value if isinstance(value, Dataset) else _dataset(value)
    if hasattr(value, "numpy") and hasattr(value, "dtype"):  # batch_size=-1 gives tensors
        return np.asarray(value.numpy())
    return value


def _dataset(source: Any) -> Dataset[Any]:
    """Return the elements of a `tf.data.Dataset` as a dataset of the same spec and cardinality."""
    signature = _signature(source.element_spec)
    made = Dataset.from_generator(source.as_numpy_iterator, output_signature=signature)
    count = int(np.asarray(source.cardinality()))
    return made.apply(assert_cardinality(count)) if count >= 0 else made


def _signature(spec: Any) -> Any:
    """Return the specs of replicax for those of TensorFlow."""
    if isinstance(spec, dict):
        return {key: _signature(each) for key, each in spec.items()}
    if isinstance(spec, (list, tuple)):
        return tuple(_signature(each) for each in spec)
    dtype = getattr(spec.dtype, "as_numpy_dtype", spec.dtype)
    if type(spec).__name__ != "TensorSpec" or spec.shape.rank is None:
        raise TypeError(
            f"Elements of this dataset are not arrays of a known rank: {spec}. Read it with"
            " `rx.data.Dataset.from_generator(source.as_numpy_iterator)`."
        )
    return TensorSpec(tuple(spec.shape), dtype)
