"""Functions of `tf.strings`, on the host: bytes, and NumPy arrays of bytes."""

import hashlib
import re
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError


def to_bytes(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else bytes(value)


def _array(value: Any) -> Any:
    result = np.empty(np.shape(value), object)
    flat = np.asarray(value, object).reshape(-1)
    result.reshape(-1)[:] = [to_bytes(each) for each in flat]
    return result


def _each(value: Any, function: Any, dtype: Any = object) -> Any:
    """Apply a function to each string."""
    if isinstance(value, (str, bytes)):
        result = function(to_bytes(value))
        return result if dtype is object else np.dtype(dtype).type(result)
    source = _array(value)
    result = np.empty(source.shape, dtype)
    result.reshape(-1)[:] = [function(each) for each in source.reshape(-1)]
    return result if result.ndim else result[()]


def as_string(
    input: Any,
    precision: Any = -1,
    scientific: Any = False,
    shortest: Any = False,
    width: Any = -1,
    fill: Any = "",
    name: str | None = None,
) -> Any:
    """Format numbers as strings.

    Example:
        >>> tf.strings.as_string(5)
        b'5'
    """
    x = np.asarray(input)

    def text(value: Any) -> Any:
        if x.dtype.kind == "b":
            return b"true" if value else b"false"
        if x.dtype.kind == "f":
            kind = "g" if shortest else "e" if scientific else "f"
            shown = format(float(value), f".{precision}{kind}" if precision >= 0 else kind)
        else:
            shown = str(value)
        return (shown.rjust(width, fill or " ") if width > 0 else shown).encode()

    if not x.ndim:
        return text(x[()])
    result = np.empty(x.shape, object)
    result.reshape(-1)[:] = [text(value) for value in x.reshape(-1)]
    return result


def length(input: Any, unit: Any = "BYTE", name: str | None = None) -> Any:
    """Return the number of bytes or characters.

    Example:
        >>> int(tf.strings.length("abc"))
        3
    """
    if unit == "UTF8_CHAR":
        return _each(input, lambda s: len(s.decode()), np.int32)
    return _each(input, len, np.int32)


def lower(input: Any, encoding: Any = "", name: str | None = None) -> Any:
    """Convert strings to lower case.

    Example:
        >>> tf.strings.lower("ABC")
        b'abc'
    """
    return _each(input, lambda s: s.decode().lower().encode() if encoding else s.lower())


def upper(input: Any, encoding: Any = "", name: str | None = None) -> Any:
    """Convert strings to upper case.

    Example:
        >>> tf.strings.upper("abc")
        b'ABC'
    """
    return _each(input, lambda s: s.decode().upper().encode() if encoding else s.upper())


def strip(input: Any, name: str | None = None) -> Any:
    """Strip white space from both ends.

    Example:
        >>> tf.strings.strip(" a ")
        b'a'
    """
    return _each(input, lambda s: s.strip())


def join(inputs: Any, separator: Any = "", name: str | None = None) -> Any:
    """Join strings elementwise.

    Example:
        >>> tf.strings.join(["a", "b"], "-")
        b'a-b'
    """
    parts = [np.asarray(i, object) if not isinstance(i, (str, bytes)) else i for i in inputs]
    if all(isinstance(p, (str, bytes)) for p in parts):
        return to_bytes(separator).join(to_bytes(p) for p in parts)
    spread = np.broadcast_arrays(*(_array(p) for p in parts))
    result = np.empty(spread[0].shape, object)
    rows = zip(*(s.reshape(-1) for s in spread), strict=True)
    result.reshape(-1)[:] = [to_bytes(separator).join(row) for row in rows]
    return result if result.ndim else result[()]


def reduce_join(
    inputs: Any,
    axis: Any = None,
    keepdims: Any = False,
    separator: Any = "",
    name: str | None = None,
) -> Any:
    """Join the strings along an axis.

    Example:
        >>> tf.strings.reduce_join(["a", "b"])
        b'ab'
    """
    x = _array(inputs)
    if axis is None:
        text = to_bytes(separator).join(x.reshape(-1))
        return np.full((1,) * x.ndim, text, object) if keepdims else text
    moved = np.moveaxis(x, axis, -1)
    joined = np.empty(moved.shape[:-1], object)
    rows = moved.reshape(-1, moved.shape[-1])
    joined.reshape(-1)[:] = [to_bytes(separator).join(row) for row in rows]
    if keepdims:
        return np.expand_dims(joined, axis)
    return joined if joined.ndim else joined[()]


def split(input: Any, sep: Any = None, maxsplit: Any = -1, name: str | None = None) -> Any:
    """Split a string at separators; for an array of strings, return a list of arrays.

    Example:
        >>> tf.strings.split("a b").tolist()
        [b'a', b'b']
    """
    if not isinstance(input, (str, bytes)) and np.ndim(input):
        return [split(each, sep, maxsplit) for each in _array(input)]
    text = to_bytes(input if isinstance(input, (str, bytes)) else np.asarray(input, object).item())
    return _array(text.split(to_bytes(sep) if sep else None, maxsplit))


def bytes_split(input: Any, name: str | None = None) -> Any:
    """Split a string into bytes.

    Example:
        >>> tf.strings.bytes_split("ab").tolist()
        [b'a', b'b']
    """
    text = to_bytes(input)
    return _array([text[i : i + 1] for i in range(len(text))])


def unicode_split(
    input: Any,
    input_encoding: Any,
    errors: Any = "replace",
    replacement_char: Any = 65533,
    name: str | None = None,
) -> Any:
    """Split a string into characters.

    Example:
        >>> tf.strings.unicode_split("ab", "UTF-8").tolist()
        [b'a', b'b']
    """
    return _array([c.encode() for c in to_bytes(input).decode(input_encoding, errors)])


def unicode_decode(
    input: Any,
    input_encoding: Any,
    errors: Any = "replace",
    replacement_char: Any = 65533,
    replace_control_characters: Any = False,
    name: str | None = None,
) -> Any:
    """Return the Unicode code points of a string.

    Example:
        >>> tf.strings.unicode_decode("ab", "UTF-8").tolist()
        [97, 98]
    """
    return np.array([ord(c) for c in to_bytes(input).decode(input_encoding, errors)], np.int32)


def unicode_encode(
    input: Any,
    output_encoding: Any,
    errors: Any = "replace",
    replacement_char: Any = 65533,
    name: str | None = None,
) -> Any:
    """Encode Unicode code points as a string.

    Example:
        >>> tf.strings.unicode_encode([97, 98], "UTF-8")
        b'ab'
    """
    return "".join(chr(int(c)) for c in np.asarray(input)).encode(output_encoding)


def substr(input: Any, pos: Any, len: Any, unit: Any = "BYTE", name: str | None = None) -> Any:
    """Return a substring.

    Example:
        >>> tf.strings.substr("abcd", 1, 2)
        b'bc'
    """
    start, count = int(pos), int(len)
    if unit == "UTF8_CHAR":
        return _each(input, lambda s: s.decode()[start:][:count].encode())
    return _each(input, lambda s: s[start:][:count])


def _pattern(text: Any) -> Any:
    return re.compile(to_bytes(text))


def regex_full_match(input: Any, pattern: Any, name: str | None = None) -> Any:
    """Whether a regular expression matches the whole string.

    Example:
        >>> tf.strings.regex_full_match("ab", "a.")
        np.True_
    """
    compiled = _pattern(pattern)
    return _each(input, lambda s: compiled.fullmatch(s) is not None, np.bool_)


def regex_replace(
    input: Any, pattern: Any, rewrite: Any, replace_global: Any = True, name: str | None = None
) -> Any:
    """Replace the matches of a regular expression.

    Example:
        >>> tf.strings.regex_replace("a-b", "-", "+")
        b'a+b'
    """
    compiled = _pattern(pattern)
    new = re.sub(rb"\\(\d)", rb"\\g<\1>", to_bytes(rewrite))
    return _each(input, lambda s: compiled.sub(new, s, count=0 if replace_global else 1))


def to_number(input: Any, out_type: Any = np.float32, name: str | None = None) -> Any:
    """Parse strings as numbers.

    Example:
        >>> float(tf.strings.to_number("1.5"))
        1.5
    """
    kind = np.dtype(out_type)
    return _each(input, (lambda s: int(s)) if kind.kind in "iu" else (lambda s: float(s)), kind)


def to_hash_bucket(input: Any, num_buckets: Any, name: str | None = None) -> Any:
    """Hash each string to a number below ``num_buckets``; the numbers differ from TensorFlow's.

    Example:
        >>> 0 <= int(tf.strings.to_hash_bucket("a", 10)) < 10
        True
    """
    return _each(input, lambda s: _hash(s) % int(num_buckets), np.int64)


to_hash_bucket_fast = to_hash_bucket


def to_hash_bucket_strong(input: Any, num_buckets: Any, key: Any, name: str | None = None) -> Any:
    """Hash each string with a key to a number below ``num_buckets``, other than TensorFlow's.

    Example:
        >>> 0 <= int(tf.strings.to_hash_bucket_strong("a", 10, [1, 2])) < 10
        True
    """
    start = np.asarray(key, np.uint64).tobytes()
    return _each(input, lambda s: _hash(start + s) % int(num_buckets), np.int64)


def _hash(text: Any) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def format(
    template: Any, inputs: Any, placeholder: Any = "{}", summarize: Any = 3, name: str | None = None
) -> Any:
    """Format values into a template string.

    Example:
        >>> tf.strings.format("loss: {}", 1.5)
        b'loss: 1.5'
    """
    values = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    parts = str(template).split(placeholder)
    if len(parts) != len(values) + 1:
        raise InvalidArgumentError(
            f"format: {len(parts) - 1} placeholders for {len(values)} values."
        )
    shown = [str(np.asarray(v)) if hasattr(v, "dtype") else str(v) for v in values]
    return "".join(p + v for p, v in zip(parts, [*shown, ""], strict=True)).encode()


def ngrams(
    data: Any,
    ngram_width: Any,
    separator: Any = " ",
    pad_values: Any = None,
    padding_width: Any = None,
    preserve_short_sequences: Any = False,
    name: str | None = None,
) -> Any:
    """Return n-grams of neighbouring strings.

    Example:
        >>> tf.strings.ngrams(["a", "b", "c"], 2).tolist()
        [b'a b', b'b c']
    """
    words = list(_array(data))
    widths = ngram_width if isinstance(ngram_width, (list, tuple)) else [ngram_width]
    if pad_values is not None:
        left, right = pad_values if isinstance(pad_values, tuple) else (pad_values, pad_values)
        count = max(widths) - 1 if padding_width is None else padding_width
        words = [to_bytes(left)] * count + words + [to_bytes(right)] * count
    result = [
        to_bytes(separator).join(words[i : i + n])
        for n in widths
        for i in range(len(words) - n + 1)
    ]
    if not result and preserve_short_sequences and words:
        result = [to_bytes(separator).join(words)]
    return _array(result)


def as_bytes(bytes_or_text: Any, encoding: Any = "utf-8") -> Any:
    """Encode a string as bytes.

    Example:
        >>> rx.compat.as_bytes("a")
        b'a'
    """
    return (
        bytes_or_text.encode(encoding) if isinstance(bytes_or_text, str) else bytes(bytes_or_text)
    )


def as_text(bytes_or_text: Any, encoding: Any = "utf-8") -> Any:
    """Decode bytes as a string.

    Example:
        >>> rx.compat.as_text(b"a")
        'a'
    """
    return (
        bytes_or_text if isinstance(bytes_or_text, str) else bytes(bytes_or_text).decode(encoding)
    )


as_str = as_text


def as_str_any(value: Any, encoding: Any = "utf-8") -> Any:
    """Convert any value to a string.

    Example:
        >>> rx.compat.as_str_any(5)
        '5'
    """
    return as_text(value, encoding) if isinstance(value, (str, bytes)) else str(value)


def path_to_str(path: Any) -> Any:
    """Convert a path to a string.

    Example:
        >>> rx.compat.path_to_str("a/b")
        'a/b'
    """
    return as_str_any(path.__fspath__() if hasattr(path, "__fspath__") else path)
