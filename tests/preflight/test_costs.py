"""What is read out of a program, as XLA prints it for TPUs."""
# ruff: noqa: E501

import textwrap

import pytest

from replicax._src.preflight.costs import Collective, Costs
from replicax._src.preflight.hlo import Hlo
from replicax._src.preflight.targets import Limits

PROGRAM = textwrap.dedent("""\
    HloModule jit_step, is_scheduled=true

    %region_0.1 (a: f32[], b: f32[]) -> f32[] {
      %a = f32[] parameter(0)
      %b = f32[] parameter(1)
      ROOT %add = f32[] add(%a, %b)
    }

    %fused (p0: bf16[256,1024], p1: bf16[1024,256]) -> bf16[256,256] {
      %p0 = bf16[256,1024]{1,0} parameter(0)
      %p1 = bf16[1024,256]{1,0} parameter(1)
      ROOT %convolution.3 = bf16[256,256]{1,0:T(8,128)(2,1)} convolution(%p0, %p1), dim_labels=bf_io->bf
    }

    %body (s: (s32[], bf16[256,1024])) -> (s32[], bf16[256,1024]) {
      %s = (s32[], bf16[256,1024]{1,0:T(8,128)}) parameter(0)
      %x = bf16[256,1024]{1,0} get-tuple-element(%s), index=1
      %i.1 = s32[]{:T(128)} get-tuple-element(%s), index=0
      %one = s32[]{:T(128)} constant(1)
      %next = s32[]{:T(128)} add(%i.1, %one)
      %fusion = bf16[256,256]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused
      %all-gather.7 = bf16[256,1024]{1,0} all-gather(%fusion), channel_id=1, replica_groups=mesh['axis_0'=8,'axis_1'=4] {'axis_1'}, dimensions={1}
      ROOT %t = (s32[], bf16[256,1024]{1,0}) tuple(%next, %all-gather.7)
    }

    %condition (s.1: (s32[], bf16[256,1024])) -> pred[] {
      %s.1 = (s32[], bf16[256,1024]) parameter(0)
      %i = s32[]{:T(128)} get-tuple-element(%s.1), index=0
      %ten = s32[]{:T(128)} constant(10)
      ROOT %lt = pred[]{:T(512)} compare(%i, %ten), direction=LT
    }

    ENTRY %main.3_spmd (param: f32[512,128]) -> f32[512,128] {
      %param = f32[512,128]{1,0} parameter(0)
      %zero = s32[]{:T(128)} constant(0)
      %tuple.14 = (s32[], bf16[256,1024]) tuple(%zero, %param)
      %while.10 = (s32[]{:T(128)}, bf16[256,1024]{1,0}) while(%tuple.14), condition=%condition, body=%body
      %dot.1 = f32[512,64]{1,0} dot(%param, %k), lhs_contracting_dims={1}, rhs_contracting_dims={0}
      %psum.7 = f32[512,128]{1,0:T(8,128)S(1)} all-reduce(%param), channel_id=1, replica_groups={{0,4,8},{1,5,9}}, to_apply=%region_0.1
      %pair = (f32[16]{0}, f32[4]{0}) all-reduce(%param, %param), replica_groups=[64,4]<=[256], to_apply=%region_0.1
      ROOT %halo = (f32[512,128], f32[512,128], u32[]) collective-permute-start(%param), source_target_pairs={{0,1}}
    }
    """)


def cost(text, near=0):
    return Costs(Hlo(text), near).of_step()


def test_collectives_in_a_loop_count_as_often_as_it_turns():
    found = {(c.kind, c.group): c for c in cost(PROGRAM).merged()}

    assert found["all-gather", 4] == Collective("all-gather", 10, 10 * 256 * 1024 * 2, 4)
    assert found["all-reduce", 3] == Collective("all-reduce", 1, 512 * 128 * 4, 3)
    assert found["all-reduce", 4].count == 1
    assert found["collective-permute", 2].bytes == 512 * 128 * 4
    assert len(found) == 4


def test_flops_are_those_of_products_loops_counted_through():
    one_turn = 2 * 256 * 256 * 1024

    assert cost(PROGRAM).flops == 10 * one_turn


def test_a_loop_turns_as_often_as_its_steps_and_its_bound_say():
    by_two = PROGRAM.replace("%one = s32[]{:T(128)} constant(1)", "%one = s32[] constant(2)")
    down = (
        by_two.replace("constant(2)", "constant(-3)")
        .replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[] constant(10)")
        .replace("%ten = s32[]{:T(128)} constant(10)", "%ten = s32[] constant(0)")
        .replace("direction=LT", "direction=GE")
    )

    assert cost(by_two).flops == 5 * 2 * 256 * 256 * 1024
    assert cost(down).flops == 4 * 2 * 256 * 256 * 1024  # 10, 7, 4, 1


def test_a_trip_count_that_xla_noted_is_believed_where_counters_are_unknown():
    noted = 'body=%body, backend_config={"known_trip_count":{"n":"7"}}'
    text = PROGRAM.replace("body=%body", noted).replace("constant(10)", "parameter(1)")

    assert cost(text).flops == 7 * 2 * 256 * 256 * 1024


def test_a_loop_of_unknown_length_counts_once_and_is_named():
    found = cost(PROGRAM.replace("constant(10)", "parameter(1)"))

    assert found.flops == 2 * 256 * 256 * 1024
    assert found.notes == {"loop whose turns depend on data, counted once": 1}


def test_memory_traffic_counts_loops_as_flops_do():
    found = cost(PROGRAM)
    turn = 3 * 256 * 1024 * 2 + 2 * 256 * 256 * 2 + 12  # a fusion, an all-gather, a counter

    assert found.bytes - found.bytes_once == 9 * turn


BRANCHES = """\
%small (p: f32[64,64]) -> f32[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%large (q: f32[64,64]) -> f32[64,64] {
  %q = f32[64,64]{1,0} parameter(0)
  %e = f32[64,64]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %f = f32[64,64]{1,0} dot(%e, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %which = s32[] parameter(1)
  %k = f32[64,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"
  %room = f32[64,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %g = (f32[64,64]{1,0}, s8[1024]{0}) custom-call(%x, %k), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  ROOT %c = f32[64,64]{1,0} conditional(%which, %x, %x), branch_computations={%small, %large}
}
"""


def test_of_branches_the_costliest_counts_and_is_named():
    found = cost(BRANCHES)

    # Two in the larger branch, one of the library's.
    assert found.flops == 3 * 2 * 64**3
    assert found.notes["branch taken to be the costliest of its conditional"] == 1


SERIAL = """\
%product (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  ROOT %d = f32[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %y = f32[64,64]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %z = f32[64,64]{1,0} add(%x, %y)
  %begun = (f32[64,64]{1,0:S(1)}, f32[64,64]{1,0}, u32[]) copy-start(%z)
  %near = f32[64,64]{1,0:S(1)} copy-done(%begun)
  %w = f32[64,64]{1,0:S(1)} fusion(%near, %near), kind=kOutput, calls=%product
  ROOT %sum = f32[64,64]{1,0} all-reduce(%w), replica_groups={}
}
"""
SIZE, PRODUCT = 64 * 64 * 4, 2 * 64**3


def seconds(text, flops, memory):
    return Costs(Hlo(text), 0, Limits(flops, memory, 1.0)).of_step().seconds


def test_operations_take_their_time_one_after_the_other_and_what_is_begun_none():
    # Two products, of which only the first has its values in the large memory; and a sum.
    assert seconds(SERIAL, PRODUCT, float("inf")) == pytest.approx(2)
    # Not faster than all traffic with it: what is copied, and what the all-reduce writes.
    assert seconds(SERIAL, float("inf"), SIZE) == pytest.approx(3 + 3 + 1 + 1)
    # Where arithmetic takes longer than memory: the products. Where memory does: the sum.
    assert seconds(SERIAL, PRODUCT / 5, SIZE) == pytest.approx(5 + 3 + 5)


def test_the_time_of_a_loop_is_that_of_all_its_turns():
    chip = Limits(flops=2 * 256 * 256 * 1024, hbm_bytes=float("inf"), link_bytes=1.0)

    assert Costs(Hlo(PROGRAM), 0, chip).of_step().seconds == pytest.approx(10)


KERNEL = """\
ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  ROOT %k = f32[64,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"about":"{\\"block\\": 128}"
}}, metadata={op_name="jit(f)/pallas_call" stack_frame_id=18}, backend_config={"custom_call_config":{"body":"TUw=","cost_estimate":{"flops":"12345","transcendentals":"7","bytes_accessed":"777"}}}
}
"""


def test_a_kernel_that_says_what_it_costs_is_believed_over_however_many_lines():
    found = cost(KERNEL)

    assert (found.flops, dict(found.notes)) == (12345, {})
    assert found.bytes == 2 * SIZE


def test_kernels_that_cannot_be_counted_are_listed():
    notes = cost(BRANCHES).notes

    assert notes["custom call tpu_custom_call, whose arithmetic is not counted"] == 1
    assert len(notes) == 2  # the kernel and the branch


@pytest.mark.parametrize(
    ("groups", "group", "hosts"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4, 1),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", 2, 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", 8, 2),
        ("replica_groups=[2,4]<=[8]", 4, 1),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2, 2),
        ("replica_groups=mesh['replica'=2,'l0'=4] {'l0'}", 4, 1),
        ("replica_groups=mesh['replica'=2,'l0'=4] {'replica'}", 2, 2),
        ("replica_groups=mesh['replica'=8] {'replica'}", 8, 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 4, 1),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'a'}", 2, 1),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", 2, 2),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", 4, 1),
        ("replica_groups={}", 8, 2),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", 2, 1),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,4}}", 2, 2),
    ],
)
def test_groups_of_devices_are_read_however_they_are_written(groups, group, hosts):
    kind = "collective-permute" if "pairs" in groups else "all-reduce"
    text = (
        "HloModule m, is_scheduled=true, num_partitions=8\n\n"
        "ENTRY %e (x: f32[16]) -> f32[16] {\n"
        "  %x = f32[16]{0} parameter(0)\n"
        f"  ROOT %c = f32[16]{{0}} {kind}(%x), channel_id=1, {groups}, to_apply=%add\n}}\n"
    )

    assert cost(text, near=4).merged() == [Collective(kind, 1, 64, group, hosts)]


def test_groups_that_cannot_be_read_are_named_and_counted_as_all():
    text = (
        "HloModule m, replica_count=1, num_partitions=8\n\n"
        "ENTRY %e (x: f32[16]) -> f32[16] {\n"
        "  %x = f32[16]{0} parameter(0)\n"
        "  ROOT %c = f32[16]{0} all-reduce(%x), replica_groups=<runes>, to_apply=%add\n}\n"
    )

    found = cost(text)

    assert found.merged() == [Collective("all-reduce", 1, 64, 8)]
    assert found.notes == {"all-reduce whose devices cannot be read, counted as over all": 1}


# The TPU compiler hid this all-gather behind a product: three fusions hold one and the same.
HIDDEN = textwrap.dedent("""\
    HloModule jit_step, is_scheduled=true, num_partitions=8

    %begin (param_0: bf16[64,1024]) -> (bf16[64,1024], bf16[512,1024], s32[2], u32[]) {
      %param_0 = bf16[64,1024]{1,0} parameter(0)
      %all-gather.275 = bf16[512,1024]{1,0} all-gather(%param_0), channel_id=57, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="13"}
      ROOT %custom-call.54 = (bf16[64,1024]{1,0:S(1)}, bf16[512,1024]{1,0:S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) custom-call(%all-gather.275), custom_call_target="AsyncCollectiveStart"
    }

    %beside (param_1: bf16[64,1024]) -> bf16[512,1024] {
      %param_1 = bf16[64,1024]{1,0} parameter(0)
      ROOT %all-gather.277 = bf16[512,1024]{1,0:S(1)} all-gather(%param_1), channel_id=57, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="13"}
    }

    %end (param_2: bf16[64,1024]) -> bf16[512,1024] {
      %param_2 = bf16[64,1024]{1,0} parameter(0)
      %all-gather.279 = bf16[512,1024]{1,0} all-gather(%param_2), channel_id=57, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}, frontend_attributes={chain_id="13"}
      ROOT %custom-call.56 = bf16[512,1024]{1,0:S(1)} custom-call(%param_2, %all-gather.279), custom_call_target="AsyncCollectiveDone"
    }

    %all-reduce-scatter.10 (input_0: bf16[512,1024]) -> bf16[64,1024] {
      %input_0 = bf16[512,1024]{1,0} parameter(0)
      %all-reduce.29 = bf16[512,1024]{1,0} all-reduce(%input_0), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
      ROOT %part = bf16[64,1024]{1,0} dynamic-slice(%all-reduce.29, %at, %at), dynamic_slice_sizes={64,1024}
    }

    ENTRY %main (w: bf16[64,1024]) -> bf16[64,1024] {
      %w = bf16[64,1024]{1,0} parameter(0)
      %started = (bf16[64,1024], bf16[512,1024], s32[2], u32[]) fusion(%w), kind=kCustom, calls=%begin
      %ran = bf16[512,1024]{1,0} fusion(%w), kind=kOutput, calls=%beside
      %whole = bf16[512,1024]{1,0} fusion(%w), kind=kCustom, calls=%end
      ROOT %sum = bf16[64,1024]{1,0} fusion(%whole), kind=kCustom, calls=%all-reduce-scatter.10
    }
    """)


def test_a_collective_that_is_spread_over_fusions_counts_once():
    found = cost(HIDDEN)

    whole = 512 * 1024 * 2
    # And an all-reduce of which a device keeps a part is sent as a reduce-scatter.
    assert {(c.kind, c.count, c.bytes, c.group) for c in found.merged()} == {
        ("all-gather", 1, whole, 8),
        ("reduce-scatter", 1, whole, 8),
    }
    assert found.notes == {}


def test_a_started_collective_of_several_arrays_counts_them_all():
    text = (
        "ENTRY %e (x: f32[16]) -> f32[] {\n"
        "  %x = f32[16]{0} parameter(0)\n"
        "  %y = f32[4]{0} parameter(1)\n"
        "  %s = ((f32[16]{0}, f32[4]{0}), (f32[64]{0}, f32[16]{0})) all-gather-start(%x, %y),"
        " replica_groups={{0,1,2,3}}, dimensions={0}\n"
        "  ROOT %d = (f32[64]{0}, f32[16]{0}) all-gather-done(%s)\n}\n"
    )

    assert cost(text).merged() == [Collective("all-gather", 1, 4 * 80, 4, asynchronous=1)]


CONCURRENT = """\
%product (a: f32[64,64], b: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  %b = f32[64,64]{1,0} parameter(1)
  ROOT %d = f32[64,64]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %s = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %first = (f32[64,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}FLAG
  %second = (f32[64,64]{1,0}, f32[256,64]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %y = f32[64,64]{1,0} fusion(%x, %x), kind=kOutput, calls=%product
  %g = f32[256,64]{1,0} all-gather-done(%first)
  %z = f32[64,64]{1,0} fusion(%y, %y), kind=kOutput, calls=%product
  %h = f32[256,64]{1,0} all-gather-done(%second)
  %sum = f32[64,64]{1,0} all-reduce(%z), replica_groups={{0,1,2,3}}
  ROOT %t = (s32[], f32[64,64]{1,0}) tuple(%next, %sum)
}

%condition (s.1: (s32[], f32[64,64])) -> pred[] {
  %s.1 = (s32[], f32[64,64]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %ten = s32[] constant(10)
  ROOT %lt = pred[] compare(%i.1, %ten), direction=LT
}

ENTRY %main (x.2: f32[64,64]) -> (s32[], f32[64,64]) {
  %x.2 = f32[64,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[64,64]) tuple(%zero, %x.2)
  ROOT %while = (s32[], f32[64,64]{1,0}) while(%start), condition=%condition, body=%body
}
"""
# What a device sends of an all-gather; of the all-reduce, half of that.
GATHERED = 3 * SIZE


@pytest.mark.parametrize(
    ("gather_seconds", "waiting"),
    [
        # Each product takes a second, and the all-reduce half of a gather's time.
        (0.5, 0.25),  # the gathers end before the products
        (1.0, 0.5),
        (2.0, 1 + 1 + 1),  # the first ends a second after its product, the second as well
    ],
)
def test_asynchronous_collectives_are_waited_for_after_the_operations_in_between(
    gather_seconds, waiting
):
    chip = Limits(PRODUCT, float("inf"), GATHERED / gather_seconds)

    found = Costs(Hlo(CONCURRENT.replace("FLAG", "")), 0, chip).of_step()

    assert found.seconds == pytest.approx(20)
    assert found.waiting == pytest.approx(10 * waiting)
    gathers, sums = found.merged()
    assert (gathers.count, gathers.asynchronous, sums.asynchronous) == (20, 20, 0)
    assert gathers.apart_seconds == pytest.approx(10 * (1 + 2))


def test_a_pair_that_gpus_run_at_once_is_not_asynchronous():
    flag = ', backend_config={"collective_backend_config":{"is_sync":true}}'

    gathers, _ = cost(CONCURRENT.replace("FLAG", flag)).merged()

    assert (gathers.count, gathers.asynchronous) == (20, 10)


def test_a_collective_that_is_spread_over_fusions_runs_beside_those_in_between():
    chip = Limits(float("inf"), float("inf"), 512 * 1024 * 2 * 7 / 8)  # one second each

    found = Costs(Hlo(HIDDEN), 0, chip).of_step()

    gather, scatter = sorted(found.merged(), key=lambda c: c.kind)
    assert (gather.asynchronous, scatter.asynchronous) == (1, 0)
    assert found.waiting == pytest.approx(2)  # nothing takes time in between


@pytest.mark.parametrize(
    ("line", "products"),
    [
        # A 3 x 3 convolution that keeps the size of the image: the rim meets padding.
        (
            "f32[2,8,8,5] convolution(%x, %w), window={size=3x3 pad=1_1x1_1},"
            " dim_labels=b01f_01io->b01f",
            2 * 5 * 3 * (3 * 8 - 2) ** 2,
        ),
        (
            "f32[2,6,6,5] convolution(%x, %w), window={size=3x3}, dim_labels=b01f_01io->b01f",
            2 * 5 * 3 * 18**2,
        ),
    ],
    ids=["same", "valid"],
)
def test_products_with_padding_are_none(line, products):
    text = (
        "ENTRY %e (x: f32[2,8,8,3]) -> f32[] {\n"
        "  %x = f32[2,8,8,3]{3,2,1,0} parameter(0)\n"
        "  %w = f32[3,3,3,5]{3,2,1,0} parameter(1)\n"
        f"  ROOT %c = {line}\n}}\n"
    )

    assert cost(text).flops == 2 * products


def test_a_batch_of_products_written_as_a_convolution_counts_each_once():
    # How the TPU compiler writes 16 products of 32 x 8 by 8 x 64.
    text = (
        "ENTRY %e (x: f32[16,32,8]) -> f32[] {\n"
        "  %x = f32[16,32,8]{2,1,0} parameter(0)\n"
        "  %w = f32[16,8,64]{2,1,0} parameter(1)\n"
        "  ROOT %c = f32[16,32,64] convolution(%x, %w), window={size=16 stride=15 pad=0_0"
        " lhs_dilate=16}, dim_labels=0bf_0io->0bf\n}\n"
    )

    assert cost(text).flops == 2 * 16 * 32 * 8 * 64


def test_nothing_has_no_collectives_and_no_flops():
    assert cost("").merged() == []
    assert cost("").flops == 0


@pytest.mark.parametrize(
    ("kind", "group", "sent"),
    [
        ("all-reduce", 4, 150.0),
        ("all-gather", 4, 75.0),
        ("reduce-scatter", 4, 75.0),
        ("all-to-all", 4, 75.0),
        ("collective-permute", 2, 100.0),
        ("all-reduce", 1, 0.0),
    ],
)
def test_what_a_device_sends_is_what_a_ring_takes(kind, group, sent):
    assert Collective(kind, 1, 100, group).wire_bytes == sent
