import jax
import pytest

from replicax._src.base.errors import ReplicaxError
from replicax._src.cluster.checks import ClusterConflictError, ClusterError, ClusterTypeError
from replicax._src.cluster.resolvers import (
    ClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
    local_accelerators,
)
from replicax._src.cluster.spec import ClusterSpec

SPEC = ClusterSpec({"worker": ["a:1", "b:2"], "ps": ["c:3"]})


def simple(cluster, **arguments):
    return SimpleClusterResolver(ClusterSpec(cluster), **arguments)


class Fixed(ClusterResolver):
    """As a user writes one for TensorFlow: only the two abstract methods."""

    def cluster_spec(self):
        return SPEC

    def master(self, task_type=None, task_id=None, rpc_layer=None):
        return ""


def test_the_base_class_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


def test_a_subclass_starts_without_a_task_and_can_be_given_one():
    resolver = Fixed()

    assert (resolver.task_type, resolver.task_id, resolver.environment) == (None, None, "")
    resolver.task_type, resolver.task_id = "worker", 1

    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (Fixed().task_type, Fixed().task_id) == (None, None)


def test_accelerators_are_counted_without_cpus():
    kinds = [device.platform.upper() for device in jax.local_devices()]

    assert local_accelerators() == {kind: kinds.count(kind) for kind in set(kinds) - {"CPU"}}
    assert Fixed().num_accelerators() == local_accelerators()


def test_a_kind_of_accelerator_that_is_not_there_counts_0():
    resolver = Fixed()
    resolver.task_type, resolver.task_id = "worker", 0

    assert resolver.num_accelerators()["abacus"] == 0
    assert resolver.num_accelerators("worker", 1)["GPU"] == 0


def test_the_accelerators_of_a_task_whose_master_cannot_be_found_are_an_error():
    class Strict(Fixed):
        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return self.cluster_spec().task_address(task_type, task_id)

    with pytest.raises(ClusterError, match="no task 7"):
        Strict().num_accelerators("worker", 7)


def test_a_subclass_may_set_the_protocol_that_the_base_class_gives():
    class Spoken(Fixed):
        def __init__(self):
            self._rpc_layer = "grpc"

    assert (Spoken().rpc_layer, Fixed().rpc_layer) == ("grpc", None)
    assert UnionResolver(Spoken()).rpc_layer == "grpc"


def test_another_task_has_no_accelerators_that_could_be_seen():
    resolver = Fixed()
    resolver.task_type, resolver.task_id = "worker", 0

    assert resolver.num_accelerators("worker", 1) == {}
    assert resolver.num_accelerators("worker", 0) == local_accelerators()


def test_a_simple_resolver_answers_what_it_was_given():
    resolver = SimpleClusterResolver(
        SPEC,
        master="m:9",
        task_type="worker",
        task_id=1,
        environment="lab",
        num_accelerators={"GPU": 4},
        rpc_layer="grpc",
    )

    assert resolver.cluster_spec() is SPEC
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.environment, resolver.rpc_layer) == ("lab", "grpc")
    assert resolver.num_accelerators() == {"GPU": 4}
    assert resolver.master() == "grpc://m:9"
    assert resolver.master("ps", 0) == "grpc://c:3"
    assert resolver.master("worker", 1, rpc_layer="x") == "x://b:2"


def test_a_simple_resolver_has_tensorflows_defaults():
    resolver = SimpleClusterResolver(SPEC)

    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert (resolver.environment, resolver.num_accelerators(), resolver.master()) == ("", {}, "")


def test_the_task_of_a_simple_resolver_can_be_set():
    resolver = SimpleClusterResolver(SPEC, task_type="worker", task_id=1)

    resolver.task_id, resolver.task_type, resolver.rpc_layer = 0, "ps", "x"

    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master("ps", 0) == "x://c:3"


def test_a_subclass_of_a_simple_resolver_may_replace_the_cluster():
    class Moved(SimpleClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({"worker": ["z:9"]})

    assert Moved(SPEC, rpc_layer="grpc").master("worker", 0) == "grpc://z:9"


@pytest.mark.parametrize("spec", [{"worker": ["a:1"]}, None, "a:1", 5], ids=repr)
def test_a_simple_resolver_needs_a_cluster_spec(spec):
    with pytest.raises(ClusterTypeError, match=r"rx\.train\.ClusterSpec"):
        SimpleClusterResolver(spec)


@pytest.mark.parametrize("master", [5, None, b"m:9", ["m:9"]], ids=repr)
def test_a_simple_resolver_needs_text_as_its_master(master):
    with pytest.raises(ClusterTypeError, match="master is"):
        SimpleClusterResolver(SPEC, master=master)


def test_a_simple_resolver_names_the_task_it_does_not_have():
    with pytest.raises(ClusterError, match="no task 7"):
        SimpleClusterResolver(SPEC).master("worker", 7)


def test_a_union_appends_lists_and_takes_the_rest_from_the_first():
    first = simple(
        {"worker": ["a:1"]},
        master="m",
        task_type="worker",
        task_id=0,
        environment="e",
        num_accelerators={"GPU": 2},
        rpc_layer="grpc",
    )

    union = UnionResolver(first, simple({"worker": ["b:1"], "ps": ["p"]}))

    assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1"], "ps": ["p"]}
    assert (union.task_type, union.task_id) == ("worker", 0)
    assert (union.rpc_layer, union.environment) == ("grpc", "e")
    assert union.num_accelerators() == {"GPU": 2}
    assert union.master() == "grpc://m"
    assert union.master("ps", 0) == "p"


def test_a_union_keeps_indices_where_one_of_its_parts_has_them():
    union = UnionResolver(simple({"worker": ["a:1"]}), simple({"worker": {3: "z:1"}}))

    assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 3: "z:1"}}


def test_a_union_refuses_two_addresses_for_one_task():
    union = UnionResolver(simple({"worker": {1: "a:1"}}), simple({"worker": {1: "z:1", 2: "y:1"}}))

    with pytest.raises(KeyError) as caught:
        union.cluster_spec()
    assert isinstance(caught.value, ClusterConflictError)
    assert str(caught.value).startswith("Two resolvers of the union both have a task 1")


def test_a_union_can_be_overridden_also_with_zero():
    first = simple({"worker": ["a:1"]}, master="m", task_type="worker", task_id=5)

    union = UnionResolver(first, task_type="ps", task_id=0, rpc_layer="x")

    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 0, "x")
    assert union.master("worker", 0) == "x://a:1"
    union.task_type, union.task_id, union.rpc_layer = "chief", 4, "y"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 4, "y")


def test_a_union_of_resolvers_without_a_protocol_has_none():
    assert UnionResolver(Fixed()).rpc_layer is None


@pytest.mark.parametrize(
    ("arguments", "keywords", "kind"),
    [
        ((), {}, ValueError),
        ((5,), {}, TypeError),
        ((None,), {}, TypeError),
        ((Fixed(), "x"), {}, TypeError),
        ((Fixed(),), {"z": 3}, ValueError),
    ],
    ids=["nothing", "a number", "None", "a resolver and a text", "an unknown keyword"],
)
def test_a_union_of_something_else_is_refused(arguments, keywords, kind):
    with pytest.raises(kind) as caught:
        UnionResolver(*arguments, **keywords)
    assert isinstance(caught.value, ReplicaxError)
