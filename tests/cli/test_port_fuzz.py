"""`replicax port` never fails: every output of installed packages' files is Python."""

import ast
import random
import sysconfig
import warnings
from pathlib import Path

import pytest

from replicax._src.port.rewrite import PortError, port

PACKAGES = Path(sysconfig.get_path("purelib"))
LARGEST = 60_000


def as_tensorflow(text):
    """A program of NumPy or JAX as if its names were TensorFlow's, for more to rewrite."""
    for line in ("import numpy as np", "import jax.numpy as jnp"):
        text = text.replace(line, line.replace("numpy", "tensorflow").replace("jax.", ""))
    if "import tensorflow" not in text and "from __future__" not in text:
        text = f"import tensorflow as tf\n{text}"
    return text.replace("@property", "@tf.function") if "as tf" in text else text


def sample(count):
    files = sorted(p for p in PACKAGES.rglob("*.py") if p.stat().st_size < LARGEST)
    return random.Random(7).sample(files, min(count, len(files)))


def check(path):
    """Port a file, and the file as TensorFlow's; both results must be Python if the file is."""
    text = path.read_text(encoding="utf-8", errors="replace")
    for code in (text, as_tensorflow(text)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(code)
        except (SyntaxError, ValueError):
            continue
        try:
            result = port(code, path.name)
        except PortError:  # newer syntax than LibCST's
            continue
        if result.code != code:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(result.code)


def test_a_sample_of_installed_files_is_ported():
    for path in sample(6):
        check(path)


@pytest.mark.slow
def test_a_thousand_installed_files_are_ported():
    problems = []
    for path in sample(1000):
        try:
            check(path)
        except Exception as error:
            problems.append(f"{path}: {type(error).__name__}: {error}")

    assert problems == []
