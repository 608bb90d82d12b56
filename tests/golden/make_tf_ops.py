"""Record TensorFlow's results of `tf_ops_cases`, and its signatures.

Needs TensorFlow (the recorded results are of 2.21), and NumPy.

    python tests/golden/make_tf_ops.py
"""

import inspect
import json
import os
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from tf_ops_cases import EXPRESSIONS, NAMES, TEXTS

MODULES = ("math", "nn", "linalg", "image", "strings", "lookup", "debugging", "bitwise", "signal")


def plain(value: Any) -> list[Any]:
    array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind == "c":
        return [str(array.dtype), [array.real.tolist(), array.imag.tolist()]]
    if array.dtype.kind in "SO":
        return ["bytes", json.loads(json.dumps(array.tolist(), default=bytes.decode))]
    return [str(array.dtype), array.tolist()]


def signature(value: Any) -> list[str] | None:
    try:
        found = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL and p.name == "args" for p in found):
        return None
    texts = []
    for p in found:
        simple = p.default is None or isinstance(p.default, bool | int | float | str)
        default = "" if p.default is p.empty else f"={p.default!r}" if simple else "=..."
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        if p.name != "self":
            texts.append(f"{stars}{p.name}{default}")
    return texts


def main() -> None:
    scope = {"tf": tf} | {name: tf.constant(value) for name, value in NAMES.items()}
    values, problems = {}, []
    for text in (*EXPRESSIONS, *TEXTS):
        try:
            values[text] = plain(eval(text, dict(scope)))
        except Exception as error:
            problems.append(f"{text}: {error}")
    if problems:
        raise SystemExit("\n".join(problems))
    homes = {"": tf} | {name: getattr(tf, name) for name in MODULES}
    takes = {
        f"{home}.{name}".lstrip("."): found
        for home, module in homes.items()
        for name in dir(module)
        if not name.startswith("_")
        and callable(value := getattr(module, name))
        and (found := signature(value)) is not None
    }
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in values.items()]
    text = '{"values": {\n' + ",\n".join(lines) + '\n},\n"takes": {\n'
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in takes.items()]
    Path(__file__).with_name("tf_ops.json").write_text(text + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
