"""`rx.keras`: Keras, imported with the JAX backend."""

import os

from replicax._src.base.shadows import refuse_shadow

refuse_shadow("keras")
os.environ.setdefault("KERAS_BACKEND", "jax")  # Keras reads it once, when it is imported

try:
    import keras as keras  # explicitly exported
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"rx.keras could not import Keras 3 with its JAX backend ({error}). Install it with"
        " `pip install 'replicax[keras]'`; if KERAS_BACKEND names another backend, set"
        " KERAS_BACKEND=jax in the environment of the program."
    ) from error

if keras.backend.backend() != "jax":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()}, and replicax needs it on JAX. Set"
        " KERAS_BACKEND=jax in the environment of the program, or write"
        ' `os.environ["KERAS_BACKEND"] = "jax"` before the first import of keras.'
    )
