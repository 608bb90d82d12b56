"""Import the large libraries once, in the process that all runs of programs are forked from.

None of them starts a thread or a backend of JAX when it is imported; replicax is not among them, as
the runs on one device are without it.
"""

import contextlib
import importlib
import os

_LIBRARIES = ("matplotlib.pyplot", "pandas", "tensorflow", "jax", "keras", "keras._tf_keras.keras")
_LIBRARIES += ("optax", "flax.nnx", "equinox", "scipy.signal", "PIL.Image")

# pytest imports this module too, to look for doctests.
for _name in _LIBRARIES if os.environ.get("PUBLIC_PRELOAD") else ():
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
