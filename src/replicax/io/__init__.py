"""Records on disk: TFRecord files and the Example messages inside them."""

from replicax.data._records._features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    RaggedTensor,
    SparseTensor,
    VarLenFeature,
)
from replicax.data._records._messages import (
    BytesList,
    Example,
    Feature,
    Features,
    FloatList,
    Int64List,
    serialize_example,
)
from replicax.data._records._parse import decode_raw, parse_example, parse_single_example
from replicax.data._records._writer import TFRecordOptions, TFRecordWriter

__all__ = [
    "BytesList",
    "Example",
    "Feature",
    "Features",
    "FixedLenFeature",
    "FixedLenSequenceFeature",
    "FloatList",
    "Int64List",
    "RaggedFeature",
    "RaggedTensor",
    "SparseTensor",
    "TFRecordOptions",
    "TFRecordWriter",
    "VarLenFeature",
    "decode_raw",
    "parse_example",
    "parse_single_example",
    "serialize_example",
]
