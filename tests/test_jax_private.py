"""The JAX that is installed still has what replicax asks of its inside."""

import ast
import dataclasses
import importlib
import inspect

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import take_current_trace
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from replicax._src.compat import jax as _jax_private
from replicax._src.functions.recording import recorded
from replicax._src.state.levels import trace_key
from tests.fresh_process import run_fresh

WANTED = {
    "jax._src.array": ["ArrayImpl"],
    "jax._src.callback": ["_callback_op_sharding"],
    "jax._src.clusters": ["ClusterEnv"],
    "jax._src.compilation_cache": ["put_executable_and_time"],
    "jax._src.compiler": ["_cache_write", "backend_compile_and_load"],
    "jax._src.config": ["config_ext", "config_states", "eager_constant_folding", "trace_context"],
    "jax._src.core": ["pytype_aval_mappings", "trace_state_strong_ref"],
    "jax._src.distributed": ["global_state"],
    "jax._src.dtypes": ["canonicalize_value_handlers"],
    "jax._src.effects": [
        "Effect",
        "control_flow_allowed_effects",
        "custom_derivatives_allowed_effects",
        "lowerable_effects",
        "ordered_effects",
        "remat_allowed_effects",
        "shardable_ordered_effects",
    ],
    "jax._src.interpreters.pxla": ["batched_device_put"],
    "jax._src.tree_util": ["dispatch_registry"],
    "jax._src.xla_bridge": ["_backend_factories", "backends_are_initialized"],
    "jaxlib._jax": [
        "get_distributed_runtime_client",
        "get_distributed_runtime_service",
        "make_gloo_tcp_collectives",
    ],
}
ONLY_IN_OLD_JAX = {"jax._src.core": {"canonicalize_value_dtype"}}  # 0.10.1 and earlier


@pytest.mark.parametrize(
    ("module", "names"),
    [pytest.param(*item, id=f"JAX-{jax.__version__}-{item[0]}") for item in WANTED.items()],
)
def test_what_is_needed_is_there(module, names):
    found = importlib.import_module(module)

    assert [name for name in names if not hasattr(found, name)] == []


def test_private_objects_have_the_attributes_that_are_used():
    inside = importlib.import_module
    cpu = inside("jax._src.xla_bridge")._backend_factories["cpu"]
    state = inside("jax._src.distributed").global_state
    folding = inside("jax._src.config").eager_constant_folding

    assert [x.shape for x in jnp.ones(2)._arrays] == [(2,)]
    assert dataclasses.is_dataclass(cpu)
    assert callable(cpu.factory)
    for name in ("client", "process_id", "num_processes", "coordinator_address"):
        assert hasattr(state, name)
    assert all(map(inspect.isclass, inside("jax._src.clusters").ClusterEnv._cluster_types))
    assert folding in _jax_private._inventory.states()
    assert trace_key._obj in _jax_private._inventory.user_states()
    assert all(map(callable, (folding.get_local, folding.set_local)))


def test_an_interrupted_trace_leaves_neither_jaxs_states_nor_replicaxs_key_changed():
    folding = importlib.import_module("jax._src.config").eager_constant_folding
    before = trace_key.value, folding.value

    def interrupted():
        trace_key("an ended trace").__enter__()
        folding(True).__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _jax_private.undisturbed(interrupted)

    assert (trace_key.value, folding.value) == before


def test_every_private_name_is_wanted():
    """The list above is the count of private names, and what a new JAX is checked for."""
    used: dict[str, set[str]] = {}
    tree = ast.parse(inspect.getsource(_jax_private))
    for owner, name in map(_name_in_module, ast.walk(tree)):
        if owner is not None:
            used.setdefault(owner, set()).add(name)
    wanted = {module: set(names) for module, names in WANTED.items() if module != "jaxlib._jax"}
    wanted["jax._src.effects"] -= set(_jax_private._EFFECT_SETS)  # looked up in a loop
    for module, names in ONLY_IN_OLD_JAX.items():
        wanted[module] |= names

    assert used == wanted


def _name_in_module(node):
    """Return the private module and the name in it that a node reads; None for all other nodes."""
    match node:
        case ast.Attribute(value=owner, attr=name):
            pass
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=name), *_]):
            pass
        case _:
            return None, ""
    match owner:
        case ast.Name(id=variable):
            module = getattr(_jax_private, variable, None)
        case ast.Call(func=ast.Name(id="_inside"), args=[ast.Constant(value=place)]):
            module = _jax_private._inside(place)
        case _:
            return None, ""
    found = getattr(module, "__name__", "") if inspect.ismodule(module) else ""
    return (found, name) if found.startswith("jax._src.") else (None, "")


def test_the_class_of_tracers_is_jaxs_own_until_a_part_of_a_variable_is_traced():
    ended = run_fresh("""
        import jax
        before = {name: id(x) for name, x in vars(jax.core.Tracer).items()}
        import replicax as rx
        strategy = rx.distribute.MirroredStrategy(["CPU:0"])
        with strategy.scope():
            v = rx.Variable([1.0, 2.0])
        rx.function(lambda: v.assign_add(v))()
        assert {name: id(x) for name, x in vars(jax.core.Tracer).items()} == before
    """)

    assert ended.returncode == 0, ended.stderr


CONTEXTS = {
    "none": "contextlib.nullcontext()",
    "compile_time": "jax.ensure_compile_time_eval()",
    "no_jit": "jax.disable_jit()",
    "mesh": "jax.set_mesh(jax.make_mesh((1,), ('x',)))",
    "x64": "jax.enable_x64(True)",
    "rank": "jax.numpy_rank_promotion('raise')",
    "promotion": "jax.numpy_dtype_promotion('strict')",
    "leaks": "jax.checking_leaks()",
}
# Each test starts a process.
SLOW_CONTEXTS = ("no_jit", "mesh", "x64", "rank", "promotion", "leaks")


@pytest.mark.parametrize(
    ("context", "inside"),
    [
        *((name, False) for name in CONTEXTS if name not in SLOW_CONTEXTS),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in SLOW_CONTEXTS),
        ("none", True),
        ("compile_time", True),
    ],
)
def test_variables_pass_as_arrays_wherever_the_first_is_made(context, inside):
    ended = run_fresh(f"""
        import contextlib, jax, jax.numpy as jnp, replicax as rx
        made = []
        def first():
            with {CONTEXTS[context]}:
                made.append(rx.Variable(lambda: rx.random.normal([3, 4])))
        rx.function(lambda: None if made else first())() if {inside} else first()
        v = rx.Variable(jnp.arange(12.0).reshape(3, 4))
        print(float(jnp.dot(jnp.ones((2, 3)), v).sum()), float(jax.jit(jnp.sum)(v)))
    """)

    assert ended.stdout.split() == ["132.0", "66.0"], ended.stderr
    assert "upgrade" not in ended.stderr


def test_without_a_service_nothing_is_connected():
    assert not _jax_private.connect_distributed("", 0, 2, "127.0.0.1", 1)

    assert not jax.distributed.is_initialized()


def test_backends_are_reset_and_arrays_of_the_old_ones_can_be_used():
    ended = run_fresh("""
        import jax, jax.numpy as jnp
        from replicax._src.compat import jax as private
        assert private.can_reset_backends()
        x, key, old = jnp.arange(3.0), jax.random.key(0), jax.devices()[0]
        double = jax.jit(lambda a: a * 2)
        first = double(x), jax.random.normal(key, (2,))
        private.reset_backends()
        new = jax.devices()[0]
        assert new is not old and new != old and jax.process_count() == 1
        assert x.tolist() == [0, 1, 2]
        assert (double(x) + jnp.ones(3)).devices() == {new}
        assert (double(x) == first[0]).all()
        assert (jax.random.normal(key, (2,)) == first[1]).all()
    """)

    assert ended.returncode == 0, ended.stderr


def test_what_is_traced_now_is_known_as_the_public_way_knows_it():
    public = _jax_private._TraceNow()
    seen = []
    jax.jit(lambda: seen.append((_jax_private.traced.value, public.value)))()

    assert _jax_private.traced.value is _jax_private.at_rest is public.value
    assert all(fast is slow is not _jax_private.at_rest for fast, slow in seen)
    assert type(_jax_private.traced) is not type(public)


class Listener:
    """Counts the operations that it is told, and runs them."""

    def __init__(self):
        self.counts = []

    def follows(self, x):
        return False

    def record(self, call, args, *, opaque=False):
        self.counts.append(len(args))
        return call(*args)


# What a GradientTape is told, and with what: a JAX that processes its operations by another
# method, or calls it with other arguments, fails here before it fails in a tape.
PROCESSED = {
    "process_primitive": ("primitive", "tracers", "params"),
    "process_call": ("call_primitive", "f", "tracers", "params"),
    "process_custom_jvp_call": ("primitive", "fun", "jvp", "tracers", "symbolic_zeros"),
    "process_custom_vjp_call": (
        "primitive",
        "fun",
        "fwd",
        "bwd",
        "tracers",
        "out_trees",
        "symbolic_zeros",
    ),
}


@pytest.mark.parametrize(("method", "parameters"), PROCESSED.items())
def test_jax_tells_its_operations_as_the_tape_expects(method, parameters):
    if not hasattr(jax.core.Trace, method):
        assert method == "process_call", "only calls are no operations of newer JAX"
        return
    found = tuple(inspect.signature(getattr(jax.core.Trace, method)).parameters)[1:]

    assert found == parameters, f"JAX {jax.__version__}: adapt replicax._recording._Recording"


def test_a_trace_has_no_other_operations_to_process():
    core = importlib.import_module("jax._src.core")

    found = {name for name in dir(core.EvalTrace) if name.startswith("process_")}

    assert found | {"process_call"} == {*PROCESSED, "process_shard_map"}


@jax.custom_jvp
def own_jvp(x):
    return x


own_jvp.defjvp(lambda p, t: (p[0], t[0]))


@jax.custom_vjp
def own_vjp(x):
    return x


own_vjp.defvjp(lambda x: (x, None), lambda _, ct: (ct,))


@pytest.mark.parametrize(
    "operation",
    [
        jax.lax.sin,
        jax.jit(lambda x: x + 1),
        lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=2)[0],
        jax.checkpoint(lambda x: x * 2),
        own_jvp,
        own_vjp,
    ],
    ids=["primitive", "jit", "scan", "checkpoint", "custom_jvp", "custom_vjp"],
)
def test_each_kind_of_operation_is_recorded_once(operation):
    listener, x = Listener(), jnp.float32(2)

    with recorded(listener):
        inside = operation(x)

    assert listener.counts == [1]
    assert inside == operation(x)


def test_after_a_recording_jax_is_as_before():
    with take_current_trace() as before:
        pass
    with recorded(Listener()), take_current_trace() as during:
        pass
    with take_current_trace() as after:
        pass

    assert after is before
    assert _jax_private.surrounding(during) is before


def test_ordered_effects_pass_through_every_transformation():
    order = _jax_private.ordered_effect()

    assert str(order) == "ReplicaOrder"
    assert _jax_private.ordered_effect() is order
    assert hasattr(importlib.import_module("jax._src.callback"), "_callback_op_sharding")
    assert hasattr(jax.interpreters.mlir, "emit_python_callback")


def test_variables_pass_as_arrays_in_this_jax_and_asking_starts_no_device():
    ended = run_fresh("""
        import replicax as rx
        from replicax._src.compat import jax as _jax_private
        print(_jax_private._reads_objects(), _jax_private.backend_is_initialized())
    """)

    assert ended.stdout.split() == ["True", "False"], ended.stderr


@pytest.mark.parametrize("broken", ["numbers_only", "no_table"])
def test_a_jax_that_would_keep_a_variables_first_value_refuses_variables(broken):
    change = {
        "numbers_only": "dtypes.canonicalize_value_handlers = {}",  # nobody asks this table
        "no_table": "del core.pytype_aval_mappings",
    }[broken]
    ended = run_fresh(f"""
        import jax, jax.numpy as jnp
        from jax._src import core, dtypes
        table = getattr(core, "pytype_aval_mappings")
        {change}
        from replicax._src.compat import jax as _jax_private
        class Kind:
            pass
        _jax_private.accept_as_array(Kind, lambda k: None, lambda k: None)
        print(_jax_private._reads_objects(), Kind in table)
    """)

    assert ended.stdout.split() == ["False", "False"], ended.stderr
    assert "variable.value()" in ended.stderr


def test_programs_are_written_as_replicax_writes_them():
    write = importlib.import_module("jax._src.compiler")._cache_write
    put = importlib.import_module("jax._src.compilation_cache").put_executable_and_time

    given = list(inspect.signature(write).parameters)
    assert given[:5] == ["cache_key", "compile_time_secs", "module_name", "backend", "executable"]
    taken = list(inspect.signature(put).parameters)
    assert taken == ["cache_key", "module_name", "executable", "backend", "compile_time"]


def test_an_array_and_a_tracer_have_room_for_a_method():
    plain = jnp.ones(2)
    _jax_private.give_assign(plain, lambda: 3)
    found = []

    def function(x):
        _jax_private.give_assign(x, lambda: 4)
        found.append(x.assign())
        return jnp.sin(x)

    jax.jit(function)(jnp.ones(2))
    jax.grad(function)(1.0)
    jax.vmap(function)(jnp.ones(2))

    assert (plain.assign(), found) == (3, [4, 4, 4])
    assert not _jax_private._assigns, "what was traced is forgotten"
    assert not jax.eval_shape(lambda x: jnp.zeros(int(hasattr(x, "assign"))), plain).size


def test_the_coordination_service_can_be_had_without_jax():
    # By the process that keeps it, which must be small. The launcher is without JAX, too, and the
    # hub loads not even jaxlib.
    result = run_fresh("""
        import sys
        from replicax_command import _enter_without_init
        _enter_without_init("replicax")
        from replicax._src.workers import keeper as _keeper, wire as _wire
        assert not {"jax", "jaxlib"} & set(sys.modules)
        service, address = _keeper._start_service("127.0.0.1", 1, None, 0)
        assert service is not None
        assert "jax" not in sys.modules
        client = _keeper.jaxlib.connected_client(address, 0, 10)
        client.shutdown()
    """)

    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "settings", [_jax_private.settings, lambda: _jax_private._public_settings(jax.config)]
)
def test_settings_that_a_trace_bakes_in_tell_programs_apart(settings):
    plain = settings()

    for other in (jax.default_matmul_precision("highest"), jax.enable_x64(True)):
        with other:
            assert hash(settings()) is not None
            assert settings() != plain
    assert settings() == plain


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_are_put_are_described_as_jax_does_under_the_mesh_that_is_set(kind):
    devices = jax.devices()[:2]
    mesh = Mesh(np.asarray(devices), ("replica",), axis_types=(kind,))
    rows = [np.full((1, 3), number, np.float32) for number in range(2)]

    def put():
        return _jax_private.put_rows(rows, NamedSharding(mesh, PartitionSpec("replica")), devices)

    before = put()
    with jax.set_mesh(mesh):
        assert put().aval == jax.core.ShapedArray((2, 3), np.dtype("float32"))
    assert put().aval == before.aval == jax.core.ShapedArray((2, 3), np.dtype("float32"))
    assert put().tolist() == [[0, 0, 0], [1, 1, 1]]
