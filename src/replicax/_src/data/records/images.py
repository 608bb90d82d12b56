"""Decoding of image files to arrays, with Pillow and TensorFlow's conversions."""

import io
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from replicax._src.base.lazy import LazyModule
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.leaves import Array, to_array

_pillow: Any = LazyModule("PIL.Image", extra="images")

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_GRAY = np.array([9798, 19235, 3735], np.int64)  # 0.299, 0.587, 0.114 times 2**15, as in libpng
_NATIVE_MODES = ("L", "LA", "RGB", "RGBA", "I;16")  # modes of Pillow that need no conversion
_PNG_DEPTH, _PNG_COLOR = 24, 25  # byte offsets of the bit depth and colour type in a PNG file


def decode_jpeg(  # noqa: PLR0913
    contents: Any,
    channels: int = 0,
    ratio: int = 1,
    fancy_upscaling: bool = True,  # noqa: FBT001, FBT002
    try_recover_truncated: bool = False,  # noqa: FBT001, FBT002
    acceptable_fraction: float = 1,
    dct_method: str = "",
    name: str | None = None,
) -> Array:
    """Decode a JPEG image to an array of height, width and channels.

    Values equal those of TensorFlow with ``dct_method="INTEGER_ACCURATE"``; they differ by a few
    levels from its default method.

    Args:
        contents: The content of a file.
        channels: 1 for grayscale, 3 for RGB; 0 for the channels of the file.
        ratio: Must be 1; scale the array afterwards.
        fancy_upscaling: Must be True.
        try_recover_truncated: Must be False.
        acceptable_fraction: Ignored.
        dct_method: Ignored.
        name: Ignored.

    Returns:
        A uint8 array.

    Raises:
        InvalidArgumentError: The bytes are not an image.

    Example:
        >>> from PIL import Image
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (4, 2)).save(file, "JPEG")
        >>> rx.io.decode_jpeg(file.getvalue()).shape
        (2, 4, 3)
    """
    del acceptable_fraction, dct_method, name
    if ratio != 1 or not fancy_upscaling or try_recover_truncated:
        raise InvalidArgumentError(
            f"decode_jpeg(ratio={ratio}, fancy_upscaling={fancy_upscaling}, try_recover_truncated="
            f"{try_recover_truncated}): only 1, True and False are supported. Scale the array"
            " afterwards, for example with `jax.image.resize`."
        )
    if channels not in (0, 1, 3):
        raise InvalidArgumentError(f"decode_jpeg(channels={channels}): give 0, 1 or 3.")
    return _decode_still(contents, channels, np.uint8, "decode_jpeg")


def decode_png(
    contents: Any, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> Array:
    """Decode a PNG image to an array of height, width and channels.

    Args:
        contents: The content of a file.
        channels: 1 for grayscale, 3 for RGB, 4 for RGBA; 0 for the channels of the file.
        dtype: uint8, or uint16.
        name: Ignored.

    Returns:
        An array of ``dtype``.

    Raises:
        InvalidArgumentError: The bytes are not an image.

    Example:
        >>> from PIL import Image
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("RGB", (4, 2), (255, 0, 0)).save(file, "PNG")
        >>> rx.io.decode_png(file.getvalue())[0, 0]
        array([255,   0,   0], dtype=uint8)
    """
    del name
    if np.dtype(dtype) not in (np.uint8, np.uint16):
        raise InvalidArgumentError(f"decode_png(dtype={np.dtype(dtype)}): give uint8 or uint16.")
    return _decode_still(contents, channels, dtype, "decode_png")


def decode_image(
    contents: Any,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,  # noqa: FBT001, FBT002
) -> Array:
    """Decode a BMP, GIF, JPEG, PNG or WebP image to an array.

    Args:
        contents: The content of a file.
        channels: 1 for grayscale, 3 for RGB, 4 for RGBA; 0 or None for the channels of the file.
        dtype: uint8, uint16, or float32 with values from 0 to 1.
        name: Ignored.
        expand_animations: Whether to return all frames of a GIF along a first axis; otherwise
            only the first frame.

    Returns:
        An array of height, width and channels.

    Raises:
        InvalidArgumentError: The bytes are not an image.

    Example:
        >>> from PIL import Image
        >>> import io
        >>> file = io.BytesIO()
        >>> Image.new("L", (4, 2), 255).save(file, "PNG")
        >>> rx.io.decode_image(file.getvalue(), dtype=np.float32).max()
        np.float32(1.0)
    """
    del name
    if np.dtype(dtype) not in (np.uint8, np.uint16, np.float32):
        raise InvalidArgumentError(
            f"decode_image(dtype={np.dtype(dtype)}): give uint8, uint16 or float32, and convert the"
            " array afterwards."
        )
    image = _open_image(contents, "decode_image")
    if image.format == "GIF" and expand_animations:
        frames = [_pixels(frame, 3) for frame in _frames(image)]
        return _to_dtype(np.stack(frames), dtype)
    return _decode_still(contents, channels or 0, dtype, "decode_image")


def _decode_still(contents: Any, channels: int, dtype: DTypeLike, verb: str) -> Array:
    """Decode the first frame of an image; errors name the function `verb`."""
    if channels not in (0, 1, 3, 4):
        raise InvalidArgumentError(f"{verb}(channels={channels}): give 0, 1, 3 or 4.")
    image = _open_image(contents, verb)
    data = to_array(contents)[()]
    is_deep = image.format == "PNG" and data[_PNG_DEPTH] == 16 and data[_PNG_COLOR] != 0
    if is_deep and np.dtype(dtype) != np.uint8:
        raise InvalidArgumentError(
            f"{verb}(dtype={np.dtype(dtype)}): the image has colours of 16 bits, of which Pillow"
            " reads 8. Ask for uint8, or write the image in gray."
        )
    try:
        if image.format == "JPEG" and channels == 1:
            image.draft("L", image.size)  # decode only the luma channel of the file
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidArgumentError(f"{verb}(): the image is damaged or cut off: {error}.") from None
    pixels = _pixels(image, channels)
    if image.format == "PNG" and np.dtype(dtype) == np.float32:
        pixels = _to_dtype(pixels, np.uint16)  # via uint16 as in TensorFlow, for equal rounding
    return _to_dtype(pixels, dtype)


def _open_image(contents: Any, verb: str) -> Any:
    """Open an image file with Pillow; raise `InvalidArgumentError` if it is none."""
    data = to_array(contents)[()]
    if not isinstance(data, bytes):
        raise InvalidArgumentError(
            f"{verb}() needs the bytes of one file, got {type(data).__name__}. Call it for each,"
            " for example in `Dataset.map`."
        )
    try:
        return _pillow.open(io.BytesIO(data), formats=_FORMATS)
    except (OSError, SyntaxError, ValueError):
        raise InvalidArgumentError(
            f"{verb}(): these {len(data)} bytes are none of {', '.join(_FORMATS)}: {data[:20]!r}."
        ) from None


def _frames(image: Any) -> Any:
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        yield image.convert("RGB")


def _pixels(image: Any, channels: int) -> Array:
    """Return an array of height, width and channels: uint8, or uint16 for 16-bit grayscale."""
    if image.mode not in _NATIVE_MODES:
        has_alpha = "transparency" in image.info or image.mode in ("PA", "La", "RGBa")
        image = image.convert("RGBA" if has_alpha else "RGB" if image.mode != "1" else "L")
    pixels = np.array(image).reshape(image.height, image.width, -1)
    found = pixels.shape[-1]
    if channels in (0, found):
        return pixels
    if channels == 1:
        return pixels[..., :1] if found == 2 else _to_gray(pixels[..., :3])
    colours = pixels[..., :1].repeat(3, axis=-1) if found < 3 else pixels[..., :3]
    if channels == 3:
        return colours
    most = np.iinfo(pixels.dtype).max
    opaque = np.full((*pixels.shape[:2], 1), most, pixels.dtype)
    return np.concatenate([colours, pixels[..., -1:] if found == 2 else opaque], axis=-1)


def _to_gray(colours: Array) -> Array:
    """Convert RGB to grayscale with the fixed-point arithmetic of libpng."""
    is_gray = (colours == colours[..., :1]).all(-1, keepdims=True)
    mixed = (colours.astype(np.int64) @ _GRAY)[..., None] >> 15
    return np.where(is_gray, colours[..., :1], mixed).astype(colours.dtype)


def _to_dtype(pixels: Array, dtype: DTypeLike) -> Array:
    """Rescale pixel values to the range of `dtype`; to [0, 1] for float32."""
    wanted = np.dtype(dtype)
    if wanted == np.float32:
        most = np.iinfo(pixels.dtype).max
        return pixels.astype(np.float32) * np.float32(1 / most)
    if wanted == pixels.dtype:
        return pixels
    result: Array = pixels >> 8 if wanted == np.uint8 else pixels.astype(np.uint16) * 257
    return result.astype(wanted)
