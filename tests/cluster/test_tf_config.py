import contextlib
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import ClusterError, ClusterTypeError
from replicax._src.cluster.resolvers import ClusterResolver, local_accelerators
from replicax._src.cluster.tf_config import (
    TFConfigClusterResolver,
    has_tf_config_cluster,
    read_object,
    refuse_misspelt,
)

TWO = {
    "cluster": {"worker": ["localhost:12345", "localhost:23456"], "ps": ["localhost:34567"]},
    "task": {"type": "worker", "index": 0},
}


def test_the_example_of_the_page_is_read(set_tf_config):
    set_tf_config(TWO)

    resolver = TFConfigClusterResolver()

    assert isinstance(resolver, ClusterResolver)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)
    assert resolver.cluster_spec().as_dict() == TWO["cluster"]
    assert resolver.rpc_layer is None
    assert resolver.environment is None
    assert resolver.master() == "localhost:12345"
    assert resolver.master("ps", 0) == "localhost:34567"


@pytest.mark.parametrize("text", [None, "{}", " {} \n"])
def test_without_a_cluster_there_is_none(monkeypatch, text):
    if text is not None:
        monkeypatch.setenv("TF_CONFIG", text)

    resolver = TFConfigClusterResolver()

    assert not resolver.cluster_spec()
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    assert not has_tf_config_cluster()


def test_the_variable_is_read_on_every_access(set_tf_config):
    resolver = TFConfigClusterResolver()
    set_tf_config(TWO)
    before = resolver.task_id

    set_tf_config({**TWO, "task": {"type": "ps", "index": 7}})

    assert (before, resolver.task_id, resolver.task_type) == (0, 7, "ps")


def test_arguments_and_setters_win_over_the_variable(set_tf_config):
    set_tf_config({**TWO, "rpc_layer": "grpc"})

    given_all = TFConfigClusterResolver(
        task_type="ps", task_id=0, rpc_layer="http", environment="lab"
    )
    later = TFConfigClusterResolver()
    later.task_type, later.task_id = "worker", "1"

    assert (given_all.task_type, given_all.task_id, given_all.rpc_layer) == ("ps", 0, "http")
    assert given_all.environment == "lab"
    assert given_all.master() == "http://localhost:34567"
    assert given_all.master(rpc_layer="grpc") == "grpc://localhost:34567"
    assert (later.task_type, later.task_id, later.rpc_layer) == ("worker", 1, "grpc")
    assert later.master() == "grpc://localhost:23456"
    later.rpc_layer = "x"
    assert later.master() == "x://localhost:23456"


def test_a_task_that_is_overridden_need_not_be_in_the_variable(set_tf_config):
    set_tf_config({"cluster": TWO["cluster"], "task": "nonsense"})

    resolver = TFConfigClusterResolver(task_type="worker", task_id=1)

    assert resolver.master() == "localhost:23456"


def test_the_only_task_of_a_cluster_has_no_master(set_tf_config):
    set_tf_config({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})

    assert TFConfigClusterResolver().master() == ""


def test_one_task_of_a_sparse_job_has_a_master(set_tf_config):
    set_tf_config({"cluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker", "index": 1}})

    assert TFConfigClusterResolver().master() == "a:1"


def test_a_job_without_tasks_has_no_master(set_tf_config):
    set_tf_config({"cluster": {"worker": []}, "task": {"type": "worker", "index": 0}})

    with pytest.raises(ClusterError, match="no task 0 in job 'worker'"):
        TFConfigClusterResolver().master()


def test_a_session_master_is_given_as_it_stands(set_tf_config):
    set_tf_config({**TWO, "session_master": "given://x"})

    assert TFConfigClusterResolver().master() == "given://x"


def test_a_sparse_job_keeps_its_indices(set_tf_config):
    set_tf_config(
        {
            "cluster": {"worker": {"1": "w1:1", "3": "w3:3"}},
            "task": {"type": "worker", "index": 3},
        }
    )

    resolver = TFConfigClusterResolver()

    assert resolver.cluster_spec().as_dict() == {"worker": {1: "w1:1", 3: "w3:3"}}
    assert resolver.master() == "w3:3"


def test_an_index_may_be_text(set_tf_config):
    set_tf_config({"cluster": TWO["cluster"], "task": {"type": "worker", "index": "1"}})

    assert TFConfigClusterResolver().task_id == 1
    assert TFConfigClusterResolver().master() == "localhost:23456"


def test_keys_of_other_programs_are_left_alone(set_tf_config):
    extra = {"environment": "cloud", "job": {"scale_tier": "BASIC"}, "model_dir": "/tmp"}
    task = {"type": "worker", "index": 0, "trial": "7", "cloud": "x"}
    set_tf_config({**TWO, **extra, "task": task})

    assert TFConfigClusterResolver().master() == "localhost:12345"


def test_its_own_task_is_asked_for_accelerators(set_tf_config):
    set_tf_config(TWO)

    assert TFConfigClusterResolver().num_accelerators() == local_accelerators()
    assert TFConfigClusterResolver().num_accelerators("worker", 1) == {}
    with pytest.raises(ClusterError, match="no task 9"):
        TFConfigClusterResolver().num_accelerators("worker", 9)


def test_a_mistake_hurts_only_who_needs_that_part(set_tf_config):
    set_tf_config('{"cluster": 5}')
    assert TFConfigClusterResolver().task_id is None
    with pytest.raises(TypeError):
        TFConfigClusterResolver().cluster_spec()

    set_tf_config('{"task": {"type": "worker", "index": "one"}}')
    assert not TFConfigClusterResolver().cluster_spec()
    assert TFConfigClusterResolver().task_type == "worker"
    with pytest.raises(ValueError, match="one"):
        _ = TFConfigClusterResolver().task_id


def test_a_master_without_a_task_says_what_is_missing(set_tf_config):
    set_tf_config({"cluster": TWO["cluster"]})

    with pytest.raises(ClusterError, match="no job None"):
        TFConfigClusterResolver().master()


NOT_JSON = [
    *("", " ", "\n\t", "oops", "{oops", "{", "}", "[", "]", '"', "'", "{]", "[}", "{,}", ",", ":"),
    *("{'cluster': {}}", "'{}'", '{"cluster"}', '{"cluster":}', '{"cluster": }', '{"cluster" {}}'),
    *('{"cluster": {},}', '{"cluster": [1,]}', '{"a": 1 "b": 2}', '{"cluster": {}} extra', "{}{}"),
    *('{"cluster": {"worker": ["a:1"}}', '{"cluster": {"worker": ["a:1"]}', '{"cluster: {}}'),
    *("{cluster: {}}", '{"a": True}', '{"a": None}', '{"a": False}', '{"a": undefined}'),
    *('{"a": 01}', '{"a": +1}', '{"a": .5}', '{"a": 1.}', '{"a": 0x1}', '{"a": 1e}', '{"a": --1}'),
    *('{"a": "\n"}', '{"a": "\\x"}', '{"a": "\\u12"}', "// no\n{}", "{} # no", "\ufeff{}", "nul"),
    *("{'task': {'type': 'worker', 'index': 0}}", "${TF_CONFIG}", "@file.json", "cluster=worker"),
]


@pytest.mark.parametrize("text", NOT_JSON)
def test_text_that_is_not_json_is_refused_at_its_character(set_tf_config, text):
    set_tf_config(text)
    resolver = TFConfigClusterResolver()

    for access in (resolver.cluster_spec, resolver.master, lambda: resolver.task_id):
        with pytest.raises(ClusterError, match=r"TF_CONFIG is (not JSON|set, but empty)") as caught:
            access()
        if text.strip():
            with pytest.raises(json.JSONDecodeError) as oracle:
                json.loads(text)
            assert f"at character {oracle.value.pos}:" in str(caught.value)


def test_the_caret_stands_below_the_character(set_tf_config):
    set_tf_config('{"cluster": {"worker": ["localhost:12345", "localhost:23456",]}}')

    with pytest.raises(ClusterError) as caught:
        TFConfigClusterResolver().cluster_spec()

    _, shown, caret, hint = str(caught.value).splitlines()
    assert shown[caret.index("^")] in ",]"
    assert "comma" in hint


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{'task': 1}", "double quotes"),
        ('{"a": True}', "true, false and null"),
        ('{"a": [', "ends too early"),
        ("{} {}", "json.dumps"),
        ('{"a": [1, ]}', "comma"),
        ('{"a":}', "json.dumps"),
        ("", "Unset it"),
    ],
)
def test_common_slips_get_a_hint(set_tf_config, text, hint):
    set_tf_config(text)

    with pytest.raises(ClusterError, match=hint):
        TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    "text", ["null", "5", "1.5", "true", '"text"', "[]", "[{}]", '["cluster"]']
)
def test_json_that_is_not_an_object_is_a_type_error(set_tf_config, text):
    set_tf_config(text)

    with pytest.raises(ClusterTypeError, match=r"TF_CONFIG is .* must be a JSON object"):
        TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cluster": {}, "cluster": {}}', "'cluster' twice"),
        ('{"cluster": {"worker": ["a:1"], "worker": ["b:2"]}}', "'worker' twice"),
        ('{"task": {"index": 0, "index": 1}}', "'index' twice"),
        ('{"cluster": {"worker": NaN}}', "contains NaN"),
        ('{"a": Infinity}', "contains Infinity"),
        ('{"a": -Infinity}', "contains -Infinity"),
        ("[" * 100_000, "nested too deeply"),
        ('{"cluster":' * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 10_000 + "}", "cannot be read"),
        ('{"clutser": {}}', "'clutser'; did you mean 'cluster'"),
        ('{"Cluster": {}}', "'Cluster'; did you mean 'cluster'"),
        ('{"clusters": {}}', "'clusters'; did you mean 'cluster'"),
        ('{"cluster ": {}}', "'cluster '; did you mean 'cluster'"),
        ('{"TASK": {}}', "'TASK'; did you mean 'task'"),
        ('{"tasks": {}}', "'tasks'; did you mean 'task'"),
        ('{"rpc_layers": "grpc"}', "did you mean 'rpc_layer'"),
        ('{"session-master": "x"}', "did you mean 'session_master'"),
    ],
    ids=lambda value: value[:40],
)
def test_json_that_misleads_is_refused_by_its_key(set_tf_config, text, message):
    set_tf_config(text)

    with pytest.raises(ClusterError, match=message):
        TFConfigClusterResolver().cluster_spec()


BAD_CLUSTERS = [
    *(("5", ""), ("null", ""), ("[]", ""), ('"worker"', ""), ("true", ""), ("1.5", "")),
    *(('["localhost:1"]', ""), ('[["worker", ["a:1"]]]', "")),
    *(('{"worker": "a:1"}', '["worker"]'), ('{"worker": 5}', '["worker"]')),
    *(('{"worker": null}', '["worker"]'), ('{"worker": true}', '["worker"]')),
    *(('{"worker": [5]}', '["worker"][0]'), ('{"worker": ["a:1", null]}', '["worker"][1]')),
    *(('{"worker": [["a:1"]]}', '["worker"][0]'), ('{"worker": [{"0": "a:1"}]}', '["worker"][0]')),
    *(('{"worker": ["a:1", true]}', '["worker"][1]'), ('{"worker": ["a:1", ""]}', '["worker"][1]')),
    *(('{"chief": ["a:1"], "worker": [1]}', '["worker"][0]'), ('{"": ["a:1"]}', "")),
    *(('{"worker": {"a": "a:1"}}', '["worker"]'), ('{"worker": {"-1": "a:1"}}', '["worker"]')),
    *(('{"worker": {"1.5": "a:1"}}', '["worker"]'), ('{"worker": {"": "a:1"}}', '["worker"]')),
    *(('{"worker": {"0": 5}}', '["worker"][0]'), ('{"worker": {"2": null}}', '["worker"][2]')),
    *(('{"worker": {"1": "a:1", "01": "b:1"}}', '["worker"]'),),
    *(('{"worker": {"1e2": "a:1"}}', '["worker"]'), ('{"worker": {"0x1": "a:1"}}', '["worker"]')),
    *(('{"ps": {"99999999999999": "a:1"}}', '["ps"]'), ('{"ps": [""]}', '["ps"][0]')),
]


@pytest.mark.parametrize(("cluster", "key"), BAD_CLUSTERS)
def test_a_bad_cluster_is_refused_by_its_key(set_tf_config, cluster, key):
    set_tf_config(f'{{"cluster": {cluster}, "task": {{"type": "worker", "index": 0}}}}')
    resolver = TFConfigClusterResolver()

    with pytest.raises((ClusterError, ClusterTypeError)) as caught:
        resolver.cluster_spec()

    assert f'TF_CONFIG["cluster"]{key}' in str(caught.value)
    assert (resolver.task_type, resolver.task_id) == ("worker", 0)


BAD_TYPES = ["5", "null", "true", "[]", "{}", '""', "1.5", '["worker"]']
BAD_INDICES = [
    *("null", "true", "[]", "{}", "[0]", "-1", "1.5", '"one"', '""', '"-1"', '"1.0"', '" "'),
    *('"0x1"', '"1_0"', "1e300", "2147483648", "99999999999999999999", '"99999999999"', '"NaN"'),
]
BAD_TASKS = ["5", "null", "true", "[]", '"worker"', '["worker", 0]', "0"]


@pytest.mark.parametrize("value", BAD_TYPES)
def test_a_bad_task_type_is_refused_by_its_key(set_tf_config, value):
    set_tf_config(f'{{"cluster": {{}}, "task": {{"type": {value}, "index": 0}}}}')

    with pytest.raises((ClusterError, ClusterTypeError), match=r'TF_CONFIG\["task"\]\["type"\]'):
        _ = TFConfigClusterResolver().task_type
    assert TFConfigClusterResolver().task_id == 0


@pytest.mark.parametrize("value", BAD_INDICES)
def test_a_bad_task_index_is_refused_by_its_key(set_tf_config, value):
    set_tf_config(f'{{"cluster": {{}}, "task": {{"type": "worker", "index": {value}}}}}')

    with pytest.raises((ClusterError, ClusterTypeError), match=r'TF_CONFIG\["task"\]\["index"\]'):
        _ = TFConfigClusterResolver().task_id
    assert TFConfigClusterResolver().task_type == "worker"


@pytest.mark.parametrize("value", BAD_TASKS)
def test_a_task_that_is_not_an_object_is_refused_by_its_key(set_tf_config, value):
    set_tf_config(f'{{"cluster": {{}}, "task": {value}}}')

    with pytest.raises(ClusterTypeError, match=r'TF_CONFIG\["task"\] is'):
        _ = TFConfigClusterResolver().task_id
    assert not TFConfigClusterResolver().cluster_spec()


@pytest.mark.parametrize("key", ["Type", "types", "Index", "indx", "indexx"])
def test_a_misspelt_key_of_the_task_is_refused(set_tf_config, key):
    set_tf_config({"task": {key: "worker"}})

    with pytest.raises(ClusterError, match="did you mean"):
        _ = TFConfigClusterResolver().task_type


@pytest.mark.parametrize("key", ["rpc_layer", "session_master"])
@pytest.mark.parametrize("value", [5, True, [], {}, 0])
def test_a_protocol_or_master_that_is_not_text_is_refused(set_tf_config, key, value):
    set_tf_config({**TWO, key: value})

    with pytest.raises(ClusterTypeError, match=key):
        TFConfigClusterResolver().master()


@pytest.mark.parametrize("value", ["one", -1, 1.5, ""])
def test_an_argument_that_is_not_an_index_is_refused_on_use(value):
    resolver = TFConfigClusterResolver(task_id=value)

    with pytest.raises(ClusterError, match="task_id is"):
        _ = resolver.task_id


def test_more_than_a_hundred_bad_values_are_tried():
    tried = NOT_JSON, BAD_CLUSTERS, BAD_TYPES, BAD_INDICES, BAD_TASKS

    assert sum(map(len, tried)) > 100


# Fuzzing: any text, any JSON, and real configurations with one thing changed.

environment_text = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["a:1", "worker", "0"])
)
keys = st.one_of(
    st.sampled_from(["cluster", "task", "type", "index", "worker", "chief", "0", "1", "rpc_layer"]),
    environment_text,
)
any_json = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=15,
)
configurations = st.fixed_dictionaries(
    {}, optional={"cluster": any_json, "task": any_json, "session_master": any_json}
)


def look_at_everything(text):
    """Use every part of a resolver; only our own ValueError or TypeError may come out."""
    resolver = TFConfigClusterResolver()
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.pop, "TF_CONFIG", None)
        os.environ["TF_CONFIG"] = text
        for access in (
            resolver.cluster_spec,
            resolver.master,
            lambda: resolver.master("worker", 0),
            lambda: resolver.task_type,
            lambda: resolver.task_id,
            lambda: resolver.rpc_layer,
        ):
            try:
                access()
            except ReplicaxError as error:
                assert isinstance(error, ValueError) != isinstance(error, TypeError)  # noqa: PT017
                assert "\n\n" not in str(error)  # noqa: PT017


fuzzed = settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])


@fuzzed
@given(text=environment_text)
def test_any_text_is_answered_or_refused(text):
    look_at_everything(text)


@fuzzed
@given(value=st.one_of(any_json, configurations))
def test_any_json_is_answered_or_refused(value):
    look_at_everything(json.dumps(value))


@fuzzed
@given(data=st.data())
def test_a_configuration_with_one_character_changed_is_answered_or_refused(data):
    text = json.dumps(TWO)
    at = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.sampled_from(["", "x", '"', "{", "}", "[", ",", ":", "0", "\\", "\n", "é"]))

    look_at_everything(text[:at] + put + text[at + 1 :])


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


@given(value=st.dictionaries(st.text(), values))
def test_valid_objects_are_read_as_json_reads_them(value):
    assert read_object(json.dumps(value), "X") == value


@given(text=st.text())
def test_any_text_is_an_object_or_one_of_our_errors(text):
    try:
        value = read_object(text, "X")
    except (ClusterError, ClusterTypeError) as error:
        message = str(error)
    else:
        assert value == json.loads(text)
        return
    assert message.startswith("X ")


@given(before=st.text(" {}[]:,\n\t\x00é漢", max_size=80), after=st.text("'x", max_size=80))
def test_the_caret_points_at_the_place_that_json_reports(before, after):
    text = f"{before}~{after}"
    with pytest.raises(json.JSONDecodeError) as oracle:
        json.loads(text)

    with pytest.raises(ClusterError) as caught:
        read_object(text, "X")

    lines = str(caught.value).split("\n")
    wrong = text[oracle.value.pos : oracle.value.pos + 1]
    pointed = lines[1][lines[2].index("^") :][:1]
    assert pointed == (wrong if wrong.isprintable() else " ")


@pytest.mark.parametrize("key", ["job", "model_dir", "", "x" * 10_000, "environments_of_others"])
def test_keys_that_look_like_nothing_known_are_left_alone(key):
    refuse_misspelt([key, "task"], ("cluster", "task"), "X")
