"""Translation rules for TensorFlow names: a replicax name, a JAX expression, or advice.

The names that replicax shares with TensorFlow, and its advice on names that it leaves out, are
looked up in replicax itself and not repeated here.
"""

import importlib
from dataclasses import dataclass, field
from operator import attrgetter
from types import ModuleType
from typing import Any

from replicax._src.base.lazy import LeavesOut
from replicax._src.integrations import keras_older
from replicax._src.port.answers import GENERAL, specific_advice
from replicax._src.port.methods import DTYPE_ATTRIBUTES
from replicax._src.port.paths import candidates
from replicax._src.port.table import ROWS, Row

_BOARD = (
    "Keras's callback needs TensorFlow to be installed. `rx.summary.scalar` in an `on_epoch_end`"
    " does not."
)
RANDOM = "the same distribution, other random numbers than TensorFlow's."
WIDE = (
    'JAX keeps 32 bits of it, unless `jax.config.update("jax_enable_x64", True)` comes before all'
    " else."
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Top-level TensorFlow names with the same meaning in replicax.
_SHARED = _names(
    "GradientTape IndexedSlices Tensor TensorSpec TypeSpec UnconnectedGradients Variable"
    " VariableAggregation VariableSynchronization add compat config constant data device"
    " distribute errors function identity io keras nest nn random saved_model summary tpu train"
    " variable_creator_scope"
)
_NARROW = _names("float16 float32 bfloat16 int8 int16 int32 uint8 uint16 uint32 complex64")
_WIDE = {name: name for name in ("float64", "int64", "uint64", "complex128")} | {
    "double": "float64"
}
_DTYPES = (
    {name: f"jnp.{name}" for name in _NARROW}
    | {name: f"np.{kept}" for name, kept in _WIDE.items()}
    | {"bool": "jnp.bool_", "half": "jnp.float16", "string": "bytes", "newaxis": "None"}
    # Keras 3 takes strings; these constants were Keras 2's.
    | {
        f"keras.losses.Reduction.{name.upper()}": f'"{name}"'
        for name in ("none", "sum", "sum_over_batch_size")
    }
    | {"keras.losses.Reduction.AUTO": '"sum_over_batch_size"'}  # its meaning outside of loops
)
# Functions of other libraries that take the same positional arguments.
_ELSEWHERE = {
    "profiler.experimental.start": "jax.profiler.start_trace",
    "profiler.experimental.stop": "jax.profiler.stop_trace",
    "profiler.experimental.Profile": "jax.profiler.trace",
    "profiler.experimental.Trace": "jax.profiler.StepTraceAnnotation",
    "sparse.to_dense": "rx.io.SparseTensor.to_dense",
    "profiler.experimental.server.start": "jax.profiler.start_server",
}
# Keras 2's preprocessing, whose names Keras 3 shows to TensorFlow alone.
_OLDER_KERAS = {
    f"keras.preprocessing.{module}.{name}": name for name, module in keras_older.NAMES.items()
}
METHODS = {
    "as_list": "Shapes are tuples: write `list(x.shape)`.",
    "reset_states": (
        "If this is a metric of Keras: write `reset_state()`. For a model of Keras, call that for"
        " each layer that has it."
    ),
    "get_shape": "Write `x.shape`, which is a tuple.",
    "set_shape": "Shapes are known: remove this line.",
}


# Keras on TensorFlow passes `tf.IndexedSlices` with equal indices to its optimizers.
_ROWS = (
    "the same layer, with dense gradients. Where an index occurs twice in a batch, Keras on"
    " TensorFlow squares each part of the gradient alone, so Adam, RMSprop, Adagrad and others"
    " take larger steps there."
)
# A table of embeddings that TensorFlow trained would be read at other rows.
_HASHES = (
    "not TensorFlow's hash: buckets differ, so train embeddings of hashed texts from the start."
)


_MAKES_ARRAYS = _names(
    "arange array asarray average empty eye full identity linspace mean ones zeros"
)
_NUMPY_WIDTHS = "TensorFlow's result has 64 bits where the program names no dtype, JAX's has 32."


@dataclass(frozen=True)
class Same:
    """A replicax name, or another expression with the same meaning, such as ``jnp.float32``.

    Attributes:
        text: The expression.
        value: The object, to check the arguments of calls; None if it is unknown.
        caveat: Where its meaning differs.
    """

    text: str
    value: Any = None
    caveat: str = ""


@dataclass(frozen=True)
class Untranslated:
    """A name without a translation.

    Attributes:
        words: Advice on a replacement.
        is_answer: Whether the advice names a replacement; else the name is unknown.
    """

    words: str
    is_answer: bool = True


@dataclass
class Rules:
    """A cache of the translations of TensorFlow names."""

    _known: dict[str, Same | Row | Untranslated] = field(default_factory=dict)

    def of(self, path: str) -> Same | Row | Untranslated:
        """Return the translation of ``tf.<path>``."""
        if path not in self._known:
            self._known[path] = _translate(path)
        return self._known[path]

    def function(self, path: str) -> Same | None:
        """Return the function of `replicax.compat.tf` for ``tf.<path>``, if there is one."""
        found = (_of_namespace(each) for each in candidates(path))
        return next((same for same in found if same is not None), None)


def advice(path: str) -> str:
    """Return advice on a replacement for ``tf.<path>``, which replicax leaves out, or ""."""
    if path in _DTYPES:
        return f"Write `{_DTYPES[path]}`."
    if path in ROWS:
        row = ROWS[path]
        caveat = f" It is {row.caveat}" if row.caveat else ""
        return f"Math is JAX's here: write `{row.target}`.{caveat}"
    if _of_namespace(path) is not None:
        return f"Write `from replicax.compat import tf` and `tf.{path}`."
    return specific_advice(path) or _like(path)


def left_out_methods() -> dict[str, str]:
    """Return the methods that replicax's classes leave out, with the text of their errors."""
    found = dict(METHODS)
    for kind in _subclasses(LeavesOut):
        for name, words in kind.left_out.items():
            if "_" in name:  # short names such as `group` are methods of many unrelated classes
                found.setdefault(name, f"If this is a {kind.__name__.lstrip('_')}: {words}")
    return found


def _subclasses(kind: type[Any]) -> list[type[Any]]:
    return [c for child in kind.__subclasses__() for c in (child, *_subclasses(child))]


def _translate(path: str) -> Same | Row | Untranslated:
    """Return the translation of ``tf.<path>``, without the cache."""
    refusals: list[Untranslated] = []
    for candidate in candidates(path):
        answer = _look_up(candidate)
        if not isinstance(answer, Untranslated):
            return answer
        refusals.append(answer)
    answers = [refusal for refusal in refusals if refusal.is_answer]
    specific = [refusal for refusal in answers if refusal.words not in GENERAL]
    return next(iter([*specific, *answers]), refusals[-1])


def _look_up(path: str) -> Same | Row | Untranslated:
    """Look up one path, in the order of preference."""
    if path in _DTYPES:
        return Same(_DTYPES[path], caveat=WIDE if path in _WIDE else "")
    if path in ROWS:
        return ROWS[path]
    if path.startswith("numpy."):
        return _of_numpy(path)
    head, _, attribute = path.partition(".")
    if head in _DTYPES and attribute:
        return _of_dtype(head, attribute)
    if path in _ELSEWHERE:
        head, _, rest = _ELSEWHERE[path].partition(".")
        home = importlib.import_module({"rx": "replicax"}.get(head, head))
        return Same(_ELSEWHERE[path], attrgetter(rest)(home))
    if path in _OLDER_KERAS:
        name = _OLDER_KERAS[path]
        return Same(f"rx.compat.preprocessing.{name}", keras_older.part(name))
    found = _of_namespace(path)
    shared = _shared(path) if path.split(".")[0] in _SHARED else _refusal(path)
    if found is None or (isinstance(shared, Same) and shared.value is found.value):
        return shared
    return found


def _of_numpy(path: str) -> Same | Untranslated:
    """Look up a name of `tf.experimental.numpy`, most of which `jax.numpy` has."""
    name = path.partition(".")[2]
    value = getattr(importlib.import_module("jax.numpy"), name, None)
    if value is None:
        return _refusal(path)
    return Same(f"jnp.{name}", value, _NUMPY_WIDTHS if name in _MAKES_ARRAYS else "")


def _of_dtype(dtype: str, attribute: str) -> Same | Untranslated:
    """Look up an attribute of a dtype: ``tf.float32.max``."""
    name, text = _DTYPES[dtype].rpartition(".")[2], DTYPE_ATTRIBUTES.get(attribute, "")
    if attribute == "name":
        return Same(f'"{dtype}"')
    if attribute in ("max", "min") and "int" in name:
        text = text.replace("finfo", "iinfo")
    return Same(text.format(_DTYPES[dtype])) if text else _refusal(f"{dtype}.{attribute}")


def _refusal(path: str) -> Untranslated:
    words = specific_advice(path)
    return Untranslated(words) if words else Untranslated(_unknown(path), is_answer=False)


def _of_namespace(path: str) -> Same | None:
    """Look up a name that `replicax.compat.tf` defines."""
    found: Any = importlib.import_module("replicax.compat.tf")
    for part in path.split("."):
        if isinstance(found, ModuleType):
            if part not in getattr(found, "__all__", ()):
                return None
        elif not hasattr(found, part):
            return None
        found = getattr(found, part)
    caveat = RANDOM if "random" in path.rpartition(".")[2] or path == "nn.dropout" else ""
    if "to_hash_bucket" in path:
        caveat = _HASHES
    return Same(f"tf.{path}", found, caveat)


def _shared(path: str) -> Same | Untranslated:
    """Look up a name that replicax shares with TensorFlow."""
    found: Any = importlib.import_module("replicax")
    parts = path.split(".")
    for part in parts:
        try:
            found = getattr(found, part)
        except ModuleNotFoundError:  # Keras is not installed; its names are the same
            break
        except AttributeError as error:
            message = str(error)
            is_ours = "has no attribute" not in message and isinstance(found, ModuleType)
            return Untranslated(message) if is_ours else _refusal(path)
    known = {"keras.callbacks.TensorBoard": _BOARD, "keras.layers.Embedding": _ROWS}
    caveat = known.get(path, RANDOM if _is_random(parts) else "")
    return Same(f"rx.{path}", found, caveat)


def _is_random(parts: list[str]) -> bool:
    quiet = ("set_seed", "Algorithm", "get_global_generator", "set_global_generator")
    return parts[0] == "random" and len(parts) > 1 and parts[-1] not in quiet


def _unknown(path: str) -> str:
    return f"replicax has no {path}. {_like(path) or 'Write it with jax.numpy or rx.keras.ops.'}"


def _like(path: str) -> str:
    """Return advice on a JAX function of the same name; "" if there is none."""
    name = path.rpartition(".")[2]
    homes = {"jnp": "jax.numpy", "jax.nn": "jax.nn", "jax.lax": "jax.lax"}
    like = [a for a, home in homes.items() if hasattr(importlib.import_module(home), name)]
    return f"`{like[0]}.{name}` may be what you need; it was not compared." if like else ""
