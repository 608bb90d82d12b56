"""Saving functions with their variables, and loading them without the original code.

Example:
    >>> rx.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    'serving_default'
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.train.options import (
    CLASSIFY_INPUTS,
    CLASSIFY_METHOD_NAME,
    CLASSIFY_OUTPUT_CLASSES,
    CLASSIFY_OUTPUT_SCORES,
    GPU,
    PREDICT_INPUTS,
    PREDICT_METHOD_NAME,
    PREDICT_OUTPUTS,
    REGRESS_INPUTS,
    REGRESS_METHOD_NAME,
    REGRESS_OUTPUTS,
    SERVING,
    TPU,
    TRAINING,
    LoadOptions,
    SaveOptions,
)
from replicax._src.train.saved_model import DEFAULT as DEFAULT_SERVING_SIGNATURE_DEF_KEY
from replicax._src.train.saved_model import contains_saved_model, load, save

__all__ = [
    "CLASSIFY_INPUTS",
    "CLASSIFY_METHOD_NAME",
    "CLASSIFY_OUTPUT_CLASSES",
    "CLASSIFY_OUTPUT_SCORES",
    "DEFAULT_SERVING_SIGNATURE_DEF_KEY",
    "GPU",
    "PREDICT_INPUTS",
    "PREDICT_METHOD_NAME",
    "PREDICT_OUTPUTS",
    "REGRESS_INPUTS",
    "REGRESS_METHOD_NAME",
    "REGRESS_OUTPUTS",
    "SERVING",
    "TPU",
    "TRAINING",
    "LoadOptions",
    "SaveOptions",
    "contains_saved_model",
    "load",
    "save",
]

__dir__ = __all__.copy

_ABSENT = {
    **dict.fromkeys(
        (
            "ASSETS_DIRECTORY",
            "ASSETS_KEY",
            "DEBUG_DIRECTORY",
            "DEBUG_INFO_FILENAME_PB",
            "SAVED_MODEL_FILENAME_PB",
            "SAVED_MODEL_FILENAME_PBTXT",
            "SAVED_MODEL_SCHEMA_VERSION",
            "VARIABLES_DIRECTORY",
            "VARIABLES_FILENAME",
        ),
        "The files of a saved model are replicax's own, a checkpoint that Orbax wrote: read it"
        " with `rx.saved_model.load(folder)`.",
    ),
    "Asset": "Asset files are not saved: keep them next to the folder, and load them yourself.",
    "experimental": (
        "Its names shape TensorFlow's files: `rx.saved_model.save(obj, folder)` needs none of"
        " them. Variables are saved without their devices, and every file has its checksum."
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, {}, _ABSENT)
