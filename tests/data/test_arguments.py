"""Wrong arguments are refused at the call, with the exception type that TensorFlow 2.21 raises."""

import numpy as np
import pytest

import replicax as rx

D = rx.data.Dataset
NUMBERS = D.range(5)
FLOATS = D.from_tensor_slices(np.zeros(3, np.float32))
ROWS = D.from_tensor_slices(np.zeros((4, 3), np.float32))
PAIRS = D.from_tensor_slices((np.zeros(3), np.zeros(3)))
SIGNATURE = rx.TensorSpec((), np.int64)
BOTH = {"output_types": np.int64, "output_signature": SIGNATURE}


def by_parity(reduce_func=lambda key, window: window.batch(2), key_func=lambda x: x % 2, size=2):
    return NUMBERS.group_by_window(key_func, reduce_func, window_size=size)


REFUSED = {
    "concatenate dtype": (TypeError, lambda: NUMBERS.concatenate(FLOATS)),
    "concatenate mapped": (TypeError, lambda: NUMBERS.concatenate(NUMBERS.map(lambda x: x > 0))),
    "concatenate no dataset": (TypeError, lambda: NUMBERS.concatenate(3)),
    "sample dtype": (TypeError, lambda: D.sample_from_datasets([NUMBERS, FLOATS])),
    "sample structure": (TypeError, lambda: D.sample_from_datasets([NUMBERS, PAIRS])),
    "choose dtype": (TypeError, lambda: D.choose_from_datasets([NUMBERS, FLOATS], NUMBERS)),
    "choose int32": (
        TypeError,
        lambda: D.choose_from_datasets(
            [NUMBERS, NUMBERS], D.from_tensor_slices(np.zeros(2, np.int32))
        ),
    ),
    "choose rows": (
        TypeError,
        lambda: D.choose_from_datasets([NUMBERS, NUMBERS], NUMBERS.batch(2)),
    ),
    "filter int": (ValueError, lambda: NUMBERS.filter(lambda x: x % 2)),
    "filter float": (ValueError, lambda: FLOATS.filter(lambda x: x)),
    "filter row": (ValueError, lambda: ROWS.filter(lambda x: x > 0)),
    "take_while int": (ValueError, lambda: NUMBERS.take_while(lambda x: x)),
    "apply value": (TypeError, lambda: NUMBERS.apply(lambda dataset: 5)),
    "apply no function": (TypeError, lambda: NUMBERS.apply(5)),
    "padded shape float": (TypeError, lambda: ROWS.padded_batch(2, padded_shapes=[1.9])),
    "padded shape negative": (ValueError, lambda: ROWS.padded_batch(2, padded_shapes=[-5])),
    "padded rank": (ValueError, lambda: ROWS.padded_batch(2, padded_shapes=[3, 3])),
    "padded small": (ValueError, lambda: ROWS.padded_batch(2, padded_shapes=[2])),
    "padding string": (TypeError, lambda: ROWS.padded_batch(2, padding_values="a")),
    "zip nothing": (TypeError, lambda: D.zip()),
    "zip empty": (TypeError, lambda: D.zip(())),
    "zip value": (TypeError, lambda: D.zip(NUMBERS, 3)),
    "flat_map value": (TypeError, lambda: NUMBERS.flat_map(lambda x: x)),
    "interleave value": (TypeError, lambda: NUMBERS.interleave(lambda x: (x, x))),
    "group reduce value": (TypeError, lambda: by_parity(lambda key, window: key)),
    "group key": (TypeError, lambda: by_parity(key_func=lambda x: x / 2)),
    "group size": (TypeError, lambda: by_parity(size=1.9)),
    "scan no pair": (TypeError, lambda: NUMBERS.scan(np.int64(0), lambda state, x: x)),
    "scan dtype": (TypeError, lambda: NUMBERS.scan(np.int32(0), lambda state, x: (x, x))),
    "reduce dtype": (TypeError, lambda: NUMBERS.reduce(np.int64(0), lambda state, x: 1.5)),
    "reduce structure": (TypeError, lambda: NUMBERS.reduce(np.int64(0), lambda state, x: (x, x))),
    "unbatch scalars": (ValueError, lambda: NUMBERS.unbatch()),
    "unique floats": (TypeError, lambda: FLOATS.unique()),
    "generator signature": (
        TypeError,
        lambda: D.from_generator(lambda: [1], output_signature=np.int64),
    ),
    "generator both": (TypeError, lambda: D.from_generator(lambda: [1], **BOTH)),
    "generator shapes only": (TypeError, lambda: D.from_generator(lambda: [1], output_shapes=())),
    "from_list dtypes": (TypeError, lambda: rx.data.experimental.from_list([1, "a"])),
    "options": (TypeError, lambda: NUMBERS.with_options(3)),
    "seed": (TypeError, lambda: NUMBERS.shuffle(2, seed=1.9)),
    "random seed": (TypeError, lambda: D.random("2")),
    "counter": (TypeError, lambda: D.counter(1.9)),
    "batch calls": (TypeError, lambda: NUMBERS.batch(2, num_parallel_calls=1.9)),
    "bucket bounds": (TypeError, lambda: ROWS.bucket_by_sequence_length(len, "2", [2, 2])),
    "file name": (TypeError, lambda: rx.data.TFRecordDataset([2])),
    **{
        f"{verb} float": (TypeError, lambda verb=verb: getattr(NUMBERS, verb)(1.9))
        for verb in ("batch", "take", "skip", "repeat", "shuffle", "prefetch", "window")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_at_the_call(case):
    expected, call = REFUSED[case]

    with pytest.raises(expected) as caught:
        call()

    assert isinstance(caught.value, rx.errors.ReplicaxError) or expected is not TypeError
    assert "." in str(caught.value)


def test_predicate_that_cannot_be_traced_is_checked_on_elements():
    dataset = NUMBERS.filter(lambda x: int(x) % 2)

    with pytest.raises(ValueError, match="must return one bool, but for element 0 it returned 0"):
        list(dataset)


def test_python_number_of_reduce_takes_the_dtype_of_elements():
    assert int(NUMBERS.reduce(0, lambda total, x: total + x)) == 10
