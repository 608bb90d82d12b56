import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._src.values.per_replica import in_body, mirrored, num_components, stacked
from replicax._src.values.placement import per_replica_map, replicate, stack
from replicax._src.values.structures import component_specs
from tests.replicas import components, context, replica_id
from tests.replicas import mirrored as strategy_of

PerReplica, Mirrored = rx.distribute.PerReplica, rx.distribute.Mirrored


@pytest.fixture
def strategy():
    return strategy_of(2)


def every_form(strategy):
    """The same two components in each form that lives outside of compiled code."""
    rows = [jnp.asarray([1.0, 2.0]), jnp.asarray([3.0, 4.0])]
    return {
        "made by hand": PerReplica(rows),
        "pieces": strategy.run(lambda x: x + 0, args=(PerReplica(rows),)),
        "stacked": stacked(stack(rows, strategy.topology), strategy.topology),
    }


FORMS = ["made by hand", "pieces", "stacked"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_components(strategy, form):
    value = every_form(strategy)[form]

    assert components(value) == [[1.0, 2.0], [3.0, 4.0]]
    assert isinstance(value.values, tuple)
    assert num_components(value) == 2


@pytest.mark.parametrize("form", FORMS)
def test_every_form_prints_as_on_the_pages(strategy, form):
    assert repr(every_form(strategy)[form]) == (
        "PerReplica:{\n  0: Array([1., 2.], dtype=float32),\n  1: Array([3., 4.], dtype=float32)\n}"
    )


def test_a_mirrored_value_prints_its_name(strategy):
    value = mirrored(replicate(jnp.float32(2), strategy.topology), strategy.topology)

    assert repr(value) == (
        "Mirrored:{\n  0: Array(2., dtype=float32),\n  1: Array(2., dtype=float32)\n}"
    )
    assert components(value) == [2.0, 2.0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_pytree_of_its_components(strategy, form):
    value = every_form(strategy)[form]

    leaves = jax.tree.leaves(value)
    doubled = jax.tree.map(lambda x: x * 2, value)

    assert [x.tolist() for x in leaves] == [[1.0, 2.0], [3.0, 4.0]]
    assert type(doubled) is PerReplica
    assert components(doubled) == [[2.0, 4.0], [6.0, 8.0]]
    assert components(strategy.run(lambda x: x + 1, args=(doubled,))) == [[3.0, 5.0], [7.0, 9.0]]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_goes_through_a_jit_of_jax(strategy, form):
    result = jax.jit(lambda v: jax.tree.map(jnp.sum, v))(every_form(strategy)[form])

    assert components(result) == [3.0, 7.0]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_an_argument_of_run_and_of_a_function(strategy, form):
    value = every_form(strategy)[form]

    eager = strategy.run(lambda x: x.sum() + replica_id(), args=(value,))
    compiled = rx.function(lambda v: strategy.run(lambda x: x.sum() + replica_id(), args=(v,)))(
        value
    )

    assert components(eager) == components(compiled) == [3.0, 8.0]


CONVERSIONS = [np.asarray, jnp.asarray, jnp.sum, lambda v: jnp.add(v, 1), lambda v: v * 2]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_per_replica_value_is_not_an_array_and_says_what_to_do(convert):
    with pytest.raises(TypeError) as error:
        convert(PerReplica([jnp.ones(2), jnp.ones(2)]))

    message = str(error.value)
    assert "A PerReplica has one value for each replica" in message
    for verb in ("strategy.reduce(", "strategy.gather(", "experimental_local_results(", "run"):
        assert verb in message


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_a_mirrored_value_is_one_array(convert):
    np.testing.assert_array_equal(
        convert(Mirrored([jnp.ones(2), jnp.ones(2)])), convert(jnp.ones(2))
    )


@pytest.mark.parametrize("use", [lambda v: v + 1, float, len, list, lambda v: v[0]])
def test_a_distributed_value_has_no_arithmetic_length_or_items(use):
    with pytest.raises(TypeError):
        use(PerReplica([1.0, 2.0]))


def test_components_may_be_anything():
    value = PerReplica(["a", None, {"k": 1}])

    assert value.values == ("a", None, {"k": 1})
    assert repr(value) == "PerReplica:{\n  0: 'a',\n  1: None,\n  2: {'k': 1}\n}"


def test_both_kinds_are_distributed_values_of_their_own():
    assert isinstance(PerReplica([1]), rx.distribute.DistributedValues)
    assert isinstance(Mirrored([1]), rx.distribute.DistributedValues)
    assert not isinstance(PerReplica([1]), Mirrored)
    assert not isinstance(Mirrored([1]), PerReplica)


@pytest.mark.parametrize("form", FORMS)
def test_specs_name_the_shape_and_dtype_of_each_component(strategy, form):
    specs = component_specs(every_form(strategy)[form])

    assert specs == (rx.TensorSpec([2], "float32"),) * 2


def test_specs_of_components_that_are_no_arrays_are_the_components():
    assert component_specs(PerReplica([1, "a"])) == (1, "a")


def test_a_spec_accepts_values_whose_components_fit():
    spec = rx.distribute.PerReplicaSpec(rx.TensorSpec([None]), rx.TensorSpec([None]))

    assert spec.is_compatible_with(PerReplica([jnp.ones(2), jnp.ones(5)]))
    assert spec.is_compatible_with(spec)
    assert not spec.is_compatible_with(PerReplica([jnp.ones(2)]))
    assert not spec.is_compatible_with(PerReplica([jnp.ones((2, 2)), jnp.ones(2)]))
    assert not spec.is_compatible_with(jnp.ones(2))


def test_equal_specs_are_equal_keys():
    make = lambda n: rx.distribute.PerReplicaSpec(*[rx.TensorSpec([3])] * n)  # noqa: E731

    assert make(2) == make(2)
    assert hash(make(2)) == hash(make(2))
    assert make(2) != make(3)
    assert make(2) != rx.TensorSpec([3])
    assert repr(make(1)).startswith("PerReplicaSpec(")


def test_inside_compiled_code_the_leaf_is_this_replicas_piece(strategy):
    def body(rows):
        value = in_body(rows[0], strategy.topology)
        assert len(jax.tree.leaves(value)) == 1
        doubled = jax.tree.map(lambda x: x * 2, value)
        return jnp.stack(doubled.values)[None]

    spec = PartitionSpec("replica")
    run = jax.jit(per_replica_map(body, strategy.topology, spec, spec))

    seen = run(jnp.asarray([1.0, 10.0]))

    assert seen.tolist() == [[2.0, 20.0], [2.0, 20.0]]


def test_a_value_inside_merge_call_prints_without_communication(strategy):
    texts = []

    def step():
        return context().merge_call(lambda s, x: texts.append(repr(x)), (replica_id(),))

    rx.function(lambda: strategy.run(step))()

    assert texts[0].startswith("PerReplica:{this replica: ")


AS_ONE = {
    "np.asarray": np.asarray,
    "bool": bool,
    "float": float,
    "int": int,
    "format": lambda x: f"{x:.2f}",
    "len": len,
    "list": list,
    "+": lambda x: x + 1,
    "1 +": lambda x: 1 + x,
    "-": lambda x: -x,
    "<": lambda x: x < 1,
    "[0]": lambda x: x[0],
    "jnp.sum": jnp.sum,
}


@pytest.mark.parametrize("use", AS_ONE.values(), ids=AS_ONE)
@pytest.mark.parametrize("form", FORMS)
def test_taken_for_one_array_it_says_what_to_do_with_it(strategy, form, use):
    with pytest.raises(rx.errors.PerReplicaError, match=r"one value for each.*reduce\(op") as info:
        use(every_form(strategy)[form])

    assert isinstance(info.value, TypeError)  # Python's for the operators of an object without
    assert isinstance(info.value, ValueError)  # TensorFlow's for its functions


@pytest.mark.parametrize("name", ["numpy", "shape", "sum"])
def test_what_arrays_have_and_it_has_not_is_refused_with_the_same_words(strategy, name):
    value = every_form(strategy)["stacked"]

    with pytest.raises(AttributeError, match=rf"one value for each.*reduce\(op.*{name!r}"):
        getattr(value, name)

    assert not hasattr(value, name)


def test_it_formats_as_it_prints_and_in_a_replica_as_its_component(strategy):
    value = PerReplica([jnp.float32(1), jnp.float32(2)])

    assert f"{value}" == str(value)
    assert strategy.run(lambda: f"{value:.1f} {value.numpy()}").values == ("1.0 1.0", "2.0 2.0")
