"""Records on disk: TFRecord files and the Example messages inside them."""

from replicax.data._records._csv import decode_csv
from replicax.data._records._examples import Example, Features, serialize_example
from replicax.data._records._features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    RaggedTensor,
    SparseTensor,
    VarLenFeature,
)
from replicax.data._records._file import matching_files, read_file, write_file
from replicax.data._records._images import decode_image, decode_jpeg, decode_png
from replicax.data._records._messages import BytesList, Feature, FloatList, Int64List
from replicax.data._records._parse import (
    decode_raw,
    parse_example,
    parse_single_example,
    parse_single_sequence_example,
)
from replicax.data._records._tensors import parse_tensor, serialize_tensor
from replicax.data._records._writer import TFRecordOptions, TFRecordWriter
from replicax.io import gfile

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
    "decode_csv",
    "decode_image",
    "decode_jpeg",
    "decode_png",
    "decode_raw",
    "gfile",
    "matching_files",
    "parse_example",
    "parse_single_example",
    "parse_single_sequence_example",
    "parse_tensor",
    "read_file",
    "serialize_example",
    "serialize_tensor",
    "write_file",
]
