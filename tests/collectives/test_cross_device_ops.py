import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.collectives.packing import BETWEEN_PROCESSES
from tests.replicas import WAYS, compiled, components, context, mirrored, per_replica, replica_id

D = rx.distribute
PerReplica = D.PerReplica
Options = D.experimental.CommunicationOptions


class BetweenProcesses(D.NcclAllReduce):
    """What workers do on CPUs: packs of some size are gathered, and added up by each replica."""

    packing = BETWEEN_PROCESSES


OPS = {
    "default": lambda: None,
    "NcclAllReduce": D.NcclAllReduce,
    "NcclAllReduce(0)": lambda: D.NcclAllReduce(num_packs=0),
    "NcclAllReduce(2)": lambda: D.NcclAllReduce(num_packs=2),
    "between processes": BetweenProcesses,
    "HierarchicalCopyAllReduce": D.HierarchicalCopyAllReduce,
    "ReductionToOneDevice": D.ReductionToOneDevice,
    "ReductionToOneDevice(CPU:1)": lambda: D.ReductionToOneDevice("CPU:1"),
    "ReductionToOneDevice(accumulation_fn)": lambda: D.ReductionToOneDevice(
        accumulation_fn=lambda xs: sum(xs[1:], xs[0])
    ),
}


def step(op):
    """All-reduces a structure that differs between replicas."""

    def replica():
        i = context().replica_id_in_sync_group
        tree = {
            "vector": jnp.arange(3.0) * (i + 1),
            "matrix": jnp.ones((2, 2)) * i,
            "int": i * 2,
            "half": jnp.bfloat16(1) * (i + 1),
            "empty": jnp.zeros((0, 2)),
        }
        return context().all_reduce(op, tree)

    return replica


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float32"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("way", WAYS)
def test_empty_arrays_get_the_dtype_of_others(way, op, dtype):
    tree = {"empty": jnp.zeros((2, 0), dtype), "full": jnp.ones((2, 1), dtype)}

    result = way(mirrored(2), lambda: context().all_reduce(op, tree))

    assert result["empty"].values[1].shape == (2, 0)
    assert result["empty"].values[1].dtype == result["full"].values[1].dtype


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("count", "op"), [(3, "MEAN"), (8, "SUM")])
@pytest.mark.parametrize("way", WAYS)
def test_every_kind_gives_the_same_numbers(name, count, op, way):
    strategy = mirrored(count, cross_device_ops=OPS[name]())
    share = 1 if op == "SUM" else count
    first, second = sum(range(1, count + 1)) / share, sum(range(count)) / share

    result = way(strategy, step(op))

    for i in range(count):
        got = {k: np.asarray(v.values[i], np.float32) for k, v in result.items()}
        np.testing.assert_allclose(got["vector"], np.arange(3) * first, rtol=1e-6)
        np.testing.assert_allclose(got["matrix"], np.full((2, 2), second), rtol=1e-6)
        np.testing.assert_allclose(got["int"], 2 * second, rtol=1e-6)
        np.testing.assert_allclose(got["half"], first, rtol=1e-2)
        assert got["empty"].shape == (0, 2)
    assert result["int"].values[0].dtype == (jnp.int32 if op == "SUM" else jnp.float32)
    assert result["half"].values[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", OPS)
def test_eager_and_compiled_agree_to_the_bit(name):
    strategy = mirrored(8, cross_device_ops=OPS[name]())
    numbers = jax.random.normal(jax.random.key(0), (8, 5))
    value = per_replica(strategy, list(numbers))
    total = lambda x: context().all_reduce("MEAN", x)  # noqa: E731

    eager = strategy.run(total, args=(value,))
    both = compiled(strategy, total, value)

    assert components(eager) == components(both)


def program(ops, leaves, *, count=4, options=None):
    """The optimized HLO of an all-reduce of ``leaves``."""
    strategy = mirrored(count, cross_device_ops=ops)

    def replica(*xs):
        return context().all_reduce("SUM", [x * (1 + replica_id()) for x in xs], options)

    return (
        rx.function(lambda *xs: strategy.run(replica, args=xs))
        .get_concrete_function(*leaves)
        .as_text()
    )


def collectives(text, kind):
    """The result types and the groups of each collective of a kind in HLO."""
    found = re.findall(rf"= (.*?) {kind}\(.*?(?:replica_groups|source_target_pairs)=(\S+)", text)
    return [(re.findall(r"f32\[[\d,]*\]", types), members(groups)) for types, groups in found]


def members(groups):
    """Return the groups as lists of devices; newer XLA names an axis of the mesh for all."""
    whole = re.match(r"mesh\['replica'=(\d+)\]", groups)
    devices = ",".join(map(str, range(int(whole[1])))) if whole else ""
    return f"{{{{{devices}}}}}" if whole else groups.rstrip(",")


SMALL = [jnp.ones((8, 8)), jnp.ones(5), jnp.ones((3, 2))]
LARGE = [jnp.ones((200, 200)), jnp.ones((200, 180))]


@pytest.mark.parametrize(
    ("num_packs", "bytes_per_pack", "packs"),
    [
        (1, 0, ["f32[75]", "f32[200,200]", "f32[200,180]"]),
        (0, 0, ["f32[8,8]", "f32[5]", "f32[3,2]", "f32[200,200]", "f32[200,180]"]),
        (1, 1 << 20, ["f32[76075]"]),
        (1, 280, ["f32[69]", "f32[3,2]", "f32[200,200]", "f32[200,180]"]),
        (1, 4, ["f32[8,8]", "f32[5]", "f32[3,2]", "f32[200,200]", "f32[200,180]"]),
    ],
)
def test_an_nccl_all_reduce_is_one_all_reduce_of_packs(num_packs, bytes_per_pack, packs):
    text = program(
        D.NcclAllReduce(num_packs), SMALL + LARGE, options=Options(bytes_per_pack=bytes_per_pack)
    )

    assert collectives(text, "all-reduce") == [(packs, "{{0,1,2,3}}")]
    assert "collective-permute(" not in text


def test_several_packs_divide_large_arrays_too():
    leaves = [jnp.ones(1000)] * 8

    ((packs, _),) = collectives(program(D.NcclAllReduce(num_packs=2), leaves), "all-reduce")

    assert packs == ["f32[4000]", "f32[4000]"]


@pytest.mark.parametrize(
    ("count", "groups"),
    [
        (2, ["{{0,1}}"]),
        (3, ["{{0,1,2}}"]),
        (4, ["{{0,1},{2,3}}", "{{0,2},{1,3}}"]),
        (8, ["{{0,1,2,3},{4,5,6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"]),
    ],
)
def test_a_hierarchical_all_reduce_goes_within_halves_then_between_them(count, groups):
    text = program(D.HierarchicalCopyAllReduce(), SMALL, count=count)

    assert collectives(text, "all-reduce") == [(["f32[75]"], g) for g in groups]


def moves(text):
    """All (from, to) pairs of the collective-permutes, in order of the program."""
    return [
        [tuple(map(int, p)) for p in re.findall(r"\{(\d+),(\d+)\}", groups)]
        for _, groups in collectives(text, "collective-permute")
    ]


@pytest.mark.parametrize("root", [0, 1, 3])
def test_a_reduction_to_one_device_copies_to_it_and_from_it(root):
    text = program(D.ReductionToOneDevice(f"CPU:{root}"), [jnp.ones(5)])
    others = set(range(4)) - {root}

    *_, last_in = inward = moves(text)[:2]
    outward = moves(text)[2:]

    assert "all-reduce(" not in text
    assert {b for _, b in last_in} == {root}
    assert {a for step in inward for a, _ in step} == others
    assert {a for a, _ in outward[0]} == {root}
    assert {b for step in outward for _, b in step} == others


def test_the_device_that_adds_is_found_by_its_replica_and_not_by_its_number():
    strategy = D.MirroredStrategy(
        ["CPU:6", "CPU:2", "CPU:5", "CPU:1"], D.ReductionToOneDevice("CPU:5")
    )
    run = rx.function(
        lambda: strategy.run(lambda: context().all_reduce("SUM", jnp.ones(5) * replica_id()))
    )

    sends = moves(run.get_concrete_function().as_text())

    assert {b for _, b in sends[1]} == {2}  # CPU:5 is replica 2
    assert {a for a, _ in sends[2]} == {2}
    assert components(run()) == [[6.0] * 5] * 4


def test_a_device_that_is_not_a_replicas_leaves_the_adding_to_the_first():
    strategy = mirrored(4, first=4, cross_device_ops=D.ReductionToOneDevice("CPU:0"))
    run = rx.function(
        lambda: strategy.run(lambda: context().all_reduce("SUM", jnp.ones(5) * replica_id()))
    )

    assert {b for _, b in moves(run.get_concrete_function().as_text())[1]} == {0}
    assert components(run()) == [[6.0] * 5] * 4


def test_a_device_that_does_not_exist_is_refused():
    strategy = mirrored(2, cross_device_ops=D.ReductionToOneDevice("GPU:0"))

    with pytest.raises(ValueError, match="There is no device 'GPU:0'"):
        strategy.run(lambda: context().all_reduce("SUM", jnp.ones(2)))


@pytest.mark.parametrize("way", WAYS)
def test_an_accumulation_function_combines_the_list_of_all_values(way):
    largest = D.ReductionToOneDevice(accumulation_fn=lambda xs: jnp.max(jnp.stack(xs), axis=0))
    strategy = mirrored(4, cross_device_ops=largest)

    result = way(strategy, lambda: context().all_reduce("SUM", replica_id()))

    assert components(result) == [3.0] * 4


class Counted(D.ReductionToOneDevice):
    """Notes how many values come in one batch."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.batches.append(len(value_destination_pairs))
        return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)


@pytest.mark.parametrize("way", WAYS)
def test_a_derived_class_takes_part(way):
    ops = Counted()
    strategy = mirrored(2, cross_device_ops=ops)

    result = way(strategy, lambda: context().all_reduce("SUM", [replica_id(), jnp.ones(3)]))

    assert components(result[0]) == [1.0, 1.0]
    assert ops.batches == [2]
    assert strategy.cross_device_ops is ops


class FromScratch(D.CrossDeviceOps):
    """Joins everything with the verbs of the strategy, and returns plain arrays."""

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [
            self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs
        ]

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return sum(per_replica_value.values[1:], per_replica_value.values[0]) * 100


@pytest.mark.parametrize("way", WAYS)
def test_a_user_defined_class_may_return_plain_arrays(way):
    strategy = mirrored(2, cross_device_ops=FromScratch())

    result = way(strategy, lambda: context().all_reduce("SUM", replica_id() + 1))

    assert components(result) == [300.0, 300.0]


def test_the_base_class_says_what_to_define():
    value = PerReplica([jnp.ones(()), jnp.ones(())])
    mine = type("Mine", (D.CrossDeviceOps,), {})()

    with pytest.raises(NotImplementedError, match="Mine does not define reduce_implementation"):
        mine.reduce("SUM", value, value)
    with pytest.raises(NotImplementedError, match="batch_reduce_implementation"):
        mine.batch_reduce("SUM", [(value, value)])


@pytest.mark.parametrize("ops", [D.NcclAllReduce, D.HierarchicalCopyAllReduce])
def test_a_negative_number_of_packs_is_refused(ops):
    with pytest.raises(ValueError, match="num_packs must be 0 or more, got -1"):
        ops(num_packs=-1)


class TestDirectCalls:
    """The verbs of cross-device ops, called outside of a strategy."""

    strategy = mirrored(2)
    ops = D.NcclAllReduce()

    @pytest.fixture
    def value(self):
        return per_replica(self.strategy, [jnp.float32(1), jnp.float32(2)])

    def test_reduce_puts_the_result_on_all_replicas_of_the_destination(self, value):
        with self.strategy.scope():
            variable = rx.Variable(0.0)

        for destination in (value, variable, ["CPU:0", "CPU:1"]):
            result = self.ops.reduce("SUM", value, destination)

            assert isinstance(result, D.Mirrored)
            assert components(result) == [3.0, 3.0]

    def test_reduce_to_one_device_gives_a_plain_array_there(self, value):
        result = self.ops.reduce("MEAN", value, "CPU:3")

        assert float(result) == 1.5
        assert result.devices() == {jax.devices()[3]}

    def test_batch_reduce_keeps_the_order(self, value):
        other = per_replica(self.strategy, [jnp.ones(2), jnp.ones(2)])

        one, two = self.ops.batch_reduce("SUM", [(value, value), (other, other)])

        assert components(one) == [3.0, 3.0]
        assert components(two) == [[2.0, 2.0]] * 2
        assert self.ops.batch_reduce("SUM", []) == []

    def test_values_made_by_hand_may_share_a_device(self):
        value = PerReplica([jnp.float32(1), jnp.float32(2)])

        assert components(self.ops.reduce("SUM", value, ["CPU:0", "CPU:1"])) == [3.0, 3.0]

    def test_a_plain_value_is_its_own_mean_and_has_no_sum(self, value):
        assert float(self.ops.reduce("MEAN", jnp.float32(3), value)) == 3.0
        with pytest.raises(ValueError, match="times the replicas"):
            self.ops.reduce("SUM", jnp.float32(3), value)

    def test_mirrored_values_in_a_batch_are_treated_as_plain(self, value):
        same = self.ops.broadcast(jnp.float32(4), value)

        total, mean = self.ops.batch_reduce("MEAN", [(value, value), (same, value)])

        assert components(total) == [1.5, 1.5]
        assert components(mean) == [4.0, 4.0]

    def test_broadcast_puts_a_value_on_all_destinations(self, value):
        assert components(self.ops.broadcast(jnp.float32(4), value)) == [4.0, 4.0]
        assert self.ops.broadcast(jnp.float32(4), "CPU:2").devices() == {jax.devices()[2]}

    @pytest.mark.parametrize("verb", ["reduce", "broadcast", "batch_reduce"])
    def test_a_missing_destination_is_refused(self, value, verb):
        calls = {
            "reduce": lambda: self.ops.reduce("SUM", value, None),
            "broadcast": lambda: self.ops.broadcast(jnp.ones(()), None),
            "batch_reduce": lambda: self.ops.batch_reduce("SUM", [(value, None)]),
        }

        with pytest.raises(ValueError, match="say where the result is wanted"):
            calls[verb]()

    @pytest.mark.parametrize("pairs", [[1], 3, [(1, 2, 3)], "ab"])
    def test_what_is_not_a_pair_is_refused(self, pairs):
        with pytest.raises(ValueError, match="must be a list of"):
            self.ops.batch_reduce("SUM", pairs)

    def test_an_unknown_op_is_refused(self, value):
        with pytest.raises(ValueError, match="There is no reduce op 'MAX'"):
            self.ops.reduce("MAX", value, value)

    def test_numbers_that_lie_nowhere_need_a_list_of_devices(self):
        with pytest.raises(ValueError, match="lies on no devices"):
            self.ops.reduce("SUM", PerReplica([1.0, 2.0]), "CPU:0")
        assert components(self.ops.reduce("SUM", PerReplica([1.0, 2.0]), ["CPU:0", "CPU:1"])) == [
            3.0,
            3.0,
        ]


def test_a_strategy_refuses_what_is_not_a_cross_device_ops():
    with pytest.raises(ValueError, match=r"cross_device_ops must be a rx\.distribute"):
        mirrored(2, cross_device_ops="nccl")


@settings(max_examples=8)
@given(
    count=st.sampled_from([2, 3, 8]),
    size=st.sampled_from([512, 5000, 40_000]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    seed=st.integers(0, 99),
)
def test_a_gathered_sum_is_the_sum_in_order_on_every_replica(count, size, dtype, seed):
    own = [jax.random.normal(jax.random.key(seed + i), (size,), dtype) for i in range(count)]
    strategy = mirrored(count, cross_device_ops=BetweenProcesses())

    total = compiled(strategy, lambda x: context().all_reduce("SUM", x), per_replica(strategy, own))

    wanted = own[0]
    for x in own[1:]:
        wanted = wanted + x
    for got in total.values:
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [1, 1000])
def test_a_gathered_sum_has_the_gradient_of_an_all_reduce(size):
    def replica(x):
        own = replica_id() + 1.0

        def loss(x):
            return (own * context().all_reduce("SUM", own * x) ** 2).sum()

        return jax.grad(loss)(x), jax.jvp(loss, (x,), (x,))[1]

    x = jnp.linspace(1.0, 2.0, size)
    results = [
        compiled(mirrored(3, cross_device_ops=ops()), replica, x)
        for ops in (BetweenProcesses, D.NcclAllReduce)
    ]

    for ours, wanted in zip(*results, strict=True):
        for a, b in zip(ours.values, wanted.values, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
