"""rx.function: what is traced when, methods, nesting, errors, threads."""

import gc
import inspect
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax._src.base.errors import TracingError, VariableError


def traces(f):
    return f.experimental_get_tracing_count()


def test_the_body_runs_once_for_a_signature():
    bodies = []

    @rx.function
    def f(x):
        bodies.append(x.shape)
        return x + 1

    results = [f(x).tolist() for x in (jnp.ones(2), jnp.zeros(2), np.ones(3, np.float32))]

    assert results == [[2, 2], [1, 1], [2, 2, 2]]
    assert bodies == [(2,), (3,)]
    assert traces(f) == 2


def test_reads_and_writes_keep_their_order():
    v = rx.Variable(1.0)

    @rx.function
    def f():
        seen = [v.read_value()]
        v.assign(v * 3)
        seen.append(v.read_value())
        v.assign_add(1.0)
        return [*seen, v.read_value()]

    assert [float(x) for x in f()] == [1, 3, 4]
    assert [float(x) for x in f()] == [4, 12, 13]


def test_nested_functions_become_part_of_the_outer_one():
    v = rx.Variable(1.0)
    bodies = []

    @rx.function
    def inner(x):
        bodies.append("inner")
        v.assign_add(x)
        return v * 2

    @rx.function
    def outer(x):
        return inner(x) + inner(x)

    assert float(outer(jnp.float32(1))) == 4 + 6
    assert float(outer(jnp.float32(1))) == 8 + 10
    assert (bodies, traces(inner), traces(outer)) == (["inner"] * 2, 0, 1)


class Counter:
    """Has a variable of its own, made by its first call."""

    def __init__(self, start):
        self.start = start
        self.count = None

    @rx.function
    def up(self, by):
        if self.count is None:
            self.count = rx.Variable(self.start)
        self.count.assign_add(by)
        return self.count.read_value()

    @rx.function(input_signature=[rx.TensorSpec([], jnp.float32)])
    def doubled(self, x):
        return x * 2 + self.start


def test_every_object_has_its_own_variables_and_its_own_first_call():
    a, b = Counter(10.0), Counter(20.0)
    by = jnp.float32(1)

    seen = [float(a.up(by)), float(b.up(by)), float(a.up(by)), float(b.up(by))]

    assert seen == [11, 21, 12, 22]
    assert (traces(a.up), traces(b.up)) == (1, 1)


def test_a_method_takes_an_input_signature():
    assert float(Counter(1.0).doubled(3.0)) == 7.0
    assert float(Counter(1.0).doubled(x=3.0)) == 7.0


def test_a_new_object_at_the_address_of_an_old_one_is_traced_for_itself():
    seen = set()
    for start in range(4):
        counter = Counter(float(start))
        seen.add(float(counter.up(jnp.float32(0))))
        del counter
        gc.collect()

    assert seen == {float(i) for i in range(4)}


def test_a_function_keeps_no_object_alive():
    counter = Counter(1.0)
    counter.up(jnp.float32(1))
    gone = weakref.ref(counter)

    del counter
    gc.collect()

    assert gone() is None


def test_many_objects_do_not_count_as_retracing(caplog):
    for _ in range(7):
        Counter(1.0).up(jnp.float32(1))

    assert caplog.records == []


def test_traces_for_other_devices_do_not_count_as_retracing(caplog):
    f = rx.function(lambda x: x * 2)
    for _ in range(7):
        f(jnp.ones(2))
        f.forget_programs()  # a resize of an elastic run

    assert f.experimental_get_tracing_count() == 7
    assert caplog.records == []


def test_retracing_again_and_again_is_reported_once_with_the_reason(caplog):
    f = rx.function(lambda x, n: x * n)

    with caplog.at_level(logging.WARNING, "replicax"):
        for n in range(8):
            f(jnp.ones(2), n)

    (record,) = caplog.records
    text = record.getMessage()
    assert "traced 6 times" in text
    assert "argument 'n' changed from the Python value 4 to the Python value 5" in text
    assert "jnp.asarray(x)" in text


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            [((jnp.ones(n),), {}) for n in range(1, 7)],
            "argument 'x' changed from an array of shape (5,) and dtype float32 to an array of"
            " shape (6,) and dtype float32",
        ),
        (
            [((), {"x": {"a": [n]}}) for n in range(6)],
            "argument 'x'['a'][0] changed from the Python value 4 to the Python value 5",
        ),
        ([(([1.0] * n,), {}) for n in range(6)], "structure of the arguments changed from"),
        ([((n / 2,), {}) for n in range(6)], "from the Python value 2.0 to the Python value 2.5"),
    ],
    ids=["shape", "nested", "structure", "float"],
)
def test_the_reason_names_what_changed(caplog, calls, words):
    f = rx.function(lambda x: 0)

    for args, kwargs in calls:
        f(*args, **kwargs)

    assert words in caplog.records[0].getMessage()


def test_reduce_retracing_keeps_quiet(caplog):
    f = rx.function(lambda n: jnp.ones(()) * n, reduce_retracing=True)

    for n in range(8):
        f(n)

    assert caplog.records == []


def test_variables_may_be_made_by_the_first_call_only():
    f = rx.function(lambda n: rx.Variable(1.0, name="again").read_value() * n)

    with pytest.raises(VariableError, match=r"'again:0'.*not its first.*if self\.v is None"):
        f(1)

    made = []

    @rx.function
    def g(n):
        if n != 1:
            made.append(rx.Variable(1.0, name="late"))
        return jnp.ones(())

    g(1)
    with pytest.raises(ValueError, match="'late:0'"):
        g(2)


def test_an_exception_in_the_body_changes_nothing_and_the_function_stays_usable():
    v = rx.Variable(1.0)
    fail = [True]

    @rx.function
    def f(x):
        v.assign_add(x)
        if fail[0]:
            raise KeyError("of the user")
        return v.read_value()

    with pytest.raises(KeyError, match="of the user"):
        f(jnp.float32(1))
    assert float(v) == 1.0
    assert rx.function(lambda: v + 1)() == 2.0

    fail[0] = False
    assert float(f(jnp.float32(1))) == 2.0
    assert traces(f) == 1


def test_a_call_that_fails_while_it_runs_leaves_the_variables_as_they_were(caplog):
    fail = [False]
    v = rx.Variable(jnp.zeros(3))

    def check(x):
        if fail[0]:
            raise ValueError("bad batch")
        return x

    @rx.function
    def step():
        v.assign_add(jnp.ones(3))
        return jax.pure_callback(check, jax.ShapeDtypeStruct((3,), jnp.float32), v.read_value())

    step()
    step()
    fail[0] = True
    with pytest.raises(Exception, match="bad batch"):
        jax.block_until_ready(step())

    assert v.numpy().tolist() == [2.0] * 3
    fail[0] = False
    assert step().tolist() == [3.0] * 3


@pytest.mark.parametrize(
    "body",
    [
        lambda x: 1 if x > 0 else 2,
        lambda x: float(x),
        lambda x: list(range(x.astype(int))),
        lambda x: np.sin(np.asarray(x)),
        lambda x: rx.Variable(1.0).assign(x).numpy(),
    ],
    ids=["if", "float", "range", "numpy", "variable"],
)
def test_python_that_needs_a_value_is_told_what_to_write(body):
    with pytest.raises(TracingError, match=r"needs the value.*rx\.cond.*jnp\.where") as info:
        rx.function(body)(jnp.float32(1))

    assert isinstance(info.value, TypeError)


def test_an_if_on_the_replica_is_told_to_use_cond(two):
    def step():
        if rx.distribute.get_replica_context().replica_id_in_sync_group == 0:
            return 1
        return 2

    with pytest.raises(TracingError, match=r"replica id.*rx\.cond"):
        rx.function(lambda: two.run(step))()


def test_a_tracer_that_leaked_is_named_where_it_is_used():
    kept = ContextVar("kept")  # nothing leads there from the function

    @rx.function
    def leaky(x):
        kept.set(x * 2)
        return x

    leaky(jnp.float32(1))
    box = [kept.get()]
    v = rx.Variable(1.0)

    @rx.function
    def user(x):
        return x + box[0]

    with pytest.raises(TracingError, match=r"user uses a value.*leaked out.*rx\.Variable"):
        user(jnp.float32(1))
    with pytest.raises(TracingError, match="leaked out"):
        rx.function(lambda x: x + 1)(box[0])
    with pytest.raises(TracingError, match="exists only in the trace"):
        v.assign(box[0])
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaky at .*test_function\.py"):
        box[0] + 1


@pytest.mark.parametrize("called_before", [False, True], ids=["first", "later"])
def test_a_function_is_transparent_to_grad_and_vmap(called_before):
    v = rx.Variable(3.0)
    f = rx.function(lambda x: x * x * v)
    if called_before:
        f(jnp.float32(1))

    assert float(jax.grad(f)(jnp.float32(2))) == 12.0
    assert jax.vmap(f)(jnp.arange(3.0)).tolist() == [0, 3, 12]
    v.assign(1.0)
    assert float(jax.grad(f)(jnp.float32(2))) == 4.0


@pytest.mark.parametrize("called_before", [False, True], ids=["first", "later"])
def test_jit_around_a_function_with_variables_is_refused(called_before):
    v = rx.Variable(3.0, name="kept")
    f = rx.function(lambda x: x * v)
    if called_before:
        f(jnp.float32(1))

    with pytest.raises(TracingError, match=r"'kept'.*@rx\.function"):
        jax.jit(lambda x: f(x))(jnp.float32(2))
    with pytest.raises(TracingError, match=r"'kept'.*@rx\.function"):
        jax.jit(lambda: f(jnp.float32(1)))()
    assert float(jax.jit(rx.function(lambda x: x * 2))(jnp.float32(2))) == 4.0


@pytest.mark.parametrize("called_before", [False, True], ids=["first", "later"])
def test_a_write_under_grad_is_refused_and_stores_no_tracer(called_before):
    v = rx.Variable(3.0)

    @rx.function
    def f(x):
        v.assign(x)
        return x * x

    if called_before:
        f(jnp.float32(7))
    before = float(v)

    with pytest.raises(TracingError):
        jax.grad(f)(jnp.float32(2))

    assert float(v) == before
    assert float(f(jnp.float32(4))) == 16.0


def test_two_strategies_in_one_function_are_refused(two, four):
    with pytest.raises(TracingError, match=r"two sets of replicas.*2 dev.*4 dev.*one strategy"):
        rx.function(lambda: (two.run(lambda: jnp.ones(())), four.run(lambda: jnp.ones(()))))()


def test_a_function_that_writes_another_strategys_variable_is_refused(two):
    one = rx.distribute.OneDeviceStrategy("CPU:3")
    with one.scope():
        v = rx.Variable(1.0, name="far")

    @rx.function
    def f():
        x = two.run(lambda: jnp.ones(()))
        v.assign(5.0)
        return x

    with pytest.raises(RuntimeError, match="'far'"):
        f()
    assert float(v) == 1.0


def in_threads(count, work):
    with ThreadPoolExecutor(count) as pool:
        for task in [pool.submit(work) for _ in range(count)]:
            task.result()


def test_two_threads_that_call_first_trace_once():
    v = rx.Variable(jnp.zeros(4))
    start = threading.Barrier(4)
    bodies = []

    @rx.function
    def f(x):
        bodies.append(threading.current_thread().name)
        v.assign_add(x)
        return v.read_value()

    def work():
        start.wait()
        for _ in range(25):
            f(jnp.ones(4))

    in_threads(4, work)

    assert (len(bodies), traces(f)) == (1, 1)
    assert v.numpy().tolist() == [100.0] * 4


def test_two_functions_in_two_threads_share_a_variable():
    v = rx.Variable(jnp.zeros(4))

    def work():
        f = rx.function(lambda: v.assign_add(jnp.ones(4)).read_value())
        for _ in range(25):
            f()

    in_threads(3, work)

    assert v.numpy().tolist() == [75.0] * 4


def test_a_concrete_function_is_compiled_from_specs():
    f = rx.function(lambda x, n: x * n)
    g = f.get_concrete_function(rx.TensorSpec([2], jnp.float32), 3)

    assert g(jnp.ones(2), 3).tolist() == [3, 3]
    assert traces(f) == 1
    assert "multiply" in g.as_text()
    ((spec, n), kwargs) = g.structured_input_signature
    assert (spec.shape, spec.dtype, n, kwargs) == ((2,), jnp.float32, 3, {})


def test_unknown_options_are_refused_and_tensorflows_accepted():
    with pytest.raises(TypeError, match="no option jit_compiled"):
        rx.function(lambda: 0, jit_compiled=True)
    with pytest.raises(TypeError, match="needs a function, got 3"):
        rx.function(3)

    f = rx.function(jit_compile=True, autograph=False, experimental_relax_shapes=True)(lambda x: x)
    assert float(f(jnp.float32(1))) == 1.0


@dataclass(frozen=True)
class Options:
    """An argument that is equal by value."""

    scale: int


def test_the_default_strategy_and_a_scope_are_traced_apart(two):
    seen = []
    f = rx.function(lambda: seen.append(rx.distribute.get_strategy().num_replicas_in_sync))

    f()
    with two.scope():
        f()
        f()

    assert seen == [1, 2]


def test_objects_that_are_equal_by_value_share_a_trace():
    f = rx.function(lambda o, x: x * o.scale)

    seen = [float(f(Options(n), jnp.float32(2))) for n in (3, 3, 4)]

    assert (seen, traces(f)) == ([6, 6, 8], 2)


def test_objects_whose_class_has_no_text_as_module():
    class Odd:
        scale = 2.0

    Odd.__module__ = property(lambda self: "odd")  # as classes of TensorFlow's C++ code
    odd = Odd()

    assert float(rx.function(lambda x: x * odd.scale)(jnp.ones(()))) == 2.0


def test_a_compiled_method_has_the_signature_of_the_bound_one():
    class Model:
        @rx.function
        def call(self, x, training=False):
            return x if training else -x

    assert str(inspect.signature(Model().call)) == "(x, training=False)"
    assert Model().call.__name__ == "call"


def test_an_input_signature_covers_defaults():
    class Model:
        @rx.function(input_signature=[rx.TensorSpec([2]), rx.TensorSpec([], "int32")])
        def call(self, x, times=3):
            return x * times

    @rx.function(input_signature=[rx.TensorSpec([2]), rx.TensorSpec([], "int32")])
    def call(x, times=3, unused=None):
        return x * times

    for each in (call, Model().call):
        assert each(jnp.ones(2)).tolist() == [3, 3]
        assert each(jnp.ones(2), times=2).tolist() == [2, 2]
        assert each(jnp.ones(2), 4).tolist() == [4, 4]


def test_get_concrete_function_refuses_texts():
    same = rx.function(lambda x: x)

    with pytest.raises(TypeError, match="no compiled program for these arguments: texts"):
        same.get_concrete_function(np.asarray(["a"]))
