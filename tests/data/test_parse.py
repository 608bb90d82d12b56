"""Example messages: serialized, parsed alone and in batches, alike and not."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicax import io
from replicax._src.base.tf_errors import DataLossError, InvalidArgumentError
from replicax._src.data.records.column_parser import FixedColumns
from replicax.data import Dataset, TFRecordDataset

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)

# Written by TensorFlow 2.21: tf.train.Example with a = [1, -1], b = [0.5], c = [b"x", b""].
FROM_TENSORFLOW = bytes.fromhex(
    "0a330a140a0161120f1a0d0a0b01ffffffffffffffffff010a0d0a0162120812060a040000003f"
    "0a0c0a016312070a050a01780a00"
)


def test_messages_are_those_of_tensorflow():
    assert io.serialize_example({"a": [1, -1], "b": 0.5, "c": [b"x", b""]}) == FROM_TENSORFLOW


@given(
    rows=st.lists(
        st.tuples(st.lists(INT64, min_size=2, max_size=2), FLOATS, st.binary(max_size=5)),
        min_size=1,
        max_size=8,
    )
)
def test_fixed_features_come_back_alone_and_together(rows):
    features = {
        "i": io.FixedLenFeature([2], np.int64),
        "f": io.FixedLenFeature([], np.float32),
        "s": io.FixedLenFeature([], bytes),
    }
    records = [
        io.serialize_example({"i": np.array(i), "f": np.float32(f), "s": s}) for i, f, s in rows
    ]

    batch = io.parse_example(records, features)
    alone = [io.parse_single_example(record, features) for record in records]

    assert batch["i"].tolist() == [i for i, _, _ in rows]
    np.testing.assert_array_equal(batch["f"], np.array([f for _, f, _ in rows], np.float32))
    assert batch["s"].tolist() == [s for _, _, s in rows]
    for place, one in enumerate(alone):
        assert one["i"].tolist() == batch["i"][place].tolist()
        assert one["s"] == batch["s"][place]
        assert one["f"].shape == ()


def test_records_of_one_length_but_another_form_are_not_confused():
    features = {"x": io.FixedLenFeature([], np.int64)}
    records = [
        io.serialize_example({"x": 5, "y": 6}),
        io.serialize_example({"y": 7, "x": 8}),
        io.serialize_example({"x": 9, "y": 10}),
    ]

    assert io.parse_example(records, features)["x"].tolist() == [5, 8, 9]


def test_varints_that_share_their_bytes_differently_are_not_confused():
    features = {"x": io.FixedLenFeature([2], np.int64)}
    values = [[1, 300], [300, 1], [2, 200]]

    records = [io.serialize_example({"x": value}) for value in values]

    assert len({len(record) for record in records}) == 1
    assert io.parse_example(records, features)["x"].tolist() == values


_MIXED = {
    "i": io.FixedLenFeature([2], np.int64),
    "k": io.FixedLenFeature([], np.int64),
    "f": io.FixedLenFeature([2, 1], np.float32),
    "g": io.FixedLenFeature([], np.float32),
    "s": io.FixedLenFeature([2], bytes),
    "t": io.FixedLenFeature([], bytes),
}


def _outcome(read):
    try:
        return {key: (np.asarray(value).dtype, repr(value)) for key, value in read().items()}
    except (DataLossError, InvalidArgumentError) as error:
        return type(error), str(error)


@settings(max_examples=300)
@given(
    numbers=st.tuples(INT64, INT64, INT64),
    words=st.lists(st.binary(max_size=3), min_size=3, max_size=3),
    changes=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=6),
)
def test_a_record_is_read_alike_whatever_was_read_before_it(numbers, words, changes):
    i, k, n = numbers
    record = io.serialize_example(
        {"i": [i, k], "k": n, "f": [[0.5], [-0.0]], "g": 1.5, "s": words[:2], "t": words[2]}
    )
    reader = FixedColumns(_MIXED)
    for place, byte in [(0, record[0]), *changes, (0, record[0])]:
        changed = bytearray(record)
        changed[place % len(record)] = byte
        one = bytes(changed)

        def alone(one=one):
            return {key: column[0] for key, column in FixedColumns(_MIXED).read([one]).items()}

        assert _outcome(lambda one=one: reader.read_one(one)) == _outcome(alone)


@given(rows=st.lists(st.lists(INT64, max_size=4), min_size=1, max_size=6))
def test_features_of_any_length(rows):
    records = [io.serialize_example({"x": np.array(row, np.int64)}) for row in rows]
    features = {
        "x": io.VarLenFeature(np.int64),
        "r": io.RaggedFeature(np.int64, value_key="x"),
    }

    batch = io.parse_example(records, features)

    width = max(map(len, rows))
    padded = [row + [0] * (width - len(row)) for row in rows]
    assert batch["x"].to_dense().tolist() == padded
    assert batch["r"].to_list() == rows
    assert batch["r"].to_tensor().tolist() == padded
    sequence = {"x": io.FixedLenSequenceFeature([], np.int64, allow_missing=True)}
    assert io.parse_example(records, sequence)["x"].tolist() == padded
    alone = io.parse_single_example(records[0], features)
    assert alone["x"].values.tolist() == alone["r"].tolist() == rows[0]


def test_missing_features_take_their_default():
    features = {"x": io.FixedLenFeature([2], np.float32, default_value=[1.0, 2.0])}
    records = [io.serialize_example({}), io.serialize_example({"x": [3.0, 4.0]})]

    assert io.parse_example(records, features)["x"].tolist() == [[1, 2], [3, 4]]
    assert io.parse_example(records[:1], {"x": io.VarLenFeature(bytes)})["x"].values.tolist() == []


def test_a_missing_feature_is_named_with_those_that_are_there():
    with pytest.raises(InvalidArgumentError, match=r"'x' \(int64\) is missing .* has \['y'\]"):
        io.parse_single_example(
            io.serialize_example({"y": 1}), {"x": io.FixedLenFeature([], np.int64)}
        )


def test_another_type_is_named():
    with pytest.raises(InvalidArgumentError, match=r"'x' is declared as int64, but .* holds float"):
        io.parse_example(
            [io.serialize_example({"x": 1.5})] * 2, {"x": io.FixedLenFeature([], np.int64)}
        )


def test_another_number_of_values_is_named():
    with pytest.raises(InvalidArgumentError, match=r"'x' has 3 values .* shape \[2\] needs 2"):
        io.parse_example(
            [io.serialize_example({"x": [1, 2, 3]})] * 2, {"x": io.FixedLenFeature([2], np.int64)}
        )


def test_only_three_dtypes_exist():
    with pytest.raises(
        InvalidArgumentError, match=r"declared as int32, .* only float32, int64 and"
    ):
        io.parse_example([], {"x": io.FixedLenFeature([], np.int32)})
    with pytest.raises(InvalidArgumentError, match=r"'x' has dtype complex128"):
        io.serialize_example({"x": 1j})


@given(data=st.binary(min_size=1, max_size=60))
def test_any_bytes_are_parsed_or_refused(data):
    with contextlib.suppress(DataLossError, InvalidArgumentError):
        io.parse_single_example(data, {"x": io.VarLenFeature(np.int64)})


@given(cut=st.integers(1, 30))
def test_a_cut_message_is_refused(cut):
    record = io.serialize_example({"x": [1, 2, 3], "name": "something long enough to cut"})

    with pytest.raises(DataLossError, match=r"are not a serialized Example"):
        io.parse_single_example(record[:-cut], {"x": io.VarLenFeature(np.int64)})


@given(
    features=st.dictionaries(
        st.text(max_size=5),
        st.one_of(
            st.lists(INT64, max_size=4).map(lambda v: io.Feature(int64_list=io.Int64List(value=v))),
            st.lists(FLOATS, max_size=4).map(
                lambda v: io.Feature(float_list=io.FloatList(value=v))
            ),
            st.lists(st.binary(max_size=4), max_size=4).map(
                lambda v: io.Feature(bytes_list=io.BytesList(value=v))
            ),
            st.just(io.Feature()),
        ),
        max_size=4,
    )
)
def test_messages_survive_the_wire(features):
    example = io.Example(features=io.Features(feature=features))

    assert io.Example.FromString(example.SerializeToString()) == example


def test_a_feature_is_one_list():
    ints, floats = io.Int64List(value=[1]), io.FloatList(value=[1.0])

    feature = io.Feature(int64_list=ints, float_list=floats)  # the last one is meant

    assert feature.WhichOneof("kind") == "float_list"
    assert feature == io.Feature(float_list=floats)


def test_values_written_one_by_one_are_read_too():
    # Other writers may not pack numbers: field 1 repeated, as varints and as 4-byte floats.
    ints = bytes([0x1A, 5, 0x08, 1, 0x08, 0x96, 1])
    floats = bytes([0x12, 5, 0x0D]) + np.float32(2.5).tobytes()

    def entry(key, feature):
        body = bytes([0x0A, 1]) + key + bytes([0x12, len(feature)]) + feature
        return bytes([0x0A, len(body)]) + body

    content = entry(b"i", ints) + entry(b"f", floats)
    record = bytes([0x0A, len(content)]) + content
    features = {"i": io.FixedLenFeature([2], np.int64), "f": io.FixedLenFeature([1], np.float32)}

    for batch in (
        io.parse_example([record], features),
        io.parse_example([record, record], features),
    ):
        assert batch["i"][0].tolist() == [1, 150]
        assert batch["f"][0].tolist() == [2.5]


def test_parsing_in_a_map_is_the_same_before_and_after_batching(tmp_path):
    path = tmp_path / "examples.tfrecord"
    with io.TFRecordWriter(path) as writer:
        for k in range(50):
            writer.write(io.serialize_example({"x": [k, k * 1000], "image": bytes([k] * 12)}))
    features = {"x": io.FixedLenFeature([2], np.int64), "image": io.FixedLenFeature([], bytes)}

    def parse(record):
        example = io.parse_single_example(record, features)
        return io.decode_raw(example["image"], np.uint8), example["x"]

    before = list(TFRecordDataset(path).map(parse).batch(8))
    after = list(TFRecordDataset(path).batch(8).map(parse))
    alone = list(TFRecordDataset(path).map(parse))

    for (a, b), (c, d) in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
    assert [x.tolist() for _, x in alone] == [[k, k * 1000] for k in range(50)]


def test_raw_bytes_become_numbers():
    assert io.decode_raw(b"\x01\x00\x02\x00", np.int16).tolist() == [1, 2]
    assert io.decode_raw(b"\x00\x01", np.int16, little_endian=False).tolist() == [1]
    assert io.decode_raw([b"ab", b"cd"], np.uint8).tolist() == [[97, 98], [99, 100]]
    with pytest.raises(InvalidArgumentError, match=r"a multiple of 2 for int16; got lengths \[3\]"):
        io.decode_raw(b"abc", np.int16)


def test_a_batch_of_examples_has_one_axis():
    with pytest.raises(InvalidArgumentError, match=r"one axis, got shape \(1, 1\)"):
        io.parse_example([[b""]], {})


def test_sparse_results_pass_through_datasets():
    records = [io.serialize_example({"x": list(range(n))}) for n in (1, 3)]
    features = {"x": io.VarLenFeature(np.int64)}
    dataset = Dataset.from_tensor_slices(records).map(
        lambda r: io.parse_single_example(r, features)
    )

    assert [type(e["x"]) for e in dataset] == [io.SparseTensor] * 2
    assert [e["x"].to_dense().tolist() for e in dataset] == [[0], [0, 1, 2]]
