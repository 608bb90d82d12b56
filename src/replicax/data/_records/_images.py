"""Images in files -> arrays, through Pillow."""

import io
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from replicax._lazy import LazyModule
from replicax.data._errors import InvalidArgumentError
from replicax.data._leaves import Array, to_array

_pillow: Any = LazyModule("PIL.Image", extra="images")

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "WEBP")
_GRAY = np.array([9798, 19235, 3735], np.int64)  # 0.299, 0.587, 0.114 in parts of 2**15, as libpng
_OWN_CHANNELS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "I;16": 1}
_PNG_DEPTH, _PNG_COLOR = 24, 25  # where a PNG file tells the bits of a value, and its kind


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
    """A JPEG image as an array of height, width and channels.

    The numbers are those of TensorFlow's ``dct_method="INTEGER_ACCURATE"``; with its default they
    differ by a few levels.

    Args:
        contents: The bytes of a file.
        channels: 1 for gray, 3 for colours; those of the file if 0.
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
    return _still(contents, channels, np.uint8, "decode_jpeg")


def decode_png(
    contents: Any, channels: int = 0, dtype: DTypeLike = np.uint8, name: str | None = None
) -> Array:
    """A PNG image as an array of height, width and channels.

    Args:
        contents: The bytes of a file.
        channels: 1 for gray, 3 for colours, 4 with transparency; those of the file if 0.
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
    return _still(contents, channels, dtype, "decode_png")


def decode_image(
    contents: Any,
    channels: int | None = None,
    dtype: DTypeLike = np.uint8,
    name: str | None = None,
    expand_animations: bool = True,  # noqa: FBT001, FBT002
) -> Array:
    """An image of any kind (BMP, GIF, JPEG, PNG, WebP) as an array.

    Args:
        contents: The bytes of a file.
        channels: 1 for gray, 3 for colours, 4 with transparency; those of the file if 0 or None.
        dtype: uint8, uint16, or float32 with values from 0 to 1.
        name: Ignored.
        expand_animations: Whether a GIF gives all its pictures, along a first axis of the array;
            otherwise the first one.

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
    image = _opened(contents, "decode_image")
    if image.format == "GIF" and expand_animations:
        frames = [_pixels(frame, 3) for frame in _frames(image)]
        return _converted(np.stack(frames), dtype)
    return _still(contents, channels or 0, dtype, "decode_image")


def _still(contents: Any, channels: int, dtype: DTypeLike, verb: str) -> Array:
    if channels not in (0, 1, 3, 4):
        raise InvalidArgumentError(f"{verb}(channels={channels}): give 0, 1, 3 or 4.")
    image = _opened(contents, verb)
    data = to_array(contents)[()]
    is_deep = image.format == "PNG" and data[_PNG_DEPTH] == 16 and data[_PNG_COLOR] != 0
    if is_deep and np.dtype(dtype) != np.uint8:
        raise InvalidArgumentError(
            f"{verb}(dtype={np.dtype(dtype)}): the image has colours of 16 bits, of which Pillow"
            " reads 8. Ask for uint8, or write the image in gray."
        )
    try:
        if image.format == "JPEG" and channels == 1:
            image.draft("L", image.size)  # the brightness that the file has itself
        image.load()
    except (OSError, SyntaxError, ValueError) as error:
        raise InvalidArgumentError(f"{verb}(): the image is damaged or cut off: {error}.") from None
    pixels = _pixels(image, channels)
    if image.format == "PNG" and np.dtype(dtype) == np.float32:
        pixels = _converted(pixels, np.uint16)  # as TensorFlow does, to the last bit
    return _converted(pixels, dtype)


def _opened(contents: Any, verb: str) -> Any:
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
    """Height, width and channels, in 8 bits or, of gray images, in 16."""
    if image.mode not in _OWN_CHANNELS:
        is_clear = "transparency" in image.info or image.mode in ("PA", "La", "RGBa")
        image = image.convert("RGBA" if is_clear else "RGB" if image.mode != "1" else "L")
    pixels = np.array(image).reshape(image.height, image.width, -1)
    own = pixels.shape[-1]
    if channels in (0, own):
        return pixels
    if channels == 1:
        return pixels[..., :1] if own == 2 else _gray(pixels[..., :3])
    colours = pixels[..., :1].repeat(3, axis=-1) if own < 3 else pixels[..., :3]
    if channels == 3:
        return colours
    most = np.iinfo(pixels.dtype).max
    clear = np.full((*pixels.shape[:2], 1), most, pixels.dtype)
    return np.concatenate([colours, pixels[..., -1:] if own == 2 else clear], axis=-1)


def _gray(colours: Array) -> Array:
    is_gray = (colours == colours[..., :1]).all(-1, keepdims=True)
    mixed = (colours.astype(np.int64) @ _GRAY)[..., None] >> 15
    return np.where(is_gray, colours[..., :1], mixed).astype(colours.dtype)


def _converted(pixels: Array, dtype: DTypeLike) -> Array:
    wanted = np.dtype(dtype)
    if wanted == np.float32:
        most = np.iinfo(pixels.dtype).max
        return pixels.astype(np.float32) * np.float32(1 / most)
    if wanted == pixels.dtype:
        return pixels
    result: Array = pixels >> 8 if wanted == np.uint8 else pixels.astype(np.uint16) * 257
    return result.astype(wanted)
