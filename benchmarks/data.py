"""Datasets against a NumPy loop and, where it can be imported, tf.data.

    python -m benchmarks.data [--tensorflow PYTHON]

Every pass of ours alternates with a pass of theirs in one process, and the median of the ratios of
neighbours is reported: above 1 means that ours is faster. Against NumPy, where both work in this
thread alone, its CPU time counts, as other programs share the machine; against tf.data, which has
threads of its own, the time on the wall. Of pipelines with threads on both sides the CPU time of
the whole process is reported too. ``PYTHON`` is an interpreter that has TensorFlow, of the same
version of Python, whose packages are then imported here.
"""

import argparse
import importlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

import replicax.data as rxd
import replicax.io as rxio

PAIRS = 25
IMAGES = 60_000
LINES = 200_000
RECORDS = 20_000
FILES = 16
CALLS = 20_000
BATCH = 128


def tensorflow(python: str | None):
    """The tensorflow module, of an interpreter that has it or of this one, or None."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if python is not None:
        asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True)
        sys.path.append(answer.stdout.strip())  # behind what is installed here
    try:
        return importlib.import_module("tensorflow")
    except ImportError:
        return None


def seconds(run: Callable[[], Iterable[object]], clock: Callable[[], float]) -> float:
    began = clock()
    for _ in run():
        pass
    return clock() - began


def speed_up(ours, theirs, pairs: int | None = None) -> float:
    """How many times faster ours is: the median over neighbouring passes."""
    clock = time.thread_time if pairs is None else time.perf_counter
    seconds(ours, clock), seconds(theirs, clock)
    ratios = []
    for pair in range(pairs or PAIRS):
        first, second = (ours, theirs) if pair % 2 else (theirs, ours)
        a, b = seconds(first, clock), seconds(second, clock)
        ratios.append(b / a if pair % 2 else a / b)
    return statistics.median(ratios)


def in_turns(name: str, ours, theirs, *, target: float | None = 1) -> None:
    """Report pipelines of few elements at a time, which have threads, by both clocks."""
    for clock, unit in ((time.perf_counter, "tf.data"), (time.process_time, "tf.data, CPU")):
        seconds(ours, clock), seconds(theirs, clock)
        pairs = [(seconds(theirs, clock), seconds(ours, clock)) for _ in range(5)]
        value = statistics.median(b / a for b, a in pairs)
        report(name, unit, value, target if clock is time.perf_counter else None)


def report(name: str, against: str, value: float, target: float | None) -> None:
    wanted = (
        "" if target is None else f"  (target {target:g}: {'met' if value >= target else 'MISSED'})"
    )
    print(f"{name:44} vs {against:24} {value:8.2f}x{wanted}", flush=True)


def images(tf) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (IMAGES, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, IMAGES)
    scale = np.float32(1 / 255)

    def gather():
        order = rng.permutation(IMAGES)
        for start in range(0, IMAGES, BATCH):
            places = order[start : start + BATCH]
            yield pixels[places] * scale, labels[places]

    def normalise(x, y):
        return x * scale, y

    source = rxd.Dataset.from_tensor_slices((pixels, labels)).shuffle(IMAGES)
    after = source.batch(BATCH).map(normalise)
    before = source.map(normalise).batch(BATCH)
    promised = source.map(normalise, vectorize=True).batch(BATCH)
    buffered = (
        rxd.Dataset.from_tensor_slices((pixels, labels)).shuffle(10_000).batch(BATCH).map(normalise)
    )
    report("images: shuffle, batch, map", "NumPy gather", speed_up(after.__iter__, gather), 0.9)
    report("images: shuffle, map, batch", "NumPy gather", speed_up(before.__iter__, gather), None)
    report(
        "images: shuffle, map(vectorize), batch",
        "NumPy gather",
        speed_up(promised.__iter__, gather),
        None,
    )

    def one_by_one():
        order = rng.permutation(IMAGES)
        for start in range(0, IMAGES, BATCH):
            rows = [normalise(pixels[k], labels[k]) for k in order[start : start + BATCH].tolist()]
            yield tuple(np.stack(part) for part in zip(*rows, strict=True))

    report(
        "images: shuffle, map, batch",
        "NumPy, a call for each",
        speed_up(before.__iter__, one_by_one),
        0.8,
    )
    report("images: small buffer", "NumPy gather", speed_up(buffered.__iter__, gather), None)
    if tf is not None:
        shuffled = tf.data.Dataset.from_tensor_slices((pixels, labels)).shuffle(IMAGES)

        def cast(x, y):
            return tf.cast(x, tf.float32) * scale, y

        fast = shuffled.batch(BATCH).map(cast).as_numpy_iterator
        slow = shuffled.map(cast).batch(BATCH).as_numpy_iterator
        report("images: shuffle, batch, map", "tf.data", speed_up(after.__iter__, fast, 3), 8)
        report("images: shuffle, map, batch", "tf.data", speed_up(before.__iter__, slow, 1), None)


def numbers(tf) -> None:
    count = 2_000_000

    def slices():
        for start in range(0, count, 256):
            yield np.arange(start, min(start + 256, count))

    dataset = rxd.Dataset.range(count).batch(256)
    report("range, batch(256)", "NumPy arange", speed_up(dataset.__iter__, slices), 0.9)
    if tf is not None:
        theirs = tf.data.Dataset.range(count).batch(256).as_numpy_iterator
        report("range, batch(256)", "tf.data", speed_up(dataset.__iter__, theirs, 3), None)


def lines(tf, folder: Path) -> None:
    path = str(folder / "lines.txt")
    Path(path).write_text("".join(f"line {k} with some words in it\n" for k in range(LINES)))
    ours = rxd.TextLineDataset(path)
    if tf is not None:
        theirs = tf.data.TextLineDataset(path)
        for name, a, b in (
            ("text lines, batch(256)", ours.batch(256), theirs.batch(256)),
            ("text lines one by one", ours.take(LINES // 10), theirs.take(LINES // 10)),
        ):
            report(name, "tf.data", speed_up(a.__iter__, b.as_numpy_iterator, 3), 8)


def records(tf, folder: Path) -> None:
    path = str(folder / "examples.tfrecord")
    rng = np.random.default_rng(0)
    with rxio.TFRecordWriter(path) as writer:
        for k in range(RECORDS):
            writer.write(rxio.serialize_example({"image": rng.bytes(784), "label": k % 10}))
    features = {
        "image": rxio.FixedLenFeature([], bytes),
        "label": rxio.FixedLenFeature([], np.int64),
    }

    def parse(record):
        example = rxio.parse_single_example(record, features)
        return rxio.decode_raw(example["image"], np.uint8), example["label"]

    before = rxd.TFRecordDataset(path).map(parse).batch(BATCH)
    promised = rxd.TFRecordDataset(path).map(parse, vectorize=True).batch(BATCH)
    after = rxd.TFRecordDataset(path).batch(BATCH).map(parse)
    if tf is not None:
        theirs = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }

        def parse_one(record):
            example = tf.io.parse_single_example(record, theirs)
            return tf.io.decode_raw(example["image"], tf.uint8), example["label"]

        def parse_many(batch):
            example = tf.io.parse_example(batch, theirs)
            return tf.io.decode_raw(example["image"], tf.uint8), example["label"]

        one = tf.data.TFRecordDataset(path).map(parse_one).batch(BATCH).as_numpy_iterator
        many = tf.data.TFRecordDataset(path).batch(BATCH).map(parse_many).as_numpy_iterator
        report("TFRecord, parse, batch", "tf.data", speed_up(before.__iter__, one, 3), 1)
        report("TFRecord, parse(vectorize)", "tf.data", speed_up(promised.__iter__, one, 3), 4)
        report(
            "TFRecord, batch, parse",
            "tf.data batch, parse",
            speed_up(after.__iter__, many, 3),
            None,
        )


def calls(tf) -> None:
    """A cheap function of each element, called here and in threads."""
    numbers = rxd.Dataset.range(CALLS)
    here = numbers.map(lambda x: x + 1).batch(BATCH)
    threads = numbers.map(lambda x: x + 1, num_parallel_calls=4).batch(BATCH)
    value = speed_up(threads.__iter__, here.__iter__, 9)
    report("cheap map in 4 threads", "map without threads", value, None)
    if tf is not None:
        numbers = tf.data.Dataset.range(CALLS)
        for name, ours, options in (
            ("cheap map", here, {}),
            ("cheap map in 4 threads", threads, {"num_parallel_calls": 4}),
        ):
            theirs = numbers.map(lambda x: x + 1, **options).batch(BATCH)
            in_turns(name, ours.__iter__, theirs.as_numpy_iterator)


def turns(tf, folder: Path) -> None:
    """Elements of several datasets in turn, one from each."""
    rng = np.random.default_rng(0)
    paths = [str(folder / f"{k:02}.tfrecord") for k in range(FILES)]
    for path in paths:
        with rxio.TFRecordWriter(path) as writer:
            for _ in range(RECORDS // FILES):
                writer.write(rng.bytes(100))

    def files(data, workers):
        names = data.Dataset.from_tensor_slices(paths)
        records = names.interleave(data.TFRecordDataset, cycle_length=4, num_parallel_calls=workers)
        return records.batch(BATCH)

    def chosen(data):
        parts = [data.Dataset.range(CALLS) for _ in range(3)]
        turn = data.Dataset.range(3).repeat()
        return data.Dataset.choose_from_datasets(parts, turn).batch(BATCH)

    if tf is not None:
        for name, make in (
            ("TFRecords in turn", lambda data: files(data, None)),
            ("TFRecords in turn, 4 threads", lambda data: files(data, 4)),
            ("choose_from_datasets", chosen),
        ):
            in_turns(name, make(rxd).__iter__, make(tf.data).as_numpy_iterator)


def memory() -> None:
    x = np.zeros((20_000, 28, 28), np.uint8)
    dataset = (
        rxd.Dataset.from_tensor_slices(x)
        .shuffle(5_000)
        .map(lambda v: v * np.float32(0.5))
        .batch(BATCH)
        .prefetch(2)
    )
    grown = []
    for epoch in range(50):
        for _ in dataset:
            pass
        if epoch in (9, 49):
            grown.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(f"{'memory after 10 and 50 epochs':44} {grown[0]:.0f} MB, {grown[1]:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter that has it")
    tf = tensorflow(parser.parse_args().tensorflow)
    if tf is None:
        print("tensorflow is not installed here: the comparisons with tf.data are left out")
    images(tf)
    numbers(tf)
    calls(tf)
    with tempfile.TemporaryDirectory() as folder:
        lines(tf, Path(folder))
        records(tf, Path(folder))
        turns(tf, Path(folder))
    memory()


if __name__ == "__main__":
    main()
