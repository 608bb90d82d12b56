"""Which devices a step is tried on, and how what came out is ranked."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.preflight.plan import (
    Candidate,
    Plan,
    option_combinations,
    read_prices,
    search,
    targets_of_kind,
)
from replicax._src.preflight.targets import Target
from replicax._src.preflight.trace import Step, Variation, trace
from tests.preflight.needs import needs_compiler
from tests.preflight.test_tables import OLD


def candidate(devices, flops, *, fits=True, price=None):
    report = dataclasses.replace(
        OLD, num_devices=devices, num_replicas=devices, flops=flops, fits=fits, collectives=()
    )
    return Candidate(report, "mirrored", 8, price)


def test_the_smallest_and_the_fastest_are_of_those_that_fit():
    small, fast = candidate(4, 9e14), candidate(16, 1e14)
    plan = Plan((small, fast, candidate(1, 1e12, fits=False)))

    assert plan.smallest is small
    assert plan.fastest is fast
    assert [c.works for c in plan.ranked] == [True, True, False]
    assert Plan(()).smallest is Plan(()).fastest is None


def test_a_price_gives_the_cost_of_a_thousand_steps():
    one = candidate(4, 197e12, price=1.8)  # a second for each step

    assert one.cost == pytest.approx(1000 / 3600 * 4 * 1.8, rel=0.01)
    assert candidate(4, 1e12).cost is None


def test_prices_are_read_from_a_file(tmp_path):
    path = tmp_path / "prices.json"
    path.write_text('{"v5e": 1.2}')
    assert read_prices(str(path)) == {"v5e": 1.2}
    for wrong in ('["v5e"]', '{"v5e": 1.2'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="prices per hour"):
            read_prices(str(path))


def test_what_a_script_offers_is_tried_in_all_combinations():
    assert option_combinations([]) == [[]]
    assert option_combinations(["cores=1,8", "keep"]) == [
        ["--cores", "1"],
        ["--cores", "1", "--keep"],
        ["--cores", "8"],
        ["--cores", "8", "--keep"],
    ]
    assert option_combinations(["-c=2"]) == [["-c", "2"]]
    for wrong in ("cores=", "=8", ""):
        with pytest.raises(ValueError, match=r"cores=1,8.*and not"):
            option_combinations([wrong])


def test_the_table_shows_what_was_varied_and_only_that(tmp_path):
    plain = Plan((candidate(4, 1e14), candidate(8, 1e14)))
    report = dataclasses.replace(OLD, num_devices=8, num_replicas=2, collectives=())
    split = Candidate(report, "mirrored", 8, None, ("--cores", "4"))

    assert [c.header for c in plain.__rich__().columns][2:4] == ["variables", "rows"]
    varied = Plan((*plain.candidates, split))
    assert [c.header for c in varied.__rich__().columns][2:5] == ["logical", "variables", "options"]
    assert split.how == "mirrored, 4 logical devices, --cores 4"
    assert split.with_price({"v5e": 2.0}).price == 2.0
    pytest.importorskip("matplotlib", reason="a plot needs matplotlib")
    varied.plot(tmp_path / "plan.svg")
    assert "4 logical devices" in (tmp_path / "plan.svg").read_text()


def test_a_kind_has_its_usual_sizes():
    assert [t.num_devices for t in targets_of_kind("v5e", 16)] == [1, 4, 8, 16]
    assert [t.num_devices for t in targets_of_kind("v5p", 16)] == [1, 4, 8, 16]
    assert [t.name for t in targets_of_kind("h100", 8)] == [
        "h100:1x1",
        "h100:1x2",
        "h100:1x4",
        "h100:1x8",
    ]
    with pytest.raises(ValueError, match="The generations"):
        targets_of_kind("abacus", 8)


def step_of(strategy):
    with strategy.scope():
        weight = rx.Variable(jnp.zeros((256, 256)), name="weight")

    def replica(x):
        gradient = x.T @ jnp.tanh(x @ weight.read_value())
        weight.assign_sub(rx.distribute.get_replica_context().all_reduce("SUM", gradient))

    x = strategy.experimental_distribute_values_from_function(
        lambda _: np.ones((8, 256), np.float32)
    )
    return Step.of(lambda x: strategy.run(replica, args=(x,)), (x,), {}), weight


def test_a_variation_changes_the_rows_and_how_variables_are_held_and_leaves_no_trace():
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    step, weight = step_of(strategy)
    target = Target.parse("v5e:2x2")

    programs = {
        (rows, policy): trace(step, target, Variation(rows, policy)).program
        for rows in (0, 32)
        for policy in ("", "sharded")
    }

    assert len(set(programs.values())) == 4
    assert (strategy.variable_policy, weight.cell.sharded) == ("mirrored", False)
    assert len(strategy.experimental_local_results(weight)) == 2


@needs_compiler
def test_a_search_tries_both_ways_to_hold_variables():
    step, _ = step_of(rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))

    found = list(search(step, ["v5e"], global_batch=64, most=4))

    assert [(c.report.num_devices, c.policy, c.rows) for c in found] == [
        (1, "mirrored", 64),
        (4, "mirrored", 16),
        (4, "sharded", 16),
    ]
    weight = 256 * 256 * 4
    alone, whole, parts = (c.report.memory.arguments for c in found)
    assert (alone, whole) == (weight + 64 * 1024, weight + 16 * 1024)
    assert parts == weight // 4 + 16 * 1024
    assert all(c.report.flops == 2 * 2 * c.rows * 256 * 256 for c in found)
