"""`keras.callbacks.TensorBoard` without TensorFlow: `rx.summary` writes its files."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from replicax._src.integrations import keras_private as private
from replicax._src.integrations.keras_models import home_of
from replicax._src.summary import summary
from replicax._src.summary.writer import create_file_writer, create_noop_writer

# The part of `tf.summary` that the callback uses. TensorFlow's trace of operations has no
# counterpart; the callback profiles with `jax.profiler` itself.
_SUMMARY = SimpleNamespace(
    create_file_writer=create_file_writer,
    create_noop_writer=create_noop_writer,
    histogram=summary.histogram,
    image=summary.image,
    record_if=summary.record_if,
    scalar=summary.scalar,
    trace_export=lambda *_, **__: None,
    trace_on=lambda *_, **__: None,
)


def _set_model(original: Any) -> Any:
    """Write with `rx.summary` if TensorFlow is not installed, and on the first worker only."""

    def set_model(self: Any, model: Any) -> None:
        if find_spec("tensorflow") is None:
            self._summary_module = _SUMMARY
        home = home_of(model)
        if home is None or home.is_chief:
            original(self, model)
            return
        self.write_graph, self.embeddings_freq, self._should_trace = False, 0, False
        original(self, model)
        self._writers = dict.fromkeys(("train", "val"), self.summary.create_noop_writer())

    return set_model


def _write_model(original: Any) -> Any:
    """Write the layers of a model for TensorBoard's graph, without TensorFlow."""

    def write_keras_model_summary(self: Any) -> None:
        if self._summary_module is not _SUMMARY:
            original(self)
        elif type(self.model).__name__ in ("Functional", "Sequential"):
            with self._train_writer.as_default():
                summary.keras_model("keras", self.model.to_json(), step=0)

    return write_keras_model_summary


REPLACEMENTS: tuple[tuple[Any, Any], ...] = (
    (private.SET_BOARD_MODEL, _set_model),
    (private.BOARD_GRAPH, _write_model),
)
