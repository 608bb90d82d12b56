import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax.cluster._checks import ClusterError, ClusterTypeError
from replicax.cluster._tf_config import read_object, refuse_misspelt

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
