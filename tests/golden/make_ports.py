"""Run what `replicax port` is tried on, on TensorFlow, and record what it gives.

These are the programs of tests/golden/port, and the expressions of `port_math`.

Needs TensorFlow (the recorded answers are of 2.21 with Keras 3.15), and NumPy. Each program runs in
a process of its own; that of TF_CONFIG in two, which form a cluster.

    python tests/golden/make_ports.py
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).with_name("port")
ANSWERS = Path(__file__).with_name("ports.json")
MATH_ANSWERS = Path(__file__).with_name("port_math.json")
SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
MATH = """
import json
import numpy as np
import tensorflow as tf
from port_math import EXPRESSIONS, NAMES
names = {"tf": tf} | {name: tf.constant(value) for name, value in NAMES.items()}
values = {text: eval(text, dict(names)).numpy() for text in EXPRESSIONS}
print(json.dumps({text: [str(v.dtype), v.tolist()] for text, v in values.items()}))
"""
CODE = """
import importlib.util, json, sys
import tensorflow as tf
if {replicas} > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * {replicas}
    )
spec = importlib.util.spec_from_file_location("program", sys.argv[1])
sys.modules["program"] = program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
print(json.dumps(program.main(sys.argv[2])))
"""


def main() -> None:
    answers = {}
    for path in sorted(FOLDER.glob("*.py")):
        [first, *others] = [json.loads(text) for text in run(path)]
        if any(other != first for other in others):
            raise SystemExit(f"The workers of {path.name} differ: {first}, {others}")
        answers[path.stem] = first
    write(ANSWERS, answers)
    done = subprocess.run(
        [sys.executable, "-c", MATH],
        cwd=Path(__file__).parent,
        env={**os.environ, **SETTINGS},
        stdout=subprocess.PIPE,
        check=True,
    )
    write(MATH_ANSWERS, json.loads(done.stdout))


def write(path: Path, answers: dict[str, object]) -> None:
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def run(path: Path) -> list[str]:
    """The last line that each process of a program writes."""
    workers = 2 if path.stem == "tf_config" else 1
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", CODE.format(replicas=3 - workers), str(path), folder],
                env={**os.environ, **SETTINGS, **cluster},
                stdout=subprocess.PIPE,
                text=True,
            )
            for cluster in clusters(workers)
        ]
        return [p.communicate()[0].splitlines()[-1] for p in processes]


def clusters(count: int) -> list[dict[str, str]]:
    """TF_CONFIG of each of several workers; nothing for one."""
    if count == 1:
        return [{}]
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    workers = [f"localhost:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    tasks = ({"type": "worker", "index": index} for index in range(count))
    return [
        {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})} for task in tasks
    ]


if __name__ == "__main__":
    main()
