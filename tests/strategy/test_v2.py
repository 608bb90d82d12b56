import inspect

import pytest

import replicax as rx


@pytest.mark.parametrize(
    ("member", "parameters"),
    [
        ("run", ["self", "fn", "args", "kwargs", "options"]),
        ("reduce", ["self", "reduce_op", "value", "axis"]),
        ("gather", ["self", "value", "axis"]),
        ("scope", ["self"]),
        ("experimental_local_results", ["self", "value"]),
        ("experimental_distribute_values_from_function", ["self", "value_fn"]),
        ("update_config_proto", ["self", "config_proto"]),
    ],
)
def test_signatures_are_tensorflows(member, parameters):
    signature = inspect.signature(getattr(rx.distribute.Strategy, member))

    assert list(signature.parameters) == parameters


def test_the_axis_of_reduce_has_no_default():
    signature = inspect.signature(rx.distribute.Strategy.reduce)

    assert signature.parameters["axis"].default is inspect.Parameter.empty
