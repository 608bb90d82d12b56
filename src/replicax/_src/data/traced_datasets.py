"""Abstract datasets, which replace datasets in traced functions: a spec without elements.

Importing this module registers them with `tracing`.
"""

from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from replicax._src.base.types import TensorSpec
from replicax._src.data.abstract_arrays import (
    AbstractArray,
    abstract_array,
    give_up,
    is_abstract,
    need_value,
)
from replicax._src.data.dataset import Dataset
from replicax._src.data.node import UNKNOWN_CARDINALITY, SourceNode, Stream
from replicax._src.data.nodes.window import remove_axis
from replicax._src.data.readers import FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
from replicax._src.data.seeds import Run
from replicax._src.data.tracing import element_of, register, register_dataset, result_spec

STRING = TensorSpec((), object)


@final
@dataclass(frozen=True, eq=False)
class SpecNode(SourceNode):
    """A source with a spec and no elements."""

    spec: Any

    @property
    def element_spec(self) -> Any:
        """The spec."""
        return self.spec

    @property
    def cardinality(self) -> int:
        """Always unknown."""
        return UNKNOWN_CARDINALITY

    def open(self, run: Run) -> Stream:
        """Abort the trace: there are no elements to read."""
        del run
        return give_up("a dataset that is read in a function")


class SpecDataset(Dataset[Any]):
    """An abstract dataset in a traced function.

    Methods propagate the spec, and abort the trace if they would need elements or have effects.
    """

    @staticmethod
    def _wrap(node: Any) -> "SpecDataset":
        return SpecDataset(node)

    @classmethod
    def of(cls, spec: Any) -> "SpecDataset":
        """Return an abstract dataset with elements of `spec`."""
        return cls(SpecNode(spec))

    @classmethod
    def range(cls, *args: Any, output_type: Any = np.int64, name: str | None = None) -> Any:
        """Return abstract scalars, or the real range if all arguments are concrete."""
        if not is_abstract(args):
            return super().range(*args, output_type=output_type, name=name)
        return cls.of(TensorSpec((), output_type))

    @classmethod
    def from_tensors(cls, tensors: Any, name: str | None = None) -> Any:
        """Return a dataset of one abstract element."""
        return cls.of(result_spec(_tuples(tensors)))

    @classmethod
    def from_tensor_slices(cls, tensors: Any, name: str | None = None) -> Any:
        """Return a dataset of the slices along the first axis."""
        if not is_abstract(tensors):
            return super().from_tensor_slices(tensors, name)
        return cls.of(remove_axis(result_spec(_tuples(tensors)), "from_tensor_slices"))

    @classmethod
    def from_generator(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset with the signature of the generator; abort the trace without one."""
        dataset = super().from_generator(*args, **kwargs)
        if not dataset.node.is_spec_sure:
            give_up("a generator without a signature")
        return cls.of(dataset.element_spec)

    @classmethod
    def list_files(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset of strings."""
        del args, kwargs
        return cls.of(STRING)

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> Any:
        """Abort the trace: the spec is in a file."""
        del args, kwargs
        return give_up("Dataset.load")

    def __iter__(self) -> Any:
        return give_up("a dataset that is read in a function")

    def __len__(self) -> int:
        return need_value()

    def cardinality(self, name: str | None = None) -> Any:
        """Return an unknown int64."""
        del name
        return AbstractArray((), np.int64)

    def get_single_element(self, name: str | None = None) -> Any:
        """Return an abstract element."""
        del name
        return element_of(self.element_spec)

    def batch(self, batch_size: Any, drop_remainder: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset of batches, of unknown size if `batch_size` is abstract."""
        if drop_remainder and is_abstract((batch_size, drop_remainder)):
            need_value()
        return super().batch(_count(batch_size), bool(drop_remainder), *args, **kwargs)

    def padded_batch(self, batch_size: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset of padded batches."""
        if is_abstract(batch_size):
            need_value()
        return super().padded_batch(batch_size, *args, **kwargs)

    def take(self, count: Any, name: str | None = None) -> Any:
        """Return a dataset of the same spec."""
        return super().take(_count(count), name)

    def skip(self, count: Any, name: str | None = None) -> Any:
        """Return a dataset of the same spec."""
        return super().skip(_count(count), name)

    def repeat(self, count: Any = None, name: str | None = None) -> Any:
        """Return a dataset of the same spec."""
        return super().repeat(_count(count), name)

    def shuffle(self, *args: Any, **kwargs: Any) -> Self:
        """Return this dataset: the spec does not change."""
        del args, kwargs
        return self

    def window(self, size: Any, shift: Any = None, stride: Any = 1, *args: Any, **kw: Any) -> Any:
        """Return a dataset of windows."""
        return super().window(_count(size), _count(shift), _count(stride), *args, **kw)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Abort the trace: saving writes files."""
        del args, kwargs
        give_up("Dataset.save")

    def cache(self, *args: Any, **kwargs: Any) -> Self:
        """Return this dataset: the spec does not change."""
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
    """Return a count argument; 1 for an unknown one, because it does not affect the spec."""
    return 1 if is_abstract(value) else value


def _record_dataset(*args: Any, **kwargs: Any) -> SpecDataset:
    """Return a dataset of strings, in place of a dataset that reads records from files."""
    del args, kwargs
    return SpecDataset.of(STRING)


register(Dataset, SpecDataset)
register_dataset(SpecDataset.of)
for _reader in (TFRecordDataset, TextLineDataset, FixedLengthRecordDataset):
    register(_reader, _record_dataset)
