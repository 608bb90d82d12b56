"""`rx.errors` has all names of `tf.errors`, with its codes."""

import pickle

import pytest

import replicax as rx

# Recorded from TensorFlow 2.21: the names of its errors, and their codes.
CODES = {
    "CancelledError": 1,
    "UnknownError": 2,
    "InvalidArgumentError": 3,
    "DeadlineExceededError": 4,
    "NotFoundError": 5,
    "AlreadyExistsError": 6,
    "PermissionDeniedError": 7,
    "ResourceExhaustedError": 8,
    "FailedPreconditionError": 9,
    "AbortedError": 10,
    "OutOfRangeError": 11,
    "UnimplementedError": 12,
    "InternalError": 13,
    "UnavailableError": 14,
    "DataLossError": 15,
    "UnauthenticatedError": 16,
}


@pytest.mark.parametrize("name", CODES)
def test_an_error_has_tensorflows_code_message_and_constructor(name):
    kind = getattr(rx.errors, name)
    constant = getattr(
        rx.errors, "".join(f"_{c}" if c.isupper() else c for c in name)[1:-6].upper()
    )

    for error in (kind("reason"), kind(None, None, "reason")):
        assert error.message == str(error) == "reason"
        assert error.error_code == constant == CODES[name]
        assert isinstance(error, rx.errors.OpError)
        assert pickle.loads(pickle.dumps(error)).message == "reason"


def test_lost_workers_are_what_programs_catch():
    error = rx.errors.WorkerLostError("worker 1 is gone", 1)

    assert isinstance(error, (rx.errors.UnavailableError, rx.errors.AbortedError))
    assert error.error_code == rx.errors.UNAVAILABLE
    assert error.index == 1
    assert not isinstance(error, OSError)  # code that retries files must not catch it
    assert issubclass(rx.errors.RollCallError, rx.errors.DeadlineExceededError)
