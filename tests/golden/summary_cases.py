"""Calls of tf.summary, as TensorFlow's or as replicax's: `write(tf)` or `write(rx)`."""

import numpy as np

RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(50, 4)).astype(np.float32)
GRAY = RNG.random((2, 4, 5, 1)).astype(np.float32) * 1.2 - 0.1
COLOURS = RNG.integers(0, 256, (4, 3, 2, 3)).astype(np.uint8)


def write(t) -> None:
    """Everything that is written, in order, into the default writer."""
    t.summary.scalar("loss", 0.5, step=1)
    t.summary.scalar("loss/é", np.float64(1e-3), step=np.int64(2), description="**what** it is")
    t.summary.scalar("count", 7, step=0)
    t.summary.histogram("normal", NORMAL, step=300)
    t.summary.histogram("few", [1.0, 2.0, 2.5, 4.0], step=1, buckets=3, description="d")
    t.summary.histogram("equal", [2, 2, 2], step=1, buckets=4)
    t.summary.histogram("none", np.zeros(0, np.float32), step=1, buckets=2)
    t.summary.text("words", "hello *you*", step=1)
    t.summary.text("rows", [["a", "b"], ["c", "d"]], step=2**33)
    with t.summary.record_if(False):
        t.summary.scalar("left out", 1.0, step=1)
    with t.summary.record_if(lambda: True):
        t.summary.scalar("asked", 1.0, step=1)
    t.summary.experimental.set_step(9)
    t.summary.scalar("of the step", 2.0)
    t.summary.experimental.set_step(None)
    t.summary.image("gray", GRAY, step=1)
    t.summary.image("colours", COLOURS, step=1, max_outputs=2, description="four")
    t.summary.image("too many", COLOURS, step=1)
