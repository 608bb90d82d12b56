"""Every public name of TensorFlow 2.21 works here, or says why not and what to use."""

import json
from pathlib import Path

import jax
import pytest

import replicax as rx
from tests.golden.public_names import PUBLIC, differences, found, table

SHARED = json.loads((Path(__file__).parent / "golden" / "shared_names.json").read_text())
NAMES = [(path, name) for path, names in PUBLIC.items() for name in names]

# What programs do not make by themselves, so that its arguments are our own.
MADE_BY_US = {
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Iterator",
    "ReplicaContext",
    "Strategy",
    "StrategyExtended",
    "SummaryWriter",
}
# Parts of TensorFlow's own machinery, which programs do not call.
INNER = {
    "DatasetSpec": "how a tf.TypeSpec becomes tensors",
    "RaggedFeature": "kinds of partitions, which are refused",
    "TFRecordOptions": "conversions between its older forms",
}

# Names of TensorFlow at the top level and in `nn` and `compat.v1` whose signature or members are
# others, and why.
_GRAPHS = "the graph that it is part of"
_TRACING = "how a tf.TypeSpec becomes tensors"
OTHERWISE = {
    "cond": (["has true_fn", "has false_fn", "does not take name"], "the functions are required"),
    "while_loop": (None, "JAX's arguments; a port writes `tf.while_loop` of replicax.compat"),
    "scan": (None, "JAX's arguments; a port writes `tf.scan` of replicax.compat"),
    "IndexedSlices": (
        [f"has no {n}" for n in ("consumers", "device", "graph", "name", "op")],
        _GRAPHS,
    ),
    "Tensor": (
        [
            f"has no {n}"
            for n in (
                "OVERLOADABLE_OPERATORS",
                "eval",
                "experimental_ref",
                "get_shape",
                "name",
                "ref",
                "set_shape",
            )
        ],
        "it is jax.Array; a port marks these methods",
    ),
    "TensorSpec": (["has no"], _TRACING),
    "TypeSpec": (
        ["has no", ".is_compatible_with does not take spec_or_value by keyword"],
        _TRACING,
    ),
    "TensorInfo": (["has no"], "the namespace of CompositeTensor alone"),
}
HOMES = {
    "": rx,
    "compat.v1": rx.compat.v1,
    "compat.v1.logging": rx.compat.v1.logging,
    "compat.v1.losses": rx.compat.v1.losses,
    "compat.v1.train": rx.compat.v1.train,
    "nn": rx.nn,
}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in HOMES for name in SHARED[path]["names"]]
)
def test_a_shared_name_takes_what_tensorflows_takes(path, name):
    left = list(differences(getattr(HOMES[path], name), SHARED[path]["names"][name]))
    known = OTHERWISE.get(name, ([], ""))[0]

    if known is not None:
        assert [problem for problem in left if not problem.startswith(tuple(known))] == []
        assert bool(known) == bool(left), "this is no exception any more"


def test_every_shared_name_is_compared():
    for path, home in HOMES.items():
        shared = {n for n in home.__all__ if n in SHARED[path]["all"]}
        modules = {n for n in shared if type(getattr(home, n)).__name__ in ("module", "_Keras")}

        assert shared - modules - SHARED[path]["names"].keys() == set()


def test_a_compiled_function_has_the_members_of_tensorflows():
    theirs = SHARED["made"]["names"]["function"]["has"]
    compiled = rx.function(lambda x: x)
    missing = {name for name in theirs if not hasattr(compiled, name)}

    assert missing == {
        "experimental_get_compiler_ir",  # the text of TensorFlow's compiler
        "function_spec",
        "function_type",
        "get_initialization_function",  # there is nothing to initialize
        "name",
        "pretty_printed_concrete_signatures",
    }


def test_defaults_of_64_bits_are_kept_where_jax_has_them():
    with jax.enable_x64(True):
        drawn = rx.random.Generator.from_seed(1).uniform_full_int([2])
        chosen = rx.random.stateless_categorical([[0.0, 1.0]], 3, [1, 2])
    narrow = rx.random.Generator.from_seed(1).uniform_full_int([2])

    assert (drawn.dtype, chosen.dtype, narrow.dtype) == ("uint64", "int64", "uint32")


def test_errors_are_made_with_the_arguments_of_tensorflow():
    for kind in (rx.errors.NotFoundError, rx.errors.AbortedError, rx.errors.OutOfRangeError):
        error = kind(node_def=None, op=None, message="gone")
        assert (error.message, str(error)) == ("gone", "gone")
    assert rx.errors.OpError(None, None, "gone", 7).error_code == 7


def test_variables_say_what_to_write_for_methods_of_graphs():
    with pytest.raises(AttributeError, match=r"has no initializer\. .*remove it"):
        _ = rx.Variable(1.0).initializer
    variable = rx.Variable(1.0, validate_shape=True, caching_device=None)
    assert float(variable.assign(2.0, use_locking=True, name="a", read_value=False)) == 2.0


def test_a_session_configuration_takes_every_field():
    config = rx.compat.v1.ConfigProto(log_device_placement=True)
    config.gpu_options.allow_growth = True
    config.graph_options.rewrite_options.auto_mixed_precision = 1

    assert config.copy().gpu_options.allow_growth is True
    assert config.copy() == config


@pytest.mark.parametrize(("path", "name"), NAMES, ids=lambda part: part)
def test_a_name_takes_what_tensorflows_takes_or_says_what_to_use(path, name):
    ours, words = found(path, name)

    if words is not None:
        assert "has no attribute" not in words, words
        assert len(words.partition(". ")[2]) > 20, words
        return
    left = list(differences(ours, PUBLIC[path][name]))
    if name in MADE_BY_US:
        left = [problem for problem in left if not problem.startswith(("does not take", "needs"))]
    if name in INNER:
        left = [problem for problem in left if not problem.startswith("has no")]
    assert left == []


def test_a_refusal_names_the_place_and_the_name():
    with pytest.raises(AttributeError, match=r"replicax\.random has no all_candidate_sampler\. "):
        _ = rx.random.all_candidate_sampler


def test_a_method_that_is_left_out_says_what_to_use():
    strategy = rx.distribute.OneDeviceStrategy("CPU:0")

    with pytest.raises(AttributeError, match=r"experimental_local_results"):
        strategy.unwrap(1)
    with pytest.raises(AttributeError, match="as_dict"):
        rx.train.ClusterSpec({}).as_cluster_def()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = strategy.nothing
    assert not hasattr(strategy, "unwrap")


def test_the_table_of_names_is_that_of_the_docs():
    text = Path(__file__).parents[1].joinpath("docs", "porting.md").read_text()

    assert "\n".join(table()) in text, "python -m tests.golden.public_names prints it"
