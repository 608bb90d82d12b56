"""Summaries: the bytes are TensorFlow's, and who writes when."""

import base64
import gc
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.fresh_process import run_fresh
from tests.golden.summary_cases import write

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "summary.json").read_text())
EVENTS = [base64.b64decode(text) for text in GOLDEN["events"]]
STRATEGY = "rx.distribute.MultiWorkerMirroredStrategy()"


def records(folder):
    (path,) = Path(folder).iterdir()
    assert ".tfevents." in path.name
    return list(rx.data.TFRecordDataset(str(path)))


def tags(folder):
    """The names of what is in the only file of a folder."""
    text = b"".join(records(folder)[1:])
    return [name for name in ("a", "b", "c", "d") if b"\n\x05tag_" + name.encode() in text]


def is_image(event):
    return b"\n\x06images" in event


@pytest.fixture
def written(tmp_path):
    writer = rx.summary.create_file_writer(tmp_path)
    with writer.as_default():
        write(rx)
    writer.close()
    return records(tmp_path)


def test_the_events_are_tensorflows_to_the_byte(written):
    ours = [record[9:] for record in written]

    assert [event for event in ours[1:] if not is_image(event)] == [
        event for event in EVENTS[1:] if not is_image(event)
    ]
    assert all(record[:1] == b"\x09" for record in written)  # the time
    assert b"brain.Event:2" in ours[0]


def test_images_have_tensorflows_pixels(written):
    decoded = {}
    for record in filter(is_image, written):
        tag = next(tag for tag in GOLDEN["pixels"] if tag.encode() in record)
        parts = record.split(b"\x89PNG")[1:]
        decoded[tag] = [rx.io.decode_png(b"\x89PNG" + part).tolist() for part in parts]

    assert decoded == GOLDEN["pixels"]
    ours = [r[9:].partition(b"\x89PNG")[0][:3] for r in written if is_image(r)]
    assert ours == [e.partition(b"\x89PNG")[0][:3] for e in EVENTS if is_image(e)]


def test_images_end_with_their_metadata_as_tensorflows_do(written):
    ends = [r.rpartition(b"IEND")[2] for r in written if is_image(r)]

    assert ends == [e.rpartition(b"IEND")[2] for e in EVENTS if is_image(e)]


def test_without_a_writer_nothing_is_written():
    assert not rx.summary.should_record_summaries()
    assert rx.summary.scalar("loss", 1.0, step=1) is False


def test_a_file_is_made_with_the_first_summary(tmp_path):
    with rx.summary.create_file_writer(tmp_path / "a" / "b").as_default():
        assert not (tmp_path / "a").exists()
        assert rx.summary.should_record_summaries()
        assert rx.summary.scalar("loss", jnp.float32(1.0), step=rx.Variable(3)) is True

    assert len(records(tmp_path / "a" / "b")) == 2


def test_the_inner_writer_and_condition_count(tmp_path):
    outer = rx.summary.create_file_writer(tmp_path / "outer")
    inner = rx.summary.create_file_writer(tmp_path / "inner")
    with outer.as_default(step=1):
        rx.summary.scalar("tag_a", 1.0)
        with inner.as_default():
            rx.summary.scalar("tag_b", 1.0)
        with rx.summary.record_if(lambda: False):
            rx.summary.scalar("tag_c", 1.0)
        rx.summary.scalar("tag_d", 1.0)

    assert (tags(tmp_path / "outer"), tags(tmp_path / "inner")) == (["a", "d"], ["b"])


def test_a_default_can_be_set_for_all_that_follows(tmp_path):
    result = run_fresh(f"""
        import replicax as rx
        rx.summary.create_file_writer({str(tmp_path)!r}).set_as_default(step=4)
        print(rx.summary.scalar("tag_a", 1.0))
    """)

    assert result.stdout == "True\n", result.stderr
    assert tags(tmp_path) == ["a"]  # the end of the program brought it to the file


def test_a_writer_that_is_forgotten_has_written_everything(tmp_path):
    writer = rx.summary.create_file_writer(tmp_path, max_queue=1000)
    with writer.as_default():
        pass
    writer.write(1, b"")
    del writer
    gc.collect()

    assert len(records(tmp_path)) == 2


def test_after_so_many_summaries_they_are_in_the_file(tmp_path):
    writer = rx.summary.create_file_writer(tmp_path, max_queue=3)
    with writer.as_default():
        for step in range(4):
            rx.summary.scalar("loss", 0.0, step=step)
        assert len(records(tmp_path)) == 4
        rx.summary.flush()
        assert len(records(tmp_path)) == 5
    writer.close()
    with writer.as_default():
        assert not rx.summary.should_record_summaries()


def test_of_several_eager_replicas_the_first_writes(tmp_path):
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    def replica_fn():
        return rx.summary.scalar("tag_a", 1.0, step=1)

    with rx.summary.create_file_writer(tmp_path).as_default():
        told = strategy.experimental_local_results(strategy.run(replica_fn))

    assert [bool(x) for x in told] == [True, False]
    assert len(records(tmp_path)) == 2


@pytest.mark.parametrize("data", [lambda x: x, lambda x: 1.0], ids=["traced", "constant"])
def test_in_a_compiled_function_a_summary_is_refused_with_advice(tmp_path, data):
    @rx.function
    def step(x):
        rx.summary.scalar("loss", data(x), step=1)

    with (
        rx.summary.create_file_writer(tmp_path).as_default(),
        pytest.raises(rx.errors.TracingError, match="Return the value"),
    ):
        step(jnp.ones(()))


def test_a_function_that_python_drives_writes_at_every_step(tmp_path):
    dataset = rx.data.Dataset.range(3)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

    @rx.function
    def train(batches):
        for step, _ in enumerate(batches):
            rx.summary.scalar("loss", 0.5, step=step)

    with rx.summary.create_file_writer(tmp_path).as_default():
        train(strategy.experimental_distribute_dataset(dataset.batch(1)))

    assert len(records(tmp_path)) == 4


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: rx.summary.scalar("s", [1.0, 2.0], step=1), "takes one number"),
        (lambda: rx.summary.image("i", np.zeros((4, 4)), step=1), r"x\[None\]"),
        (lambda: rx.summary.image("i", np.zeros((1, 4, 4, 5)), step=1), "channels"),
        (lambda: rx.summary.scalar("s", 1.0), "has no step"),
    ],
)
def test_what_makes_no_sense_is_refused_with_advice(tmp_path, call, words):
    with (
        rx.summary.create_file_writer(tmp_path).as_default(),
        pytest.raises((ValueError, RuntimeError), match=words),
    ):
        call()


def writing_worker(folder):
    """What a worker of a cluster does, and what it says of it."""
    rx.distribute.MultiWorkerMirroredStrategy()
    with rx.summary.create_file_writer(folder).as_default():
        return rx.summary.scalar("tag_a", 1.0, step=1)


@pytest.mark.multi_process
def test_of_several_workers_the_first_writes(tmp_path):
    told = rx.testing.run_in_processes(writing_worker, 2, args=(str(tmp_path),))

    assert list(told) == [True, False]
    assert tags(tmp_path) == ["a"]
