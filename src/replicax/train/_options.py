"""Options of saving and loading: TensorFlow's fields; what would change a result is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

# Names of TensorFlow Serving for tags and for the parts of signatures.
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
        experimental_io_device: Accepted for TensorFlow's sake: the first worker writes.
        experimental_enable_async_checkpoint: The same as ``enable_async``.
        experimental_write_callbacks: Refused.
        enable_async: Write beside the training, as ``save(..., block=False)`` does.
        experimental_skip_slot_variables: Refused.
        experimental_sharding_callback: Refused.

    Raises:
        NotImplementedError: For a field that is refused.

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
    """Whether a save is to go on beside the training."""
    return isinstance(options, CheckpointOptions) and (
        options.enable_async or options.experimental_enable_async_checkpoint
    )


@dataclass(frozen=True)
class SaveOptions:
    """Options of `rx.saved_model.save`; those that shape TensorFlow's files change nothing here.

    Args:
        namespace_whitelist: Accepted.
        save_debug_info: Accepted.
        function_aliases: Accepted.
        experimental_debug_stripper: Accepted.
        experimental_io_device: Accepted: the first worker writes.
        experimental_variable_policy: Accepted: variables are saved without their devices.
        experimental_custom_gradients: Accepted: gradients of the functions are always saved.
        experimental_image_format: Accepted.
        experimental_skip_saver: Accepted.
        experimental_sharding_callback: Accepted.
        extra_tags: Accepted.

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
        allow_partial_checkpoint: Accepted: what was saved is always whole.
        experimental_io_device: Accepted: every worker reads.
        experimental_skip_checkpoint: Refused.
        experimental_variable_policy: Accepted: the scope in which it is loaded places variables.
        experimental_load_function_aliases: Accepted.

    Raises:
        NotImplementedError: For a field that is refused.

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
