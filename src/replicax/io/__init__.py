"""Reading and writing of files: TFRecords, Example messages, CSV, images and plain files."""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.data.records.csv import decode_csv
from replicax._src.data.records.examples import Example, Feature, Features, serialize_example
from replicax._src.data.records.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    RaggedFeature,
    RaggedTensor,
    SparseTensor,
    VarLenFeature,
)
from replicax._src.data.records.file_io import matching_files, read_file, write_file
from replicax._src.data.records.images import decode_image, decode_jpeg, decode_png
from replicax._src.data.records.messages import BytesList, FloatList, Int64List
from replicax._src.data.records.parse import (
    parse_example,
    parse_sequence_example,
    parse_single_example,
    parse_single_sequence_example,
)
from replicax._src.data.records.tensor_proto import decode_raw, parse_tensor, serialize_tensor
from replicax._src.data.records.writer import TFRecordOptions, TFRecordWriter
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
    "parse_sequence_example",
    "parse_single_example",
    "parse_single_sequence_example",
    "parse_tensor",
    "read_file",
    "serialize_example",
    "serialize_tensor",
    "write_file",
]

__dir__ = __all__.copy

_ABSENT = {
    "SparseFeature": "Parse its parts as VarLenFeatures and build a rx.io.SparseTensor of them.",
    "decode_and_crop_jpeg": "Write `rx.io.decode_jpeg(contents)[top:bottom, left:right]`.",
    "decode_base64": "Write `base64.urlsafe_b64decode(text)`.",
    "decode_bmp": "Write `rx.io.decode_image(contents)`.",
    "decode_compressed": "Write `zlib.decompress(data)`, or pass compression_type to the dataset.",
    "decode_gif": "Write `rx.io.decode_image(contents)`.",
    "decode_json_example": "Write `json.loads(text)` and `rx.io.serialize_example(values)`.",
    "decode_jxl": "Pillow does not read JPEG XL: convert the files.",
    "decode_proto": "Write the message's own `FromString(data)`.",
    "decode_webp": "Write `rx.io.decode_image(contents)`.",
    "deserialize_many_sparse": "Keep `rx.io.serialize_tensor` of indices, values and shape.",
    "encode_base64": "Write `base64.urlsafe_b64encode(data)`.",
    "encode_jpeg": "Write `PIL.Image.fromarray(array).save(file, 'JPEG')`.",
    "encode_png": "Write `PIL.Image.fromarray(array).save(file, 'PNG')`.",
    "encode_proto": "Write the message's own `SerializeToString()`.",
    "extract_jpeg_shape": "Write `rx.io.decode_jpeg(contents).shape`.",
    "is_jpeg": "Write `contents[:3] == bytes([255, 216, 255])`.",
    "match_filenames_once": "Write `rx.io.matching_files(pattern)`.",
    "serialize_many_sparse": "Keep `rx.io.serialize_tensor` of indices, values and shape.",
    "serialize_sparse": "Keep `rx.io.serialize_tensor` of indices, values and shape.",
    "write_graph": "There are no graphs: export models with `rx.saved_model`.",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
