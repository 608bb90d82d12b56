"""Workers of a machine divide its cores, unless a scheduler has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.base import cores

CPU = Path("/sys/fs/cgroup/cpu")
V2 = Path("/sys/fs/cgroup/cgroup.controllers")
SHOW = """
import json, sys
from replicax._src.base import cores
print(json.dumps([cores.local_facts(), cores.usable()]))
"""


def member(numbers, quotas=(), machine="m"):
    return {"machine": machine, "cores": cores._ranges(sorted(numbers)), "quotas": list(quotas)}


@given(st.sets(st.integers(0, 300)))
def test_ranges_are_read_as_written(numbers):
    assert set(cores._numbers(cores._ranges(sorted(numbers)))) == numbers


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 9), min_size=1), st.sampled_from("ab")), min_size=1)
)
def test_shares_use_each_core_once(sets):
    members = [member(numbers, machine=machine) for numbers, machine in sets]
    shares = [cores.share_of(members, index) for index in range(len(members))]

    used = {(machine, number) for numbers, machine in sets for number in numbers}
    assert sum(shares) == pytest.approx(len(used))
    for (numbers, machine), share in zip(sets, shares, strict=True):
        others = [s for s, m in sets if m == machine and s & numbers]
        if len(others) == 1:  # divided by the scheduler
            assert share == len(numbers)
        if all(other == numbers for other in others):
            assert share == pytest.approx(len(numbers) / len(others))


def test_quota_is_shared_by_the_workers_of_its_cgroup_only():
    eight, pod, other = range(8), [(1, 3.0)], [(2, 3.0)]

    assert cores.share_of([member(eight, pod), member(eight, other)], 0) == 3
    assert cores.share_of([member(eight, pod), member(eight, pod)], 0) == 1.5
    assert cores.share_of([member(eight, pod), member(eight, pod, "n")], 0) == 3
    assert cores.share_of([member(eight, [*pod, (9, 2.0)])], 0) == 2  # of a cgroup around it


def test_limited_process_sees_its_cores():
    allowed = sorted(os.sched_getaffinity(0))[:1]
    limited = f"import os\nos.sched_setaffinity(0, {allowed})\n{SHOW}"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)

    facts, usable = json.loads(done.stdout)
    assert (facts["cores"], usable) == (str(allowed[0]), 1), done.stderr


def test_quota_of_a_real_cgroup_limits_the_process():
    """The CPU limit of a container; the cgroup around it has a larger one."""
    root = CPU.parent if V2.exists() else CPU
    outer = root / f"replicax-test-{os.getpid()}"
    inner = outer / "inner"
    try:
        inner.mkdir(parents=True)
        for folder, quota in ((outer, 150_000), (inner, 100_000)):
            if V2.exists():
                (folder / "cpu.max").write_text(f"{quota} 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError as error:
        _remove(inner, outer)
        pytest.skip(f"cannot create a cgroup with a CPU quota: {error}")
    command = f'echo $$ > {inner}/cgroup.procs && exec "$0" -c "$1"'
    try:
        done = subprocess.run(
            ["sh", "-c", command, sys.executable, SHOW], capture_output=True, text=True
        )
    finally:
        _remove(inner, outer)

    facts, usable = json.loads(done.stdout)
    assert usable == 1, done.stderr
    assert sorted(cores for _, cores in facts["quotas"])[:2] == [1.0, 1.5]


def _remove(*folders):
    for folder in folders:
        if folder.exists():
            folder.rmdir()
