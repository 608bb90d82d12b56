"""Weights of `tf.image.resize`: one matrix per axis, from NumPy, as sizes are always known."""

import functools
from typing import Any

import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError


def _triangle(x: Any) -> Any:
    return np.maximum(0, 1 - np.abs(x))


def _cubic(x: Any) -> Any:
    x = np.abs(x)
    near = ((1.5 * x - 2.5) * x) * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x >= 2, 0, np.where(x >= 1, far, near))


def _mitchell(x: Any) -> Any:
    x = np.abs(x)
    near = (7 * x**3 - 12 * x**2 + 16 / 3) / 6
    far = (-7 / 3 * x**3 + 12 * x**2 - 20 * x + 32 / 3) / 6
    return np.where(x >= 2, 0, np.where(x >= 1, far, near))


def _gaussian(x: Any) -> Any:
    sigma = 1.5 / 3
    return np.where(np.abs(x) >= 1.5, 0, np.exp(-x * x / (2 * sigma * sigma)))


def _lanczos(radius: Any, x: Any) -> Any:
    x = np.abs(x)
    return np.where(x > radius, 0, np.sinc(x) * np.sinc(x / radius))


_KERNELS: dict[str, Any] = {
    "bilinear": (_triangle, 1.0),
    "bicubic": (_cubic, 2.0),
    "mitchellcubic": (_mitchell, 2.0),
    "gaussian": (_gaussian, 1.5),
    "lanczos3": (functools.partial(_lanczos, 3.0), 3.0),
    "lanczos5": (functools.partial(_lanczos, 5.0), 5.0),
}
_ALWAYS_SCALED = ("mitchellcubic", "gaussian", "lanczos3", "lanczos5")


@functools.lru_cache(maxsize=256)
def axis_weights(method: str, old: int, new: int, antialias: bool) -> Any:
    """Return the matrix of shape (new, old) that resamples one axis."""
    if method == "area":
        edges = np.arange(new + 1) * (old / new)
        low = np.maximum(edges[:-1, None], np.arange(old)[None])
        high = np.minimum(edges[1:, None], np.arange(1, old + 1)[None])
        return (np.maximum(high - low, 0) * (new / old)).astype(np.float32)
    if method not in _KERNELS:
        raise InvalidArgumentError(
            f"resize: there is no method {method!r}. Use one of"
            f" {', '.join(['nearest', 'area', *_KERNELS])}."
        )
    kernel, _ = _KERNELS[method]
    scale = old / new
    width = max(scale, 1.0) if antialias else 1.0
    center = (np.arange(new) + 0.5) * scale - 0.5
    if method in ("bilinear", "bicubic") and not antialias:
        return (
            _clamped(kernel, center, old)
            if method == "bilinear"
            else _normalized(kernel, center, old, 1.0)
        )
    return _normalized(kernel, center, old, width)


def _normalized(kernel: Any, center: Any, old: int, width: float) -> Any:
    weights = kernel((np.arange(old)[None] - center[:, None]) / width)
    total = weights.sum(1, keepdims=True)
    result = np.where(
        np.abs(total) > 1000 * np.finfo(np.float32).tiny,
        weights / np.where(total == 0, 1, total),
        0,
    )
    return result.astype(np.float32)


def _clamped(kernel: Any, center: Any, old: int) -> Any:
    return _normalized(kernel, np.clip(center, 0, old - 1), old, 1.0)


def nearest_indices(old: int, new: int) -> Any:
    """Return the index of the nearest pixel for each new one."""
    scale = np.float32(old) / np.float32(new)
    return np.minimum(
        np.floor((np.arange(new, dtype=np.float32) + np.float32(0.5)) * scale).astype(np.int32),
        old - 1,
    )
