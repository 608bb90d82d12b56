"""Datasets in traced functions: they have a spec, and nothing can be read from them."""

from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from replicax._types import TensorSpec
from replicax.data._abstract import AbstractArray, abstract_array, give_up, is_abstract, need_value
from replicax.data._dataset import Dataset
from replicax.data._node import UNKNOWN_CARDINALITY, SourceNode, Stream
from replicax.data._nodes._window import remove_axis
from replicax.data._readers import FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
from replicax.data._seeds import Run
from replicax.data._trace import element_of, register, register_dataset, result_spec

STRING = TensorSpec((), object)


@final
@dataclass(frozen=True, eq=False)
class SpecNode(SourceNode):
    """A source of which only the spec is known."""

    spec: Any

    @property
    def element_spec(self) -> Any:
        """The spec."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """Not known."""
        return UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Give up the trace: there is nothing to read."""
        del run
        return give_up("a dataset that is read in a function")


class SpecDataset(Dataset[Any]):
    """A dataset in a traced function."""

    @staticmethod
    def _wrap(node: Any) -> "SpecDataset":
        return SpecDataset(node)

    @classmethod
    def of(cls, spec: Any) -> "SpecDataset":
        """Make a dataset of a spec."""
        return cls(SpecNode(spec))

    @classmethod
    def range(cls, *args: Any, output_type: Any = np.int64, name: str | None = None) -> Any:
        """Numbers."""
        if not is_abstract(args):
            return super().range(*args, output_type=output_type, name=name)
        return cls.of(TensorSpec((), output_type))

    @classmethod
    def from_tensors(cls, tensors: Any, name: str | None = None) -> Any:
        """One element."""
        return cls.of(result_spec(_tuples(tensors)))

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> Any:
        """Arrays cut along their first axis."""
        if not is_abstract(tensors):
            return super().from_tensor_slices(tensors, name)
        return cls.of(remove_axis(result_spec(_tuples(tensors)), "from_tensor_slices"))

    @classmethod
    def from_generator(cls, *args: Any, **kwargs: Any) -> Any:
        """Elements of a generator, which must have a signature."""
        made = super().from_generator(*args, **kwargs)
        if not made.node.is_spec_sure:
            give_up("a generator without a signature")
        return cls.of(made.element_spec)

    @classmethod
    def list_files(cls, *args: Any, **kwargs: Any) -> Any:
        """Names of files."""
        del args, kwargs
        return cls.of(STRING)

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> Any:
        """Give up: a file says how elements are built."""
        del args, kwargs
        return give_up("Dataset.load")

    def __iter__(self) -> Any:
        return give_up("a dataset that is read in a function")

    def __len__(self) -> int:
        return need_value()

    def cardinality(self, name: str | None = None) -> Any:
        """A number that is not known."""
        del name
        return AbstractArray((), np.int64)

    def get_single_element(self, name: str | None = None) -> Any:
        """An element of the spec."""
        del name
        return element_of(self.element_spec)

    def batch(self, batch_size: Any, drop_remainder: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Batches; of a size that is not known, if the function computes it."""
        if drop_remainder and is_abstract((batch_size, drop_remainder)):
            need_value()
        return super().batch(_count(batch_size), bool(drop_remainder), *args, **kwargs)

    def padded_batch(self, batch_size: Any, *args: Any, **kwargs: Any) -> Any:
        """Padded batches."""
        if is_abstract(batch_size):
            need_value()
        return super().padded_batch(batch_size, *args, **kwargs)

    def take(self, count: Any, name: str | None = None) -> Any:
        """The first elements."""
        return super().take(_count(count), name)

    def skip(self, count: Any, name: str | None = None) -> Any:
        """Everything after the first elements."""
        return super().skip(_count(count), name)

    def repeat(self, count: Any = None, name: str | None = None) -> Any:
        """Several passes."""
        return super().repeat(_count(count), name)

    def shuffle(self, *args: Any, **kwargs: Any) -> Self:
        """The same spec."""
        del args, kwargs
        return self

    def window(self, size: Any, shift: Any = None, stride: Any = 1, *args: Any, **kw: Any) -> Any:
        """Windows."""
        return super().window(_count(size), _count(shift), _count(stride), *args, **kw)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Give up: files would be written."""
        del args, kwargs
        give_up("Dataset.save")

    def cache(self, *args: Any, **kwargs: Any) -> Self:
        """The same spec."""
        del args, kwargs
        return self

    snapshot = cache
    prefetch = cache


def _tuples(tensors: Any) -> Any:
    if isinstance(tensors, list):
        if any(isinstance(part, dict) for part in tensors):
            return tuple(tensors)
        return abstract_array(tensors)
    return tensors


def _count(value: Any) -> Any:
    """A number of elements; any will do in place of one that is not known."""
    return 1 if is_abstract(value) else value


def _of_records(*args: Any, **kwargs: Any) -> SpecDataset:
    """Stand in for a class that reads records."""
    del args, kwargs
    return SpecDataset.of(STRING)


register(Dataset, SpecDataset)
register_dataset(SpecDataset.of)
for _reader in (TFRecordDataset, TextLineDataset, FixedLengthRecordDataset):
    register(_reader, _of_records)
