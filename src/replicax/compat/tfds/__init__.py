"""TensorFlow Datasets whose datasets are `rx.data.Dataset`.

Ported programs import it in place of `tensorflow_datasets`. That package and TensorFlow must be
installed, because they read the files; everything after `load` is replicax's. All other names are
those of `tensorflow_datasets`.

Example:
    >>> from replicax.compat import tfds
    >>> images = tfds.load("mnist", split="train", as_supervised=True)  # doctest: +SKIP
    >>> images.map(lambda image, label: (image / 255, label)).batch(32)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from replicax._src.integrations.tfds import as_dataframe, as_numpy, builder, load

if not TYPE_CHECKING:  # so that type checkers refuse misspelt names
    from replicax._src.integrations.tfds import find as __getattr__  # noqa: F401

__all__ = ["as_dataframe", "as_numpy", "builder", "load"]

__dir__ = __all__.copy
