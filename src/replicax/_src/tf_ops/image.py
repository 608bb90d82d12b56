"""Functions of `tf.image`."""

import enum
import io
import threading
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.base.lazy import LazyModule
from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.data.seeds import follow_global_seed
from replicax._src.data.user_functions import in_element_function
from replicax._src.random.random import uniform
from replicax._src.random.stateless import stateless_uniform
from replicax._src.tf_ops.arrays import cast, pad
from replicax._src.tf_ops.core import as_tensor, ints, library
from replicax._src.tf_ops.resampling import axis_weights, nearest_indices

_pillow: Any = LazyModule("PIL.Image", extra="images")
_GRAY = np.array([0.2989, 0.5870, 0.1140], np.float32)


class ResizeMethod(enum.StrEnum):
    """The methods of `tf.image.resize`.

    Example:
        >>> tf.image.ResizeMethod.BILINEAR.value
        'bilinear'
    """

    AREA = "area"
    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    GAUSSIAN = "gaussian"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"
    MITCHELLCUBIC = "mitchellcubic"
    NEAREST_NEIGHBOR = "nearest"


def _size_of(image: Any) -> Any:
    """Return height and width."""
    return image.shape[-3], image.shape[-2]


def resize(
    images: Any,
    size: Any,
    method: Any = ResizeMethod.BILINEAR,
    preserve_aspect_ratio: Any = False,
    antialias: Any = False,
    name: str | None = None,
) -> Any:
    """Resize images; the result is float32, except for "nearest".

    Example:
        >>> tf.image.resize(jnp.arange(4.0).reshape(2, 2, 1), [1, 2])[0, :, 0]
        Array([1., 2.], dtype=float32)
    """
    image = as_tensor(images)
    if image.ndim not in (3, 4):
        raise InvalidArgumentError(f"resize: images need 3 or 4 axes, got shape {image.shape}.")
    height, width = _size_of(image)
    new_height, new_width = ints(size)
    if preserve_aspect_ratio:
        ratio = min(new_height / height, new_width / width)
        new_height, new_width = round(ratio * height), round(ratio * width)
    if (height, width) == (new_height, new_width) and not in_element_function():
        return image
    kind = str(getattr(method, "value", method)).lower()
    if kind == "nearest":
        rows, columns = nearest_indices(height, new_height), nearest_indices(width, new_width)
        return image[..., rows, :, :][..., columns, :]
    if (height, width) == (new_height, new_width):
        return image.astype(np.float32)
    rows = axis_weights(kind, height, new_height, bool(antialias))
    columns = axis_weights(kind, width, new_width, bool(antialias))
    return _resampled(image.astype(np.float32), rows, columns)


def _resampled(image: Any, rows: Any, columns: Any) -> Any:
    xp = library(image)
    extra = {} if xp is np else {"precision": "highest"}
    result = xp.einsum("ih,...hwc->...iwc", rows, image, **extra)
    return xp.einsum("jw,...iwc->...ijc", columns, result, **extra)


def resize_with_crop_or_pad(image: Any, target_height: Any, target_width: Any) -> Any:
    """Crop or pad images at the center.

    Example:
        >>> tf.image.resize_with_crop_or_pad(jnp.ones((2, 4, 1)), 4, 2).shape
        (4, 2, 1)
    """
    x = as_tensor(image)
    height, width = _size_of(x)
    more_height, more_width = int(target_height) - height, int(target_width) - width
    top, left = max(-more_height // 2, 0), max(-more_width // 2, 0)
    x = crop_to_bounding_box(
        x, top, left, min(height, int(target_height)), min(width, int(target_width))
    )
    return pad_to_bounding_box(
        x, max(more_height // 2, 0), max(more_width // 2, 0), int(target_height), int(target_width)
    )


def resize_with_pad(
    image: Any,
    target_height: Any,
    target_width: Any,
    method: Any = ResizeMethod.BILINEAR,
    antialias: Any = False,
) -> Any:
    """Resize images and pad them, keeping the aspect ratio.

    Example:
        >>> tf.image.resize_with_pad(jnp.ones((2, 4, 1)), 4, 4).shape
        (4, 4, 1)
    """
    x = as_tensor(image)
    height, width = _size_of(x)
    ratio = max(width / target_width, height / target_height)
    top = max(0, int(np.floor((target_height - height / ratio) / 2)))
    left = max(0, int(np.floor((target_width - width / ratio) / 2)))
    result = resize(
        x,
        [int(np.floor(height / ratio)), int(np.floor(width / ratio))],
        method,
        antialias=antialias,
    )
    return pad_to_bounding_box(result, top, left, target_height, target_width)


def crop_to_bounding_box(
    image: Any, offset_height: Any, offset_width: Any, target_height: Any, target_width: Any
) -> Any:
    """Crop a box from images.

    Example:
        >>> tf.image.crop_to_bounding_box(jnp.ones((4, 4, 1)), 1, 1, 2, 3).shape
        (2, 3, 1)
    """
    x = as_tensor(image)
    top, left = offset_height, offset_width
    if any(isinstance(v, jax.core.Tracer) for v in (top, left)):
        x = jax.lax.dynamic_slice_in_dim(x, top, int(target_height), x.ndim - 3)
        return jax.lax.dynamic_slice_in_dim(x, left, int(target_width), x.ndim - 2)
    return x[
        ..., int(top) : int(top) + int(target_height), int(left) : int(left) + int(target_width), :
    ]


def pad_to_bounding_box(
    image: Any, offset_height: Any, offset_width: Any, target_height: Any, target_width: Any
) -> Any:
    """Pad images with zeros to a size.

    Example:
        >>> tf.image.pad_to_bounding_box(jnp.ones((2, 2, 1)), 1, 0, 4, 2).shape
        (4, 2, 1)
    """
    x = as_tensor(image)
    height, width = _size_of(x)
    top, left = int(offset_height), int(offset_width)
    below, right = int(target_height) - top - height, int(target_width) - left - width
    if min(top, left, below, right) < 0:
        raise InvalidArgumentError(
            f"pad_to_bounding_box: an image of {height} x {width} at ({top}, {left}) does not fit"
            f" into {target_height} x {target_width}."
        )
    return pad(x, [[0, 0]] * (x.ndim - 3) + [[top, below], [left, right], [0, 0]])


def central_crop(image: Any, central_fraction: Any) -> Any:
    """Crop the central part of images.

    Example:
        >>> tf.image.central_crop(jnp.ones((4, 4, 1)), 0.5).shape
        (2, 2, 1)
    """
    x = as_tensor(image)
    height, width = _size_of(x)
    top = int((height - height * float(central_fraction)) / 2)
    left = int((width - width * float(central_fraction)) / 2)
    return crop_to_bounding_box(x, top, left, height - 2 * top, width - 2 * left)


def flip_left_right(image: Any) -> Any:
    """Mirror images horizontally.

    Example:
        >>> tf.image.flip_left_right(jnp.arange(2).reshape(1, 2, 1))[0, :, 0]
        Array([1, 0], dtype=int32)
    """
    return library(image).flip(as_tensor(image), -2)


def flip_up_down(image: Any) -> Any:
    """Mirror images vertically.

    Example:
        >>> tf.image.flip_up_down(jnp.arange(2).reshape(2, 1, 1))[:, 0, 0]
        Array([1, 0], dtype=int32)
    """
    return library(image).flip(as_tensor(image), -3)


def transpose(image: Any, name: str | None = None) -> Any:
    """Swap height and width.

    Example:
        >>> tf.image.transpose(jnp.ones((2, 4, 1))).shape
        (4, 2, 1)
    """
    return library(image).swapaxes(as_tensor(image), -3, -2)


def rot90(image: Any, k: Any = 1, name: str | None = None) -> Any:
    """Rotate images counter-clockwise by 90 degrees, k times.

    Example:
        >>> tf.image.rot90(jnp.ones((2, 4, 1))).shape
        (4, 2, 1)
    """
    x = as_tensor(image)
    if isinstance(k, jax.core.Tracer):
        turns = [lambda y, n=n: jnp.rot90(y, n, (-3, -2)) for n in range(4)]
        return jax.lax.switch(k % 4, turns, x)
    return library(x).rot90(x, int(k), (-3, -2))


def convert_image_dtype(
    image: Any, dtype: Any, saturate: Any = False, name: str | None = None
) -> Any:
    """Convert images to another dtype; floats are in [0, 1], whole numbers use their range.

    Example:
        >>> tf.image.convert_image_dtype(jnp.uint8(255), jnp.float32)
        Array(1., dtype=float32)
    """
    x, wanted = as_tensor(image), np.dtype(dtype)
    if x.dtype == wanted:
        return x
    is_float, to_float = x.dtype.kind not in "iu", wanted.kind not in "iu"
    if is_float and to_float:
        return x.astype(wanted)
    if to_float:
        return x.astype(wanted) * wanted.type(1 / np.iinfo(x.dtype).max)
    if is_float:
        scaled = x * np.asarray(np.iinfo(wanted).max + 0.5, x.dtype)
        return _saturated(scaled, wanted) if saturate else cast(scaled, wanted)
    return _between_ints(x, wanted, saturate)


def _between_ints(x: Any, wanted: Any, saturate: Any) -> Any:
    old, new = np.iinfo(x.dtype).max, np.iinfo(wanted).max
    if old > new:
        scaled = x // ((old + 1) // (new + 1))
        return _saturated(scaled, wanted) if saturate else scaled.astype(wanted)
    x = _saturated(x, wanted) if saturate else x.astype(wanted)
    return x * np.asarray((new + 1) // (old + 1), wanted)


def _saturated(x: Any, wanted: Any) -> Any:
    info = np.iinfo(wanted)
    return cast(library(x).clip(x, info.min, info.max), wanted)


def _in_floats(image: Any, change: Any) -> Any:
    """Apply ``function`` to images of any dtype, converted to floats and back."""
    x = as_tensor(image)
    if x.dtype.kind not in "iu":
        return change(x)
    result = change(convert_image_dtype(x, np.float32))
    return convert_image_dtype(result, x.dtype, saturate=True)


def adjust_brightness(image: Any, delta: Any) -> Any:
    """Add ``delta`` to every pixel.

    Example:
        >>> tf.image.adjust_brightness(jnp.zeros((1, 1, 1)), 0.5).item()
        0.5
    """
    return _in_floats(image, lambda x: x + library(x).asarray(delta, x.dtype))


def adjust_contrast(images: Any, contrast_factor: Any) -> Any:
    """Scale the distance from the mean of each channel.

    Example:
        >>> tf.image.adjust_contrast(jnp.array([[[0.0], [2.0]]]), 2.0)[0, :, 0]
        Array([-1.,  3.], dtype=float32)
    """

    def change(x: Any) -> Any:
        mean = x.mean((-3, -2), keepdims=True)
        return (x - mean) * library(x).asarray(contrast_factor, x.dtype) + mean

    return _in_floats(images, change)


def adjust_gamma(image: Any, gamma: Any = 1, gain: Any = 1) -> Any:
    """Return gain * image ** gamma.

    Example:
        >>> tf.image.adjust_gamma(jnp.full((1, 1, 1), 0.5), 2).item()
        0.25
    """
    return _in_floats(image, lambda x: gain * x**gamma)


def rgb_to_hsv(images: Any, name: str | None = None) -> Any:
    """Convert colors from RGB to HSV.

    Example:
        >>> tf.image.rgb_to_hsv(jnp.array([1.0, 0.0, 0.0]))
        Array([0., 1., 1.], dtype=float32)
    """
    x = as_tensor(images)
    xp = library(x)
    red, green, blue = x[..., 0], x[..., 1], x[..., 2]
    value, least = x.max(-1), x.min(-1)
    spread = value - least
    safe = xp.where(spread > 0, spread, xp.ones_like(spread))
    saturation = xp.where(
        value > 0, spread / xp.where(value > 0, value, xp.ones_like(value)), xp.zeros_like(value)
    )
    norm = xp.asarray(1 / 6, x.dtype) / safe
    hue = xp.where(
        red == value,
        norm * (green - blue),
        xp.where(green == value, norm * (blue - red) + 2 / 6, norm * (red - green) + 4 / 6),
    )
    hue = xp.where(spread > 0, hue, xp.zeros_like(hue))
    hue = xp.where(hue < 0, hue + 1, hue)
    return xp.stack([hue, saturation, value], -1).astype(x.dtype)


def hsv_to_rgb(images: Any, name: str | None = None) -> Any:
    """Convert colors from HSV to RGB.

    Example:
        >>> tf.image.hsv_to_rgb(jnp.array([0.0, 1.0, 1.0]))
        Array([1., 0., 0.], dtype=float32)
    """
    x = as_tensor(images)
    xp = library(x)
    hue, saturation, value = x[..., 0], x[..., 1], x[..., 2]
    sector = hue * 6
    red = xp.clip(xp.abs(sector - 3) - 1, 0, 1)
    green = xp.clip(2 - xp.abs(sector - 2), 0, 1)
    blue = xp.clip(2 - xp.abs(sector - 4), 0, 1)
    mix = xp.stack([red, green, blue], -1)
    result = (1 - saturation[..., None] + saturation[..., None] * mix) * value[..., None]
    return result.astype(x.dtype)


def adjust_saturation(image: Any, saturation_factor: Any, name: str | None = None) -> Any:
    """Scale the saturation of colors.

    Example:
        >>> tf.image.adjust_saturation(jnp.array([[[1.0, 0.5, 0.5]]]), 2.0)[0, 0]
        Array([1., 0., 0.], dtype=float32)
    """

    def change(x: Any) -> Any:
        xp, hsv = library(x), rgb_to_hsv(x)
        more = xp.clip(hsv[..., 1] * saturation_factor, 0, 1)
        return hsv_to_rgb(xp.stack([hsv[..., 0], more, hsv[..., 2]], -1))

    return _in_floats(image, change)


def adjust_hue(image: Any, delta: Any, name: str | None = None) -> Any:
    """Shift the hue of colors.

    Example:
        >>> tf.image.adjust_hue(jnp.array([[[1.0, 0.0, 0.0]]]), 0.5)[0, 0]
        Array([0., 1., 1.], dtype=float32)
    """

    def change(x: Any) -> Any:
        xp, hsv = library(x), rgb_to_hsv(x)
        return hsv_to_rgb(xp.stack([(hsv[..., 0] + delta) % 1, hsv[..., 1], hsv[..., 2]], -1))

    return _in_floats(image, change)


def rgb_to_grayscale(images: Any, name: str | None = None) -> Any:
    """Convert colors to one channel.

    Example:
        >>> tf.image.rgb_to_grayscale(jnp.ones((1, 1, 3))).item()
        0.9999000430107117
    """
    x = as_tensor(images)
    result = convert_image_dtype(x, np.float32) if x.dtype.kind in "iu" else x
    gray = (result * _GRAY.astype(result.dtype)).sum(-1, keepdims=True)
    return convert_image_dtype(gray, x.dtype)


def grayscale_to_rgb(images: Any, name: str | None = None) -> Any:
    """Repeat one channel three times.

    Example:
        >>> tf.image.grayscale_to_rgb(jnp.ones((1, 1, 1))).shape
        (1, 1, 3)
    """
    x = as_tensor(images)
    return library(x).repeat(x, 3, -1)


_YUV = np.array(
    [
        [0.299, -0.14714119, 0.61497538],
        [0.587, -0.28886916, -0.51496512],
        [0.114, 0.43601035, -0.10001026],
    ]
)
_RGB = np.array([[1, 1, 1], [0, -0.394642334, 2.03206185], [1.13988303, -0.58062185, 0]])


def rgb_to_yuv(images: Any) -> Any:
    """Convert colors from RGB to YUV.

    Example:
        >>> tf.image.rgb_to_yuv(jnp.ones(3)).shape
        (3,)
    """
    x = as_tensor(images)
    return library(x).tensordot(x, _YUV.astype(x.dtype), ([-1], [0]))


def yuv_to_rgb(images: Any) -> Any:
    """Convert colors from YUV to RGB.

    Example:
        >>> tf.image.yuv_to_rgb(jnp.zeros(3)).shape
        (3,)
    """
    x = as_tensor(images)
    return library(x).tensordot(x, _RGB.astype(x.dtype), ([-1], [0]))


def per_image_standardization(image: Any) -> Any:
    """Scale each image to mean 0 and variance 1.

    Example:
        >>> tf.image.per_image_standardization(jnp.array([[[1.0], [3.0]]]))[0, :, 0]
        Array([-1.,  1.], dtype=float32)
    """
    x = as_tensor(image)
    x = x if x.dtype.kind == "f" else x.astype(np.float32)
    xp = library(x)
    least = 1 / np.sqrt(np.prod(x.shape[-3:]))
    mean, deviation = x.mean((-3, -2, -1), keepdims=True), x.std((-3, -2, -1), keepdims=True)
    return (x - mean) / xp.maximum(deviation, xp.asarray(least, x.dtype))


# Random changes. On the host each thread draws from a generator of its own.

_local = threading.local()
_seed: list[int | None] = [None, 0]


def _restart(seed: Any) -> None:
    _seed[0], _seed[1] = seed, (_seed[1] or 0) + 1


follow_global_seed(_restart)


def _generator() -> Any:
    if getattr(_local, "version", None) != _seed[1]:
        _local.version, _local.generator = _seed[1], np.random.default_rng(_seed[0])
    return _local.generator


def _draw(low: Any, high: Any, seed: Any = None) -> Any:
    """Draw a random number: on the host with NumPy, elsewhere with `rx.random`."""
    if in_element_function():
        return _generator().uniform(low, high)
    return uniform([], low, high, seed=seed)


def _stateless(low: Any, high: Any, seed: Any) -> Any:
    number = stateless_uniform([], seed, low, high)
    return float(number) if in_element_function() else number


def _where(condition: Any, image: Any, other: Any) -> Any:
    if isinstance(condition, jax.core.Tracer):
        return jnp.where(condition, image, other)
    return image if bool(condition) else other


def _coins(x: Any, draw: Any) -> Any:
    """Return a random boolean for each image of a batch."""
    if x.ndim == 3:
        return draw() < 0.5
    coins = [draw() < 0.5 for _ in range(x.shape[0])]
    return library(x).stack([library(x).asarray(f) for f in coins]).reshape(-1, 1, 1, 1)


def _flipped(image: Any, flip: Any, draw: Any) -> Any:
    x = as_tensor(image)
    coin = _coins(x, draw)
    return library(x).where(coin, flip(x), x)


def random_flip_left_right(image: Any, seed: Any = None) -> Any:
    """Mirror images horizontally with a probability of one half.

    Example:
        >>> tf.image.random_flip_left_right(jnp.ones((2, 2, 1))).shape
        (2, 2, 1)
    """
    return _flipped(image, flip_left_right, lambda: _draw(0.0, 1.0, seed))


def random_flip_up_down(image: Any, seed: Any = None) -> Any:
    """Mirror images vertically with a probability of one half.

    Example:
        >>> tf.image.random_flip_up_down(jnp.ones((2, 2, 1))).shape
        (2, 2, 1)
    """
    return _flipped(image, flip_up_down, lambda: _draw(0.0, 1.0, seed))


def _range(lower: Any, upper: Any, name: str | None) -> Any:
    if not 0 <= lower < upper:
        raise InvalidArgumentError(f"{name}: needs 0 <= lower < upper, got {lower} and {upper}.")


def random_brightness(image: Any, max_delta: Any, seed: Any = None) -> Any:
    """Add the same random number to every pixel.

    Example:
        >>> tf.image.random_brightness(jnp.ones((2, 2, 1)), 0.1).shape
        (2, 2, 1)
    """
    return adjust_brightness(image, _draw(-max_delta, max_delta, seed))


def random_contrast(image: Any, lower: Any, upper: Any, seed: Any = None) -> Any:
    """Scale the contrast by a random factor.

    Example:
        >>> tf.image.random_contrast(jnp.ones((2, 2, 1)), 0.5, 1.5).shape
        (2, 2, 1)
    """
    _range(lower, upper, "random_contrast")
    return adjust_contrast(image, _draw(lower, upper, seed))


def random_saturation(image: Any, lower: Any, upper: Any, seed: Any = None) -> Any:
    """Scale the saturation by a random factor.

    Example:
        >>> tf.image.random_saturation(jnp.ones((2, 2, 3)), 0.5, 1.5).shape
        (2, 2, 3)
    """
    _range(lower, upper, "random_saturation")
    return adjust_saturation(image, _draw(lower, upper, seed))


def random_hue(image: Any, max_delta: Any, seed: Any = None) -> Any:
    """Shift the hue by a random amount.

    Example:
        >>> tf.image.random_hue(jnp.ones((2, 2, 3)), 0.1).shape
        (2, 2, 3)
    """
    return adjust_hue(image, _draw(-max_delta, max_delta, seed))


def random_jpeg_quality(
    image: Any, min_jpeg_quality: Any, max_jpeg_quality: Any, seed: Any = None
) -> Any:
    """Add JPEG artifacts: encode an image with a random quality, and decode it.

    Example:
        >>> tf.image.random_jpeg_quality(np.zeros((8, 8, 3), np.uint8), 50, 90).shape
        (8, 8, 3)
    """
    return adjust_jpeg_quality(image, int(_draw(min_jpeg_quality, max_jpeg_quality, seed)))


def _crop(value: Any, size: Any, draw: Any) -> Any:
    x, sizes = as_tensor(value), ints(size)
    if len(sizes) != x.ndim:
        raise InvalidArgumentError(
            f"random_crop: size {sizes} needs one number for each axis of {x.shape}."
        )
    sizes = tuple(n if s == -1 else s for s, n in zip(sizes, x.shape, strict=True))
    if any(s > n for s, n in zip(sizes, x.shape, strict=True)):
        raise InvalidArgumentError(f"random_crop: size {sizes} is larger than the shape {x.shape}.")
    starts = [draw(i) * (n - s + 1) for i, (s, n) in enumerate(zip(sizes, x.shape, strict=True))]
    if library(x) is np:
        key = tuple(slice(int(b), int(b) + s) for b, s in zip(starts, sizes, strict=True))
        return x[key]
    return jax.lax.dynamic_slice(x, [jnp.asarray(b, jnp.int32) for b in starts], sizes)


def random_crop(value: Any, size: Any, seed: Any = None, name: str | None = None) -> Any:
    """Crop a random block of a given size.

    Example:
        >>> tf.image.random_crop(jnp.ones((4, 4, 1)), [2, 2, 1]).shape
        (2, 2, 1)
    """
    return _crop(value, size, lambda _: _draw(0.0, 1.0, seed))


def stateless_random_crop(value: Any, size: Any, seed: Any, name: str | None = None) -> Any:
    """Crop a random block of a given size, determined by a seed.

    Example:
        >>> tf.image.stateless_random_crop(jnp.ones((4, 4, 1)), [2, 2, 1], (1, 2)).shape
        (2, 2, 1)
    """
    draws = stateless_uniform([len(ints(size))], seed)
    return _crop(value, size, lambda i: draws[i])


def stateless_random_flip_left_right(image: Any, seed: Any) -> Any:
    """Mirror images horizontally with a probability of one half, determined by a seed.

    Example:
        >>> tf.image.stateless_random_flip_left_right(jnp.ones((2, 2, 1)), (1, 2)).shape
        (2, 2, 1)
    """
    return _stateless_flip(image, flip_left_right, seed)


def stateless_random_flip_up_down(image: Any, seed: Any) -> Any:
    """Mirror images vertically with a probability of one half, determined by a seed.

    Example:
        >>> tf.image.stateless_random_flip_up_down(jnp.ones((2, 2, 1)), (1, 2)).shape
        (2, 2, 1)
    """
    return _stateless_flip(image, flip_up_down, seed)


def _stateless_flip(image: Any, flip: Any, seed: Any) -> Any:
    x = as_tensor(image)
    draws = stateless_uniform([] if x.ndim == 3 else [x.shape[0], 1, 1, 1], seed)
    coin = np.asarray(draws) if library(x) is np else draws
    return library(x).where(coin < 0.5, flip(x), x)


def stateless_random_brightness(image: Any, max_delta: Any, seed: Any) -> Any:
    """Add the same random number to every pixel, determined by a seed.

    Example:
        >>> tf.image.stateless_random_brightness(jnp.ones((2, 2, 1)), 0.1, (1, 2)).shape
        (2, 2, 1)
    """
    return adjust_brightness(image, _stateless(-max_delta, max_delta, seed))


def stateless_random_contrast(image: Any, lower: Any, upper: Any, seed: Any) -> Any:
    """Scale the contrast by a random factor, determined by a seed.

    Example:
        >>> tf.image.stateless_random_contrast(jnp.ones((2, 2, 1)), 0.5, 1.5, (1, 2)).shape
        (2, 2, 1)
    """
    _range(lower, upper, "stateless_random_contrast")
    return adjust_contrast(image, _stateless(lower, upper, seed))


def stateless_random_saturation(image: Any, lower: Any, upper: Any, seed: Any = None) -> Any:
    """Scale the saturation by a random factor, determined by a seed.

    Example:
        >>> tf.image.stateless_random_saturation(jnp.ones((2, 2, 3)), 0.5, 1.5, (1, 2)).shape
        (2, 2, 3)
    """
    _range(lower, upper, "stateless_random_saturation")
    return adjust_saturation(image, _stateless(lower, upper, seed))


def stateless_random_hue(image: Any, max_delta: Any, seed: Any) -> Any:
    """Shift the hue by a random amount, determined by a seed.

    Example:
        >>> tf.image.stateless_random_hue(jnp.ones((2, 2, 3)), 0.1, (1, 2)).shape
        (2, 2, 3)
    """
    return adjust_hue(image, _stateless(-max_delta, max_delta, seed))


def encode_jpeg(
    image: Any,
    format: Any = "",
    quality: Any = 95,
    progressive: Any = False,
    optimize_size: Any = False,
    chroma_downsampling: Any = True,
    density_unit: Any = "in",
    x_density: Any = 300,
    y_density: Any = 300,
    xmp_metadata: Any = "",
    name: str | None = None,
) -> Any:
    r"""Return an image as the bytes of a JPEG file.

    Example:
        >>> tf.image.encode_jpeg(np.zeros((8, 8, 3), np.uint8))[:2]
        b'\xff\xd8'
    """
    file = io.BytesIO()
    sampling = {"subsampling": 2 if chroma_downsampling else 0}
    _as_picture(image).save(file, "JPEG", quality=quality, progressive=progressive, **sampling)
    return file.getvalue()


def encode_png(image: Any, compression: Any = -1, name: str | None = None) -> Any:
    r"""Return an image as the bytes of a PNG file.

    Example:
        >>> tf.image.encode_png(np.zeros((8, 8, 3), np.uint8))[1:4]
        b'PNG'
    """
    file = io.BytesIO()
    _as_picture(image).save(file, "PNG")
    return file.getvalue()


def _as_picture(image: Any) -> Any:
    x = np.asarray(image)
    return _pillow.fromarray(x[..., 0] if x.shape[-1] == 1 else x)


def adjust_jpeg_quality(
    image: Any, jpeg_quality: Any, dct_method: Any = "", name: str | None = None
) -> Any:
    """Add JPEG artifacts: encode an image with the given quality, and decode it.

    Example:
        >>> tf.image.adjust_jpeg_quality(np.zeros((8, 8, 3), np.uint8), 75).shape
        (8, 8, 3)
    """
    x = as_tensor(image)
    coded = encode_jpeg(convert_image_dtype(x, np.uint8, saturate=True), quality=int(jpeg_quality))
    result = np.asarray(_pillow.open(io.BytesIO(coded)).convert("RGB"))
    return convert_image_dtype(library(x).asarray(result), x.dtype, saturate=True)


# Boxes.


def non_max_suppression(
    boxes: Any,
    scores: Any,
    max_output_size: Any,
    iou_threshold: Any = 0.5,
    score_threshold: Any = -np.inf,
    name: str | None = None,
) -> Any:
    """Return the indices of boxes that overlap no box with a higher score; not in compiled code.

    Example:
        >>> tf.image.non_max_suppression([[0.0, 0, 1, 1], [0, 0, 1, 0.9]], [0.9, 0.8], 2)
        Array([0], dtype=int32)
    """
    corners, score = np.asarray(boxes, np.float32), np.asarray(scores, np.float32)
    low = np.minimum(corners[:, :2], corners[:, 2:])
    high = np.maximum(corners[:, :2], corners[:, 2:])
    area = np.prod(high - low, 1)
    chosen: list[int] = []
    for i in np.argsort(-score, stable=True):
        if len(chosen) >= int(max_output_size) or score[i] <= score_threshold:
            break
        side = np.minimum(high[i], high[chosen]) - np.maximum(low[i], low[chosen])
        shared = np.prod(np.maximum(side, 0), 1)
        union = area[i] + area[chosen] - shared
        if not np.any(shared > iou_threshold * np.where(union > 0, union, 1)):
            chosen.append(int(i))
    result = np.asarray(chosen, np.int32)
    return result if in_element_function() else jnp.asarray(result)


def crop_and_resize(
    image: Any,
    boxes: Any,
    box_indices: Any,
    crop_size: Any,
    method: Any = "bilinear",
    extrapolation_value: Any = 0.0,
    name: str | None = None,
) -> Any:
    """Crop boxes from images and resize each.

    Example:
        >>> tf.image.crop_and_resize(jnp.ones((1, 4, 4, 1)), [[0.0, 0.0, 1.0, 1.0]], [0], [2, 2]).shape
        (1, 2, 2, 1)
    """
    x = as_tensor(image).astype(np.float32)
    xp = library(x)
    box, index = as_tensor(boxes), as_tensor(box_indices)
    rows = _sample_places(xp, box[:, 0], box[:, 2], x.shape[1], ints(crop_size)[0])
    columns = _sample_places(xp, box[:, 1], box[:, 3], x.shape[2], ints(crop_size)[1])
    inside = _is_inside(rows, x.shape[1])[:, :, None] & _is_inside(columns, x.shape[2])[:, None]
    result = _sampled(xp, x, index, rows, columns, method)
    return xp.where(inside[..., None], result, xp.asarray(extrapolation_value, np.float32))


def _sample_places(xp: Any, first: Any, last: Any, size: Any, count: Any) -> Any:
    if count == 1:
        return (0.5 * (first + last) * (size - 1))[:, None]
    step = (last - first) * (size - 1) / (count - 1)
    return first[:, None] * (size - 1) + xp.arange(count, dtype=np.float32) * step[:, None]


def _is_inside(places: Any, size: Any) -> Any:
    return (places >= 0) & (places <= size - 1)


def _sampled(xp: Any, x: Any, index: Any, rows: Any, columns: Any, method: Any) -> Any:
    def pick(r: Any, c: Any) -> Any:
        r = xp.clip(r, 0, x.shape[1] - 1).astype(np.int32)
        c = xp.clip(c, 0, x.shape[2] - 1).astype(np.int32)
        return x[index[:, None, None], r[:, :, None], c[:, None, :]]

    if method == "nearest":
        return pick(xp.round(rows), xp.round(columns))
    top, left = xp.floor(rows), xp.floor(columns)
    down, right = (rows - top)[:, :, None, None], (columns - left)[:, None, :, None]
    upper = pick(top, left) * (1 - right) + pick(top, xp.ceil(columns)) * right
    lower = pick(xp.ceil(rows), left) * (1 - right) + pick(xp.ceil(rows), xp.ceil(columns)) * right
    return upper * (1 - down) + lower * down


def sample_distorted_bounding_box(
    image_size: Any,
    bounding_boxes: Any,
    seed: Any = 0,
    min_object_covered: Any = 0.1,
    aspect_ratio_range: Any = None,
    area_range: Any = None,
    max_attempts: Any = None,
    use_image_if_no_bounding_boxes: Any = None,
    name: str | None = None,
) -> Any:
    """Draw a box of random size and shape: its start, its size, and its relative corners.

    Example:
        >>> tf.image.sample_distorted_bounding_box([8, 8, 3], np.zeros((1, 0, 4), np.float32), use_image_if_no_bounding_boxes=True)[1].shape
        (3,)
    """
    height, width = (int(n) for n in np.asarray(image_size)[:2])
    objects = np.asarray(bounding_boxes, np.float32).reshape(-1, 4)
    if not len(objects):
        if not use_image_if_no_bounding_boxes:
            raise InvalidArgumentError(
                "sample_distorted_bounding_box: there are no bounding boxes. Pass"
                " use_image_if_no_bounding_boxes=True."
            )
        objects = np.array([[0, 0, 1, 1]], np.float32)
    ratios, areas = aspect_ratio_range or (0.75, 1.33), area_range or (0.05, 1.0)
    box = (0, 0, height, width)
    for _ in range(max_attempts or 100):
        tried = _random_box(height, width, ratios, areas)
        if tried is not None and _covers(tried, objects, height, width, float(min_object_covered)):
            box = tried
            break
    top, left, tall, wide = box
    corners = np.array(
        [[[top / height, left / width, (top + tall) / height, (left + wide) / width]]], np.float32
    )
    return np.array([top, left, 0], np.int32), np.array([tall, wide, -1], np.int32), corners


def _random_box(height: Any, width: Any, ratios: Any, areas: Any) -> Any:
    rng = _generator()
    ratio = rng.uniform(*ratios)
    least, most = areas[0] * height * width, areas[1] * height * width
    low = int(np.sqrt(least / ratio))
    high = min(int(np.sqrt(most / ratio)), height, int(width / ratio))
    if high < max(low, 1):
        return None
    tall = int(rng.integers(max(low, 1), high + 1))
    wide = min(round(tall * ratio), width)
    if not least <= tall * wide <= most or wide < 1:
        return None
    return int(rng.integers(height - tall + 1)), int(rng.integers(width - wide + 1)), tall, wide


def _covers(box: Any, objects: Any, height: Any, width: Any, least: Any) -> Any:
    top, left, tall, wide = box
    scaled = objects * np.array([height, width, height, width], np.float32)
    down = np.minimum(scaled[:, 2], top + tall) - np.maximum(scaled[:, 0], top)
    right = np.minimum(scaled[:, 3], left + wide) - np.maximum(scaled[:, 1], left)
    shared = np.maximum(down, 0) * np.maximum(right, 0)
    area = (scaled[:, 2] - scaled[:, 0]) * (scaled[:, 3] - scaled[:, 1])
    return bool(np.any((area > 0) & (shared >= least * area) & (shared > 0)))


def stateless_sample_distorted_bounding_box(
    image_size: Any,
    bounding_boxes: Any,
    seed: Any,
    min_object_covered: Any = 0.1,
    aspect_ratio_range: Any = None,
    area_range: Any = None,
    max_attempts: Any = None,
    use_image_if_no_bounding_boxes: Any = None,
    name: str | None = None,
) -> Any:
    """Draw a box of random size and shape, determined by a seed.

    Example:
        >>> tf.image.stateless_sample_distorted_bounding_box([8, 8, 3], np.zeros((1, 0, 4), np.float32), (1, 2), use_image_if_no_bounding_boxes=True)[1].shape
        (3,)
    """
    _local.generator = np.random.default_rng([int(s) & 0xFFFFFFFF for s in np.asarray(seed)])
    _local.version = _seed[1]
    return sample_distorted_bounding_box(
        image_size,
        bounding_boxes,
        0,
        min_object_covered,
        aspect_ratio_range,
        area_range,
        max_attempts,
        use_image_if_no_bounding_boxes,
    )


# Measures.


def psnr(a: Any, b: Any, max_val: Any, name: str | None = None) -> Any:
    """Return the peak signal-to-noise ratio of images.

    Example:
        >>> tf.image.psnr(jnp.zeros((2, 2, 1)), jnp.ones((2, 2, 1)), 1.0)
        Array(0., dtype=float32)
    """
    most = convert_image_dtype(np.asarray(max_val, as_tensor(a).dtype), np.float32)
    x, y = (convert_image_dtype(as_tensor(v), np.float32) for v in (a, b))
    xp = library(x)
    error = xp.square(x - y).mean((-3, -2, -1))
    return 20 * np.log(most) / np.log(np.float32(10)) - np.float32(10 / np.log(10)) * xp.log(error)


def _window(size: Any, sigma: Any) -> Any:
    places = np.arange(size, dtype=np.float32) - (size - 1) / 2
    weights = np.exp(-(places**2) / (2 * sigma**2))
    return (weights / weights.sum()).astype(np.float32)


def _blurred(x: Any, weights: Any) -> Any:
    kernel = jnp.asarray(np.outer(weights, weights))[:, :, None, None]
    channels = x.shape[-1]
    return jax.lax.conv_general_dilated(
        x,
        jnp.tile(kernel, (1, 1, 1, channels)),
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=channels,
        precision="highest",
    )


def ssim(
    img1: Any,
    img2: Any,
    max_val: Any,
    filter_size: Any = 11,
    filter_sigma: Any = 1.5,
    k1: Any = 0.01,
    k2: Any = 0.03,
    return_index_map: Any = False,
) -> Any:
    """Return the structural similarity of images.

    Example:
        >>> tf.image.ssim(jnp.ones((12, 12, 1)), jnp.ones((12, 12, 1)), 1.0)
        Array(1., dtype=float32)
    """
    first = as_tensor(img1)
    most = convert_image_dtype(np.asarray(max_val, first.dtype), np.float32)
    x, y = (jnp.asarray(convert_image_dtype(as_tensor(v), np.float32)) for v in (img1, img2))
    lead = x.shape[:-3]
    x, y = (v.reshape(-1, *v.shape[-3:]) for v in (x, y))
    weights = _window(filter_size, filter_sigma)
    c1, c2 = (k1 * most) ** 2, (k2 * most) ** 2
    mean_x, mean_y = _blurred(x, weights), _blurred(y, weights)
    product = mean_x * mean_y * 2
    squares = jnp.square(mean_x) + jnp.square(mean_y)
    luminance = (product + c1) / (squares + c1)
    structure = (_blurred(x * y, weights) * 2 - product + c2) / (
        _blurred(jnp.square(x) + jnp.square(y), weights) - squares + c2
    )
    values = luminance * structure
    if return_index_map:
        return values.mean(-1).reshape(*lead, *values.shape[1:3])
    return values.mean((1, 2)).mean(-1).reshape(lead)


def total_variation(images: Any, name: str | None = None) -> Any:
    """Return the sum of the absolute differences of neighbouring pixels.

    Example:
        >>> tf.image.total_variation(jnp.array([[[0.0], [1.0]]]))
        Array(1., dtype=float32)
    """
    x = as_tensor(images)
    xp = library(x)
    down = xp.abs(x[..., 1:, :, :] - x[..., :-1, :, :]).sum((-3, -2, -1))
    return down + xp.abs(x[..., :, 1:, :] - x[..., :, :-1, :]).sum((-3, -2, -1))


def image_gradients(image: Any) -> Any:
    """Return the vertical and the horizontal differences of neighbouring pixels.

    Example:
        >>> tf.image.image_gradients(jnp.ones((1, 2, 2, 1)))[0].shape
        (1, 2, 2, 1)
    """
    x = as_tensor(image)
    xp = library(x)
    down = xp.pad(x[:, 1:] - x[:, :-1], [(0, 0), (0, 1), (0, 0), (0, 0)])
    right = xp.pad(x[:, :, 1:] - x[:, :, :-1], [(0, 0), (0, 0), (0, 1), (0, 0)])
    return down, right


def sobel_edges(image: Any) -> Any:
    """Return the vertical and the horizontal Sobel derivatives of images.

    Example:
        >>> tf.image.sobel_edges(jnp.ones((1, 3, 3, 1))).shape
        (1, 3, 3, 1, 2)
    """
    x = as_tensor(image)
    padded = library(x).pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    height, width = x.shape[1:3]

    def at(i: Any, j: Any) -> Any:
        return padded[:, i : i + height, j : j + width]

    down = at(2, 0) + 2 * at(2, 1) + at(2, 2) - at(0, 0) - 2 * at(0, 1) - at(0, 2)
    right = at(0, 2) + 2 * at(1, 2) + at(2, 2) - at(0, 0) - 2 * at(1, 0) - at(2, 0)
    return library(x).stack([down, right], -1)


def extract_patches(
    images: Any, sizes: Any, strides: Any, rates: Any, padding: Any, name: str | None = None
) -> Any:
    """Extract patches of images; each becomes the channels of one output pixel.

    Example:
        >>> tf.image.extract_patches(jnp.ones((1, 4, 4, 1)), [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID").shape
        (1, 2, 2, 4)
    """
    x = jnp.asarray(as_tensor(images))
    size, step, rate = (ints(v)[1:3] for v in (sizes, strides, rates))
    result = jax.lax.conv_general_dilated_patches(
        x,
        size,
        step,
        padding.upper(),
        rhs_dilation=rate,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    channels = x.shape[-1]
    result = result.reshape(*result.shape[:3], channels, *size)
    result = jnp.moveaxis(result, 3, -1).reshape(*result.shape[:3], -1)
    return np.asarray(result) if in_element_function() else result
