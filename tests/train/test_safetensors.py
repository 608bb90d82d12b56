"""safetensors: any view of a tensor is NumPy's view, and only its bytes are read."""

import json
import math
import os
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.train import safetensors
from replicax.testing import run_in_processes

GOLDEN = Path(__file__).parents[1] / "golden" / "weights"


def write(path, arrays):
    """Write a file by the text of the format, not by the code under test."""
    names = {"float32": "F32", "int64": "I64", "bfloat16": "BF16", "uint8": "U8"}
    header, data = {}, b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        header[name] = {
            "dtype": names[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [len(data), end],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


@settings(max_examples=150)
@given(st.data(), st.lists(st.integers(1, 6), max_size=4), st.sampled_from([0, 8, 1 << 16]))
def test_views_equal_numpys(tmp_path_factory, data, shape, gap):
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    path = write(tmp_path_factory.mktemp("x") / "x", {"a": np.ones(3, np.uint8), "x": array})
    stored = rx.train.open_safetensors(path)["x"]
    for _ in range(data.draw(st.integers(0, 3))):
        if data.draw(st.booleans()):
            axes = data.draw(st.permutations(range(array.ndim)))
            array, stored = array.transpose(axes), stored.transpose(*axes)
            continue
        bounds = st.integers(-3, 7)
        steps = st.builds(slice, bounds, bounds, st.integers(1, 3))
        index = tuple(
            data.draw(steps | st.integers(-n, n - 1) if n else steps) for n in array.shape
        )
        array, stored = array[index], stored[index]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "_GAP", gap)
        found = np.asarray(stored)

    assert stored.shape == array.shape
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("policy", ["mirrored", "sharded"])
@pytest.mark.parametrize("shape", [(64, 128), (6, 32, 64), (67, 61), (5000,), ()])
def test_load_into_variables_of_every_layout(tmp_path, policy, shape):
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    path = write(tmp_path / "x.safetensors", {"w": value})
    strategy = rx.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(4)], variable_policy=policy
    )
    with strategy.scope():
        same, turned = rx.Variable(jnp.zeros(shape)), rx.Variable(jnp.zeros(shape[::-1]))

    rx.train.load_safetensors(path, {"w": same})
    rx.train.load_safetensors(path, {"w": turned}, transform=lambda name, x: x.T)

    np.testing.assert_array_equal(same.numpy(), value)
    np.testing.assert_array_equal(turned.numpy(), value.T)
    rx.debug.check_in_sync()
    layout = same.cell.sharding.spec
    same.assign(same * 2)  # it is a variable like others afterwards
    assert same.cell.array().sharding.spec == layout
    np.testing.assert_array_equal(same.numpy(), 2 * value)


def test_load_splits_over_logical_devices(tmp_path):
    value = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    path = write(tmp_path / "x.safetensors", {"w": value})
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        w = rx.Variable(jnp.zeros((4, 8)))
        counter = rx.Variable(
            jnp.zeros((4, 8)),
            synchronization=rx.VariableSynchronization.ON_READ,
            aggregation=rx.VariableAggregation.SUM,
        )

    rx.train.load_safetensors(path, {"w": w})
    rx.train.load_safetensors(path, {"w": counter})

    assert [c.numpy().tolist() for c in w.values] == [value.tolist()] * 2
    np.testing.assert_array_equal(counter.numpy(), value)


def sharded_reads(path):
    """Return how many bytes a worker reads for its shard, and the value of all shards."""
    strategy = rx.distribute.MultiWorkerMirroredStrategy(variable_policy="sharded")
    with strategy.scope():
        w = rx.Variable(jnp.zeros((1024, 512)))
    rx.train.open_safetensors(path)  # imports
    before = _bytes_read()
    rx.train.load_safetensors(path, {"w": w})
    read = _bytes_read() - before
    rx.train.save_safetensors(f"{path}.again", {"w": w, "plain": np.arange(3)})
    return read, w.numpy().sum(dtype=np.float64)


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])  # rchar


@pytest.mark.multi_process
def test_a_worker_reads_only_its_shards(tmp_path):
    value = np.random.default_rng(0).normal(size=(1024, 512)).astype(np.float32)
    path = write(tmp_path / "x.safetensors", {"other": value, "w": value})

    for read, total in run_in_processes(sharded_reads, 2, args=(path,)):
        assert 0 <= read - value.nbytes // 2 < 200_000
        assert total == value.sum(dtype=np.float64)
    again = rx.train.open_safetensors(f"{path}.again")
    np.testing.assert_array_equal(np.asarray(again["w"]), value)


def test_load_checks_before_it_assigns(tmp_path):
    arrays = {"a": np.ones(3, np.float32), "b": np.ones((2, 3), np.float32)}
    path = write(tmp_path / "x", arrays | {"big": np.array([1 << 40])})
    a, b = rx.Variable(jnp.zeros(3)), rx.Variable(jnp.zeros((3, 2)))

    with pytest.raises(rx.errors.NotFoundError, match=r"no tensor 'c'; it has 'a', 'b', 'big'"):
        rx.train.load_safetensors(path, {"a": a, "c": b})
    with pytest.raises(rx.errors.VariableError, match=r"shape \(2, 3\).*Use `transform="):
        rx.train.load_safetensors(path, {"a": a, "b": b})
    with pytest.raises(TypeError, match="needs a variable, got a list"):
        rx.train.load_safetensors(path, {"a": a, "b": [1]})
    half = rx.Variable(jnp.zeros(3, jnp.bfloat16))
    with pytest.raises(rx.errors.VariableError, match="`cast=True`"):
        rx.train.load_safetensors(path, {"a": half})
    with pytest.raises(rx.errors.VariableError, match="do not fit in the int32"):
        rx.train.load_safetensors(path, {"big": rx.Variable(jnp.zeros(1, jnp.int32))}, cast=True)
    assert a.numpy().tolist() == [0, 0, 0]
    rx.train.load_safetensors(path, {"a": half}, cast=True)
    assert half.numpy().tolist() == [1, 1, 1]


DTYPES = [*map(np.dtype, ["bool", "int8", "int32", "int64", "uint8", "float16", "float32"])]
DTYPES += [np.dtype(d) for d in (jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", DTYPES, ids=str)
def test_a_dtype_that_holds_another_converts_all_its_values(dtype, own):
    if dtype.itemsize <= 2:
        every = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}").view(dtype)
    else:
        every = np.array([0, 1, 2**24 + 1, 2**31 - 1, 2**30 + 1]).astype(dtype)
    if dtype == np.bool_:
        every = np.array([False, True])
    with np.errstate(all="ignore"):
        back = every.astype(own).astype(dtype)
        is_exact = bool(((back == every) | ((back != back) & (every != every))).all())

    if safetensors._holds(own, dtype):
        assert is_exact
    elif dtype.itemsize <= 2 and own.kind == dtype.kind == "f":
        assert not is_exact


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data.replace(b"F32", b"F99"),
        lambda data: data.replace(b'"shape": [3]', b'"shape": [4]'),
        lambda data: data.replace(b'"shape": [3]', b'"shape": -3]'),
        lambda data: data.replace(b'"data_offsets": [12, 24]', b'"data_offsets": [ 8, 20]'),
    ],
)
def test_open_rejects_damaged_files(tmp_path, damage):
    path = tmp_path / "x"
    write(path, {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)})
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(rx.errors.DataLossError):
        rx.train.open_safetensors(path)


def test_open_rejects_an_index_that_leads_elsewhere(tmp_path):
    write(tmp_path / "secret.safetensors", {"a": np.ones(3, np.float32)})
    folder = tmp_path / "model"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for file, error in {
        "../secret.safetensors": rx.errors.DataLossError,
        "absent.safetensors": rx.errors.NotFoundError,
    }.items():
        index.write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(error):
            rx.train.open_safetensors(folder)
    index.write_text("[]")
    with pytest.raises(rx.errors.DataLossError):
        rx.train.open_safetensors(folder)


@settings(max_examples=30)
@given(st.integers(1, 2000), st.randoms())
def test_saved_tensors_come_back(tmp_path_factory, most, random):
    folder = tmp_path_factory.mktemp("x")
    dtypes = [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16, np.int64, np.float16]
    arrays = {
        f"t{i}": (random.random() * np.arange(random.randrange(20))).astype(random.choice(dtypes))
        for i in range(random.randrange(8))
    }
    arrays["scalar"] = np.float32(2.5)

    rx.train.save_safetensors(folder, arrays, max_file_bytes=most, metadata={"format": "pt"})

    found = rx.train.open_safetensors(folder)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].start % array.dtype.itemsize == 0
        np.testing.assert_array_equal(np.asarray(found[name]), array)
    sizes = [len(list(rx.train.open_safetensors(p))) for p in folder.glob("*.safetensors")]
    nbytes = [p.stat().st_size for p in folder.glob("*.safetensors")]
    assert all(n == 1 or size <= most + 2000 for n, size in zip(sizes, nbytes, strict=True))


def test_saved_variables_and_models_come_back(tmp_path):
    keras = pytest.importorskip("keras")
    nnx = pytest.importorskip("flax.nnx")
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
    with strategy.scope():
        dense = keras.layers.Dense(200)
        dense.build((None, 100))
        linear = nnx.Linear(100, 200, rngs=nnx.Rngs(0))
    free = nnx.Linear(100, 200, rngs=nnx.Rngs(1))
    plain = keras.layers.Dense(200)
    plain.build((None, 100))
    rx.train.save_safetensors(tmp_path, {"w": dense.kernel, "b": linear.bias})
    for target in (linear.kernel, free.kernel, plain.kernel):
        rx.train.load_safetensors(tmp_path, {"w": target})

    value = np.asarray(dense.kernel)
    assert value.std() > 0.01
    for target in (linear.kernel[...], free.kernel[...], plain.kernel):
        np.testing.assert_array_equal(np.asarray(target), value)
    with pytest.raises(TypeError, match="no dtype complex128, which 'z' has"):
        rx.train.save_safetensors(tmp_path, {"z": np.zeros(2, complex)})
    write(tmp_path / "model.safetensors", {"w": value})
    with pytest.raises(rx.errors.AlreadyExistsError, match="readers prefer it"):
        rx.train.save_safetensors(tmp_path, {"w": value})


def test_urls(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}/model"
    rx.train.save_safetensors(url, {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)})

    tensor = rx.train.open_safetensors(url)["a"]

    np.testing.assert_array_equal(np.asarray(tensor[:, 1]), [1, 4])


# Three models of PyTorch's libraries; `tests/golden/make_weights.py` made their weights and logits.


def norm(x, p, name, epsilon=1e-5):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def attend(q, k, v):
    """Causal attention; of (batch, heads, length, width)."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = jnp.where(np.tri(q.shape[-2], dtype=bool), scores, -jnp.inf)
    return merged(jax.nn.softmax(scores) @ v)


def heads(x, count):
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def merged(x):
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def gpt2(p, tokens):
    x = jnp.take(p["transformer.wte.weight"], tokens, axis=0)
    x += p["transformer.wpe.weight"][: tokens.shape[1]]
    dense = lambda x, name: x @ p[f"{name}.weight"] + p[f"{name}.bias"]  # noqa: E731
    for at in ("transformer.h.0", "transformer.h.1"):
        parts = jnp.split(dense(norm(x, p, f"{at}.ln_1"), f"{at}.attn.c_attn"), 3, -1)
        x += dense(attend(*(heads(part, 2) for part in parts)), f"{at}.attn.c_proj")
        inner = jax.nn.gelu(dense(norm(x, p, f"{at}.ln_2"), f"{at}.mlp.c_fc"), approximate=True)
        x += dense(inner, f"{at}.mlp.c_proj")
    return norm(x, p, "transformer.ln_f") @ p["transformer.wte.weight"].T


def llama(p, tokens):
    def rms(x, name):
        scale = jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x / scale * p[f"{name}.weight"]

    def rotated(x):
        half = x.shape[-1] // 2
        angles = np.outer(np.arange(x.shape[-2]), 10000.0 ** (-np.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = jnp.take(p["model.embed_tokens.weight"], tokens, axis=0)
    for at in ("model.layers.0", "model.layers.1"):
        dense = lambda x, name, at=at: x @ p[f"{at}.{name}_proj.weight"]  # noqa: E731
        y = rms(x, f"{at}.input_layernorm")
        q, k, v = (heads(dense(y, f"self_attn.{n}"), c) for n, c in [("q", 4), ("k", 2), ("v", 2)])
        k, v = (jnp.repeat(z, 2, axis=1) for z in (rotated(k), v))
        x += dense(attend(rotated(q), k, v), "self_attn.o")
        y = rms(x, f"{at}.post_attention_layernorm")
        x += dense(jax.nn.silu(dense(y, "mlp.gate")) * dense(y, "mlp.up"), "mlp.down")
    return rms(x, "model.norm") @ p["lm_head.weight"]


def convolutions(p, images):
    x = jnp.moveaxis(images, 1, -1)
    for name, stride in [("0", 1), ("2", 2)]:
        kernel = jnp.asarray(p[f"{name}.weight"])
        x = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + p[f"{name}.bias"])
    return jnp.moveaxis(x, -1, 1).reshape(len(x), -1) @ p["5.weight"] + p["5.bias"]


def to_jax(model):
    """Return the transformation of PyTorch's layouts: (out, in) kernels, and (out, in, h, w)."""

    def transform(name, x):
        if x.ndim == 4:
            return x.transpose(2, 3, 1, 0)
        is_table = model == "gpt2" or "embed" in name  # GPT-2 stores kernels as (in, out)
        return x.T if x.ndim == 2 and not is_table else x

    return transform


@pytest.mark.parametrize("policy", [pytest.param("mirrored", marks=pytest.mark.slow), "sharded"])
@pytest.mark.parametrize("model", [gpt2, llama, convolutions], ids=lambda f: f.__name__)
def test_logits_equal_torchs(model, policy):
    folder, transform = GOLDEN / model.__name__, to_jax(model.__name__)
    golden = np.load(folder / "golden.npz")
    inputs = golden["images"] if "images" in golden else golden["tokens"].astype(np.int32)
    stored = rx.train.open_safetensors(folder)
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy=policy)
    with strategy.scope():
        p = {n: rx.Variable(jnp.zeros(transform(n, t).shape)) for n, t in stored.items()}
    rx.train.load_safetensors(folder, p, transform=transform)
    batches = strategy.experimental_distribute_dataset(
        rx.data.Dataset.from_tensor_slices(inputs).batch(4)
    )

    @rx.function
    def step(batch):
        return strategy.gather(strategy.run(model, args=(p, batch)), axis=0)

    logits = step(next(iter(batches)))

    np.testing.assert_allclose(logits, golden["logits"], atol=1e-5, rtol=1e-5)
    assert any(v.cell.sharded for v in p.values()) == (
        policy == "sharded" and model is not convolutions  # whose weights are small
    )


def test_saved_file_is_replaced_only_when_complete(tmp_path):
    path = tmp_path / "x.safetensors"
    rx.train.save_safetensors(path, {"a": np.ones(2)})

    class Late:
        shape, dtype = (2,), np.dtype("float32")

        def __array__(self, dtype=None, copy=None):
            raise OSError("no value")

    with pytest.raises(OSError, match="no value"):
        rx.train.save_safetensors(path, {"a": np.ones(2), "b": Late()})
    assert os.listdir(tmp_path) == ["x.safetensors"]
    assert list(rx.train.open_safetensors(path)) == ["a"]
