"""Functions of `tf.signal`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.tf_ops.core import as_tensor, library


def fft(input: Any, name: str | None = None) -> Any:
    """Return the Fourier transform along the last axis.

    Example:
        >>> tf.signal.fft(jnp.ones(2))
        Array([2.+0.j, 0.+0.j], dtype=complex64)
    """
    return library(input).fft.fft(as_tensor(input))


def ifft(input: Any, name: str | None = None) -> Any:
    """Return the inverse Fourier transform along the last axis.

    Example:
        >>> tf.signal.ifft(jnp.ones(2))
        Array([1.+0.j, 0.+0.j], dtype=complex64)
    """
    return library(input).fft.ifft(as_tensor(input))


def fft2d(input: Any, name: str | None = None) -> Any:
    """Return the Fourier transform along the last two axes.

    Example:
        >>> tf.signal.fft2d(jnp.ones((2, 2))).shape
        (2, 2)
    """
    return library(input).fft.fft2(as_tensor(input))


def ifft2d(input: Any, name: str | None = None) -> Any:
    """Return the inverse Fourier transform along the last two axes.

    Example:
        >>> tf.signal.ifft2d(jnp.ones((2, 2))).shape
        (2, 2)
    """
    return library(input).fft.ifft2(as_tensor(input))


def rfft(input_tensor: Any, fft_length: Any = None, name: str | None = None) -> Any:
    """Return the Fourier transform of real numbers.

    Example:
        >>> tf.signal.rfft(jnp.ones(2))
        Array([2.+0.j, 0.+0.j], dtype=complex64)
    """
    length = None if fft_length is None else int(np.asarray(fft_length).reshape(-1)[0])
    return library(input_tensor).fft.rfft(as_tensor(input_tensor), length)


def irfft(input_tensor: Any, fft_length: Any = None, name: str | None = None) -> Any:
    """Return the inverse Fourier transform, for transforms of real numbers.

    Example:
        >>> tf.signal.irfft(jnp.ones(2))
        Array([1., 0.], dtype=float32)
    """
    length = None if fft_length is None else int(np.asarray(fft_length).reshape(-1)[0])
    return library(input_tensor).fft.irfft(as_tensor(input_tensor), length)


def _periodic(window_length: Any, periodic: Any, terms: Any) -> Any:
    length = int(window_length)
    if length == 1:
        return np.ones(1)
    size = length if periodic and length % 2 == 0 else length - 1
    angle = 2 * np.pi * np.arange(length) / size
    return sum(c * np.cos(k * angle) for k, c in enumerate(terms))


def hann_window(
    window_length: Any, periodic: Any = True, dtype: Any = np.float32, name: str | None = None
) -> Any:
    """Return a Hann window.

    Example:
        >>> tf.signal.hann_window(4)
        Array([0. , 0.5, 1. , 0.5], dtype=float32)
    """
    return library().asarray(_periodic(window_length, periodic, (0.5, -0.5)), dtype)


def hamming_window(
    window_length: Any, periodic: Any = True, dtype: Any = np.float32, name: str | None = None
) -> Any:
    """Return a Hamming window.

    Example:
        >>> tf.signal.hamming_window(4)
        Array([0.08, 0.54, 1.  , 0.54], dtype=float32)
    """
    return library().asarray(_periodic(window_length, periodic, (0.54, -0.46)), dtype)


def frame(
    signal: Any,
    frame_length: Any,
    frame_step: Any,
    pad_end: Any = False,
    pad_value: Any = 0,
    axis: Any = -1,
    name: str | None = None,
) -> Any:
    """Split a signal into frames, which may overlap.

    Example:
        >>> tf.signal.frame(jnp.arange(4), 2, 1)
        Array([[0, 1],
               [1, 2],
               [2, 3]], dtype=int32)
    """
    x = as_tensor(signal)
    xp, length, step = library(x), int(frame_length), int(frame_step)
    axis %= x.ndim
    size = x.shape[axis]
    count = -(-size // step) if pad_end else max(0, 1 + (size - length) // step)
    if pad_end:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, max(0, length + step * (count - 1) - size))
        x = xp.pad(x, widths, constant_values=pad_value)
    places = np.arange(count)[:, None] * step + np.arange(length)[None]
    result = xp.take(x, places.reshape(-1), axis)
    return result.reshape(*x.shape[:axis], count, length, *x.shape[axis + 1 :])


def stft(
    signals: Any,
    frame_length: Any,
    frame_step: Any,
    fft_length: Any = None,
    window_fn: Any = hann_window,
    pad_end: Any = False,
    name: str | None = None,
) -> Any:
    """Return the short-time Fourier transform of a signal.

    Example:
        >>> tf.signal.stft(jnp.ones(8), 4, 2).shape
        (3, 3)
    """
    length = int(frame_length)
    if fft_length is None:
        fft_length = 1 << (length - 1).bit_length()
    framed = frame(signals, length, frame_step, pad_end)
    if window_fn is not None:
        framed = framed * window_fn(length, dtype=framed.dtype)
    return rfft(framed, [int(fft_length)])


def linear_to_mel_weight_matrix(
    num_mel_bins: Any = 20,
    num_spectrogram_bins: Any = 129,
    sample_rate: Any = 8000,
    lower_edge_hertz: Any = 125.0,
    upper_edge_hertz: Any = 3800.0,
    dtype: Any = np.float32,
    name: str | None = None,
) -> Any:
    """Return the matrix that converts linear frequency bins to the mel scale.

    Example:
        >>> tf.signal.linear_to_mel_weight_matrix().shape
        (129, 20)
    """

    def mel(hertz: Any) -> Any:
        return 1127.0 * np.log1p(np.asarray(hertz) / 700.0)

    lines = mel(np.linspace(0, sample_rate / 2, num_spectrogram_bins)[1:])[:, None]
    edges = np.linspace(mel(lower_edge_hertz), mel(upper_edge_hertz), num_mel_bins + 2)
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    up, down = (lines - low) / (middle - low), (high - lines) / (high - middle)
    return library().asarray(np.pad(np.maximum(0, np.minimum(up, down)), [(1, 0), (0, 0)]), dtype)


def dct(
    input: Any,
    type: Any = 2,
    n: Any = None,
    axis: Any = -1,
    norm: Any = None,
    name: str | None = None,
) -> Any:
    """Return the discrete cosine transform.

    Example:
        >>> tf.signal.dct(jnp.ones(2))
        Array([4., 0.], dtype=float32)
    """
    x = as_tensor(input)
    result = jax.scipy.fft.dct(jnp.asarray(x), type, n, axis, norm)
    return np.asarray(result) if library(x) is np else result


def mfccs_from_log_mel_spectrograms(log_mel_spectrograms: Any, name: str | None = None) -> Any:
    """Return the mel-frequency cepstral coefficients of a log-mel spectrogram.

    Example:
        >>> tf.signal.mfccs_from_log_mel_spectrograms(jnp.ones((1, 4))).shape
        (1, 4)
    """
    x = as_tensor(log_mel_spectrograms)
    return dct(x) * np.asarray(1 / np.sqrt(2.0 * x.shape[-1]), x.dtype)
