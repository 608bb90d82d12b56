"""Functions of `tf.strings`, for functions that a dataset applies to elements.

Example:
    >>> tf.strings.lower("ABC")
    b'abc'
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.strings import (
    as_bytes,
    as_str,
    as_str_any,
    as_string,
    as_text,
    bytes_split,
    format,
    join,
    length,
    lower,
    ngrams,
    path_to_str,
    reduce_join,
    regex_full_match,
    regex_replace,
    split,
    strip,
    substr,
    to_hash_bucket,
    to_hash_bucket_fast,
    to_hash_bucket_strong,
    to_number,
    unicode_decode,
    unicode_encode,
    unicode_split,
    upper,
)

__all__ = [
    "as_bytes",
    "as_str",
    "as_str_any",
    "as_string",
    "as_text",
    "bytes_split",
    "format",
    "join",
    "length",
    "lower",
    "ngrams",
    "path_to_str",
    "reduce_join",
    "regex_full_match",
    "regex_replace",
    "split",
    "strip",
    "substr",
    "to_hash_bucket",
    "to_hash_bucket_fast",
    "to_hash_bucket_strong",
    "to_number",
    "unicode_decode",
    "unicode_encode",
    "unicode_split",
    "upper",
]

__dir__ = __all__.copy

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
