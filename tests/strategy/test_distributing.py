import dataclasses

import pytest

import replicax as rx

ValueContext = rx.distribute.experimental.ValueContext


def test_it_has_tensorflows_two_numbers():
    default, given = ValueContext(), ValueContext(1, num_replicas_in_sync=4)

    assert (default.replica_id_in_sync_group, default.num_replicas_in_sync) == (0, 1)
    assert (given.replica_id_in_sync_group, given.num_replicas_in_sync) == (1, 4)
    assert rx.distribute.ValueContext is ValueContext


def test_it_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ValueContext().num_replicas_in_sync = 3
