"""The files that the pages read."""

import numpy as np
import pytest

import replicax as rx


@pytest.fixture
def record_files(tmp_path):
    """The pages' /a/1.tfr to /a/4.tfr: two records each, the floats 0 to 7."""
    names = [str(tmp_path / f"{i}.tfr") for i in range(1, 5)]
    for i, name in enumerate(names):
        with rx.io.TFRecordWriter(name) as writer:
            for value in (2 * i, 2 * i + 1):
                writer.write(np.float32(value).tobytes())
    return names
