"""TensorFlow's options for saving and loading; those that would change a result are rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# TensorFlow Serving's names of tags, methods, inputs and outputs.
CLASSIFY_INPUTS = "inputs"
CLASSIFY_METHOD_NAME = "tensorflow/serving/classify"
CLASSIFY_OUTPUT_CLASSES = "classes"
CLASSIFY_OUTPUT_SCORES = "scores"
GPU = "gpu"
PREDICT_INPUTS = "inputs"
PREDICT_METHOD_NAME = "tensorflow/serving/predict"
PREDICT_OUTPUTS = "outputs"
REGRESS_INPUTS = "inputs"
REGRESS_METHOD_NAME = "tensorflow/serving/regress"
REGRESS_OUTPUTS = "outputs"
SERVING = "serve"
TPU = "tpu"
TRAINING = "train"


def _refuse(options: Any, reasons: Mapping[str, str]) -> None:
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in reasons and value != field.default:
            raise NotImplementedError(
                f"{type(options).__name__}({field.name}={value!r}): {reasons[field.name]}"
            )


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of `rx.train.Checkpoint`.

    Args:
        experimental_io_device: Accepted and ignored: every worker writes its own shards.
        experimental_enable_async_checkpoint: The same as ``enable_async``.
        experimental_write_callbacks: Rejected.
        enable_async: Write in the background, as ``save(..., block=False)`` does.
        experimental_skip_slot_variables: Rejected.
        experimental_sharding_callback: Rejected.

    Raises:
        NotImplementedError: A rejected field was set.

    Example:
        >>> import tempfile
        >>> checkpoint = rx.train.Checkpoint(v=rx.Variable(1.0))
        >>> options = rx.train.CheckpointOptions(enable_async=True)
        >>> path = checkpoint.save(f"{tempfile.mkdtemp()}/ckpt", options)
        >>> checkpoint.sync()
    """

    experimental_io_device: str | None = None
    experimental_enable_async_checkpoint: bool = False
    experimental_write_callbacks: Sequence[Callable[..., Any]] | None = None
    enable_async: bool = False
    experimental_skip_slot_variables: bool = False
    experimental_sharding_callback: Any = None

    def __post_init__(self) -> None:
        _refuse(
            self,
            {
                "experimental_write_callbacks": (
                    "nothing is called after a save; call it after `checkpoint.save(...)`."
                ),
                "experimental_skip_slot_variables": (
                    "an optimizer is restored as a whole; restore a checkpoint without it."
                ),
                "experimental_sharding_callback": "Orbax divides the files here.",
            },
        )


def is_async(options: Any) -> bool:
    """Whether the options request a save in the background."""
    return isinstance(options, CheckpointOptions) and (
        options.enable_async or options.experimental_enable_async_checkpoint
    )


@dataclass(frozen=True)
class SaveOptions:
    """Options of `rx.saved_model.save`; all are accepted, and none changes the saved files.

    Args:
        namespace_whitelist: Ignored.
        save_debug_info: Ignored.
        function_aliases: Ignored.
        experimental_debug_stripper: Ignored.
        experimental_io_device: Ignored: every worker writes its own shards.
        experimental_variable_policy: Ignored: variables are saved without their devices.
        experimental_custom_gradients: Ignored: gradients of the functions are always saved.
        experimental_image_format: Ignored.
        experimental_skip_saver: Ignored.
        experimental_sharding_callback: Ignored.
        extra_tags: Ignored.

    Example:
        >>> options = rx.saved_model.SaveOptions(experimental_io_device="/job:localhost")
        >>> options.experimental_io_device
        '/job:localhost'
    """

    namespace_whitelist: Sequence[str] | None = None
    save_debug_info: bool = False
    function_aliases: Mapping[str, Any] | None = None
    experimental_debug_stripper: bool = False
    experimental_io_device: str | None = None
    experimental_variable_policy: Any = None
    experimental_custom_gradients: bool = True
    experimental_image_format: bool = False
    experimental_skip_saver: bool = False
    experimental_sharding_callback: Any = None
    extra_tags: Any = None


@dataclass(frozen=True)
class LoadOptions:
    """Options of `rx.saved_model.load`.

    Args:
        allow_partial_checkpoint: Ignored: saved models are always complete.
        experimental_io_device: Ignored: every worker reads.
        experimental_skip_checkpoint: Rejected.
        experimental_variable_policy: Ignored: the strategy's scope decides where variables are.
        experimental_load_function_aliases: Ignored.

    Raises:
        NotImplementedError: A rejected field was set.

    Example:
        >>> rx.saved_model.LoadOptions(allow_partial_checkpoint=True).allow_partial_checkpoint
        True
    """

    allow_partial_checkpoint: bool = False
    experimental_io_device: str | None = None
    experimental_skip_checkpoint: bool = False
    experimental_variable_policy: Any = None
    experimental_load_function_aliases: bool = False

    def __post_init__(self) -> None:
        why = "variables are loaded with the functions; assign to `loaded.variables` afterwards."
        _refuse(self, {"experimental_skip_checkpoint": why})
