"""Ask TensorFlow what the programs of `names_cases` give, and record it.

Needs TensorFlow (the recorded answers are of 2.21), and NumPy:

    python tests/golden/make_names.py
"""

import base64
import enum
import inspect
import json
import os
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import tensorflow as tf
from names_cases import ALL, IMAGES_OF, outcome

ANSWERS = Path(__file__).with_name("names.json")
PUBLIC = Path(__file__).with_name("public_names.json")
SHARED_NAMES = Path(__file__).with_name("shared_names.json")
NAMESPACES = (
    "compat.v1.distribute",
    "config",
    "data",
    "distribute",
    "errors",
    "io",
    "nest",
    "random",
    "saved_model",
    "summary",
    "tpu",
    "train",
)
# Other names of replicax that TensorFlow has too; `tests/test_public_names.py` checks that none is
# missing.
SHARED = {
    "": "GradientTape IndexedSlices Tensor TensorSpec TypeSpec UnconnectedGradients Variable"
    " VariableAggregation VariableSynchronization add cond constant device function identity scan"
    " variable_creator_scope while_loop",
    "compat.v1": "ConfigProto TensorInfo div enable_control_flow_v2 enable_eager_execution"
    " enable_resource_variables enable_tensor_equality enable_v2_behavior enable_v2_tensorshape"
    " random_normal random_normal_initializer random_uniform random_uniform_initializer to_bfloat16"
    " to_float to_int32 to_int64 truncated_normal_initializer",
    "compat.v1.logging": "DEBUG ERROR FATAL INFO WARN debug error get_verbosity info log"
    " log_every_n log_first_n log_if set_verbosity warn warning",
    "compat.v1.losses": "Reduction absolute_difference compute_weighted_loss cosine_distance"
    " hinge_loss huber_loss log_loss mean_squared_error sigmoid_cross_entropy softmax_cross_entropy"
    " sparse_softmax_cross_entropy",
    "compat.v1.train": "AdagradOptimizer AdamOptimizer FtrlOptimizer GradientDescentOptimizer"
    " MomentumOptimizer Optimizer RMSPropOptimizer",
    "nn": "compute_average_loss scale_regularization_loss",
}


def main() -> None:
    tf.autograph.set_verbosity(0)
    write_public_names()
    write_shared_names()
    write_images()
    answers = {name: outcome(program, tf) for name, program in ALL.items()}
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    ANSWERS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def write_public_names() -> None:
    """Every public name below the namespaces, with what it takes and the methods that it has."""
    tables: dict[str, Any] = {}
    waiting = [*NAMESPACES]
    while waiting:
        path = waiting.pop(0)
        module = eval(f"tf.{path}")
        names = {n: getattr(module, n) for n in dir(module) if n[0] != "_"}
        inner = [n for n, value in names.items() if isinstance(value, types.ModuleType)]
        waiting += [f"{path}.{n}" for n in inner]
        tables[path] = {n: described(value) for n, value in names.items() if n not in inner}
    rows = [
        f"{json.dumps(path)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(told)}" for name, told in table.items())
        + "\n}"
        for path, table in sorted(tables.items())
    ]
    PUBLIC.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def write_shared_names() -> None:
    """Describe the names of `SHARED`, and list all names of their namespaces."""
    table: dict[str, Any] = {}
    for path, names in SHARED.items():
        module = eval(f"tf.{path}".rstrip("."))
        table[path] = {
            "all": sorted(name for name in dir(module) if name[0] != "_"),
            "names": {name: described(getattr(module, name)) for name in names.split()},
        }
    table[""]["names"]["Variable"]["takes"] = parameters(tf.Variable.__init__)  # not the metaclass
    for name, told in table["compat.v1"]["names"].items():
        if name.endswith("_initializer"):  # a function of replicax, which makes one of Keras's
            del told["has"]
    table["made"] = {
        "names": {"function": described(type(tf.function(lambda x: x)))},
    }
    lines = [f"{json.dumps(path)}: {json.dumps(found)}" for path, found in table.items()]
    SHARED_NAMES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def described(value: Any) -> dict[str, Any]:
    if not callable(value):
        return {"value": value}
    if not isinstance(value, type):
        return {"takes": parameters(value)}
    if issubclass(value, enum.Enum):
        return {"members": [member.name for member in value]}
    if hasattr(value, "SerializeToString"):
        return {"fields": [field.name for field in value.DESCRIPTOR.fields]}
    names = [name for name in dir(value) if name[0] != "_" and name not in dir(tuple)]
    methods = {name: parameters(inspect.getattr_static(value, name)) for name in names}
    return {"takes": parameters(value), "has": methods}


def parameters(value: Any) -> list[str] | None:
    """The arguments of a function, with plain defaults; None for what cannot be called."""
    inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    try:
        found = inspect.signature(inner).parameters.values()
    except (TypeError, ValueError):
        return None
    return [shown(p) for p in found if p.name not in ("self", "cls")]


def shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    name, default = stars.get(parameter.kind, "") + parameter.name, parameter.default
    if default is parameter.empty:
        return name
    plain = default is None or type(default) in (bool, int, float, str)
    return f"{name}={default!r}" if plain else f"{name}=..."


def write_images() -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (4, 5, 4)).astype(np.uint8)
    numbers[0, 0] = 77
    files = {
        "gray": tf.io.encode_png(numbers[..., :1]),
        "gray and clear": tf.io.encode_png(numbers[..., :2]),
        "colours": tf.io.encode_png(numbers[..., :3]),
        "colours and clear": tf.io.encode_png(numbers),
        "gray of 16 bits": tf.io.encode_png(numbers[..., :1].astype(np.uint16) * 257 + 5),
        "jpeg": tf.io.encode_jpeg(numbers[..., :3], quality=95),
    }
    told = {name: base64.b64encode(data.numpy()).decode() for name, data in files.items()}
    IMAGES_OF.write_text(json.dumps(told, indent=0) + "\n")


if __name__ == "__main__":
    main()
