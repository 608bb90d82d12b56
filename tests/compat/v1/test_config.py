import copy

import replicax as rx

ConfigProto = rx.compat.v1.ConfigProto


def test_a_configuration_has_the_fields_that_strategies_change():
    config = ConfigProto()

    assert config.allow_soft_placement is False
    assert config.isolate_session_state is False
    assert config.device_filters == []
    assert config.experimental.collective_group_leader == ""


def test_configurations_are_equal_by_value():
    assert ConfigProto(allow_soft_placement=True) == ConfigProto(allow_soft_placement=True)
    assert ConfigProto() != ConfigProto(allow_soft_placement=True)


def test_a_copy_shares_nothing():
    config = ConfigProto(device_filters=["/job:worker"])

    for other in (config.copy(), copy.deepcopy(config)):
        other.device_filters.append("/job:ps")
        other.experimental.collective_group_leader = "/job:worker/task:0"

    assert config.device_filters == ["/job:worker"]
    assert config.experimental.collective_group_leader == ""


def test_any_configuration_that_can_be_copied_will_do():
    class Other:
        allow_soft_placement = True
        isolate_session_state = False

    given = Other()
    changed = rx.compat.v1.distribute.MirroredStrategy(["CPU:0"]).update_config_proto(given)

    assert type(changed) is Other
    assert changed.isolate_session_state
    assert not given.isolate_session_state
