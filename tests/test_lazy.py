"""What `import replicax` brings, and what comes later."""

import subprocess
import sys

import pytest

import replicax as rx

LATER = (
    "replicax._src.data.dataset",
    "replicax.io",
    "replicax.tpu",
    "replicax.compat",
    "replicax._src.preflight",
)


def test_importing_replicax_leaves_what_few_programs_use_for_later():
    code = "import sys, replicax; print(list(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert not [name for name in LATER if f"'{name}'" in loaded]


def test_importing_replicax_traces_nothing():
    code = """
import jax
told = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: told.append(name))
import replicax as rx
print(told)
assert float(jax.numpy.square(rx.Variable(3.0))) == 9.0  # with the first variable it did
assert told
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout

    assert said.strip() == "[]"


@pytest.mark.parametrize("package", [rx, rx.distribute], ids=lambda m: m.__name__)
def test_every_name_of_a_list_can_be_had(package):
    for name in package.__all__:
        assert getattr(package, name) is not None


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'replicax' has no attribute 'nothing'"):
        rx.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        (rx, "reduce_sum", r"replicax has no reduce_sum\. .* write `jnp\.sum\("),
        (rx, "float32", r"Write `jnp\.float32`"),
        (rx, "reduce_mean", r"write `jnp\.mean\(.*Of integers TensorFlow's mean is an integer"),
        (rx, "math", r"Write `from replicax\.compat import tf` and `tf\.math`"),
        (rx, "print", r"Write `from replicax\.compat import tf` and `tf\.print`"),
        (rx, "Module", r"Write `from replicax\.compat import tf` and `tf\.Module`"),
        (rx.nn, "relu", r"replicax\.nn has no relu\. .* write `jax\.nn\.relu\("),
    ],
)
def test_a_name_of_tensorflows_math_says_what_it_is_in_jax(package, name, words):
    with pytest.raises(AttributeError, match=words):
        getattr(package, name)


def test_a_misspelt_name_has_the_right_one_beside_it():
    code = "import replicax as rx; rx.Varable"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "Did you mean: 'Variable'?" in said.stderr


@pytest.mark.parametrize("name", ["ParameterServerStrategy", "CentralStorageStrategy"])
@pytest.mark.parametrize("package", [rx.distribute, rx.distribute.experimental])
def test_a_strategy_that_is_left_out_says_what_to_use(package, name):
    with pytest.raises(AttributeError, match="Use MirroredStrategy"):
        getattr(package, name)


@pytest.mark.parametrize("name", ["PreemptionCheckpointHandler", "TerminationConfig"])
def test_what_tensorflow_has_in_two_places_is_in_both(name):
    assert getattr(rx.distribute.experimental, name) is getattr(rx.train, name)
