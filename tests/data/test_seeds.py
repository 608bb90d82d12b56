"""Which orders repeat: TensorFlow's recorded answers, for every way to seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx
from replicax._src.data.seeds import set_global_seed
from replicax.data import Dataset
from tests.data.pipelines import ints
from tests.golden.pipeline_cases import ORDERS, Library, orders

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "pipelines.json").read_text())

# Nobody gave a seed, and TensorFlow draws one for each place where the dataset is read; ours has
# one, which its state can hold.
DRAWN_BY_PLACE = {f"concatenated sample, seed None, again {again}" for again in (None, False)}


def set_seed(seed):
    set_global_seed(None) if seed is None else rx.random.set_seed(seed)


LIBRARY = Library(rx.data, rx.io, set_seed, None, None, None)


@pytest.fixture(autouse=True)
def _free():
    yield
    set_global_seed(None)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", ORDERS)
def test_orders_repeat_where_tensorflows_do(name, seed):
    found = orders(LIBRARY, name, seed)

    expected = ANSWERS[f"{name}, global {seed}"]
    assert found == expected or (name in DRAWN_BY_PLACE and seed is None)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**64 + 1])
def test_any_integer_is_a_seed(seed):
    found = []
    for _ in range(2):
        rx.random.set_seed(seed)
        found.append(ints(Dataset.range(30).shuffle(30)))

    assert found[0] == found[1]


def test_files_are_listed_in_a_seeded_order(tmp_path):
    for k in range(12):
        (tmp_path / f"{k}.txt").write_text("")
    found = []
    for seed in (1, 1, 2):
        rx.random.set_seed(seed)
        found.append(list(Dataset.list_files(f"{tmp_path}/*.txt")))

    assert found[0] == found[1] != found[2]


CAPTURED = """
import sys, json, replicax as rx
D = rx.data.Dataset
_ = [D.range(3).shuffle(3) for _ in range(int(sys.argv[1]))]  # other seeds drawn before
inner = D.range(6).shuffle(6, reshuffle_each_iteration=sys.argv[2] == "again").shuffle(3)
other = D.range(6).shuffle(6)
def make(k):
    return D.zip(inner.repeat(2), other.repeat(2), D.range(12).shuffle(9))
dataset = D.range(4).shuffle(4).flat_map(make)
iterator = iter(dataset)
if len(sys.argv) > 3:
    iterator.restore_state(json.loads(sys.argv[3]))
    state = None
else:
    for _ in range(17):
        next(iterator)
    state = iterator.save_state()
print(json.dumps([state, [[int(x) for x in row] for row in iterator]]))
"""


@pytest.mark.parametrize("again", ["again", "once"])
def test_unseeded_shuffles_that_a_function_refers_to_continue_alike_in_another_process(again):
    def run(*args):
        done = subprocess.run(
            [sys.executable, "-c", CAPTURED, *args], capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    state, rest = run("0", again)
    _, resumed = run("5", again, json.dumps(state))

    assert resumed == rest
    assert len(rest) == 4 * 12 - 17
