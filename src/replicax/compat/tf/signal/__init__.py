"""Functions of `tf.signal`.

Example:
    >>> tf.signal.hann_window(4)
    Array([0. , 0.5, 1. , 0.5], dtype=float32)
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.tf_ops.signal import (
    dct,
    fft,
    fft2d,
    frame,
    hamming_window,
    hann_window,
    ifft,
    ifft2d,
    irfft,
    linear_to_mel_weight_matrix,
    mfccs_from_log_mel_spectrograms,
    rfft,
    stft,
)
from replicax._src.tf_ops.symbolic import accept_symbolic

__all__ = [
    "dct",
    "fft",
    "fft2d",
    "frame",
    "hamming_window",
    "hann_window",
    "ifft",
    "ifft2d",
    "irfft",
    "linear_to_mel_weight_matrix",
    "mfccs_from_log_mel_spectrograms",
    "rfft",
    "stft",
]

__dir__ = __all__.copy

accept_symbolic(__name__)

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, adviser="replicax._src.port.rules")
