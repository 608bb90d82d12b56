"""The gradient tape: TensorFlow's answers, in and out of functions and replicas."""

import contextlib
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.golden import tape_cases, tape_programs
from tests.golden.tape_cases import PROGRAMS, variables_of
from tests.replicas import WAYS, compiled, context, eagerly, mirrored

ANSWERS = json.loads(Path(__file__).parents[1].joinpath("golden", "tape.json").read_text())
LIBRARY = SimpleNamespace(
    GradientTape=rx.GradientTape,
    Variable=rx.Variable,
    UnconnectedGradients=rx.UnconnectedGradients,
    constant=jnp.asarray,
    matmul=jnp.matmul,
    reduce_mean=jnp.mean,
    reduce_sum=jnp.sum,
    sin=jnp.sin,
    tanh=jnp.tanh,
    sigmoid=jax.nn.sigmoid,
    cond=rx.cond,
    cast=lambda x, dtype: x.astype(dtype),
    stop_gradient=jax.lax.stop_gradient,
    complex=lambda a, b: jnp.asarray(a + 1j * b, jnp.complex64),
    abs=jnp.abs,
    real=jnp.real,
    parts=lambda z: [z.real, z.imag],
)


def plainly(fn):
    return fn()


def in_a_function(fn):
    return rx.function(fn)()


def is_leaf(x):
    return x is None or isinstance(x, rx.distribute.DistributedValues)


def assert_answers(found, name):
    expected = jax.tree.leaves(ANSWERS[name], is_leaf=is_leaf)
    leaves = jax.tree.leaves(found, is_leaf=is_leaf)
    listed = [x if x is None else np.asarray(x).tolist() for x in leaves]
    own = jax.tree.leaves(listed, is_leaf=is_leaf)
    assert [x is None for x in own] == [x is None for x in expected]
    for x, y in zip(own, expected, strict=True):
        if x is not None:
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


class TestTensorFlowsPrograms:
    @pytest.mark.parametrize("way", [plainly, in_a_function])
    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
    def test_gives_tensorflows_gradients(self, program, way):
        variables = variables_of(program, LIBRARY)

        assert_answers(way(lambda: program(LIBRARY, *variables)), program.__name__)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "program",
        [tape_cases.second_order, tape_cases.assigned_to_itself, tape_cases.stopped],
        ids=lambda p: p.__name__,
    )
    def test_gives_them_in_every_replica(self, program, way, two):
        with two.scope():
            variables = variables_of(program, LIBRARY)

        found = way(two, lambda: program(LIBRARY, *variables))

        leaves = jax.tree.leaves(found, is_leaf=is_leaf)
        for i in range(2):
            own = [x if x is None else x.values[i] for x in leaves]
            assert_answers(own, program.__name__)


RANDOM_ANSWERS = json.loads(
    Path(__file__).parents[1].joinpath("golden", "tape_programs.json").read_text()
)
# JAX returns the array that it was given for an identity; every value here is one of its own.
RANDOM_LIBRARY = SimpleNamespace(
    **{**vars(LIBRARY), "stop_gradient": lambda x: jax.lax.stop_gradient(jnp.copy(x))},
    negative=jnp.negative,
    identity=jnp.copy,
    halves=lambda x: jnp.split(x, 2),
    joined=lambda a, b: jnp.concatenate([a, b]),
    where=jnp.where,
    function=rx.function,
)


class TestRandomPrograms:
    """Nested, persistent, stopped and reset tapes, and TensorFlow's answers."""

    def _assert_answers(self, seed, found):
        expected = RANDOM_ANSWERS[seed]
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            if isinstance(ours, str) or isinstance(theirs, str):
                assert ours == theirs
                continue
            assert [x is None for x in ours] == [x is None for x in theirs]
            for x, y in zip(ours, theirs, strict=True):
                if x is not None:
                    np.testing.assert_allclose(x, y, rtol=2e-4, atol=1e-4)

    @pytest.mark.parametrize("seeds", [range(i, i + 25) for i in range(0, 400, 25)], ids=repr)
    def test_gives_tensorflows_gradients(self, seeds):
        for seed in seeds:
            run = tape_programs.Run(RANDOM_LIBRARY, tape_programs.variables_of(RANDOM_LIBRARY))
            self._assert_answers(seed, run.block(tape_programs.made(seed)).answers)

    @pytest.mark.parametrize("seed", range(0, 400, 25))
    def test_gives_them_in_a_function(self, seed):
        variables = tape_programs.variables_of(RANDOM_LIBRARY)
        errors = []

        @rx.function
        def program():
            run = tape_programs.Run(RANDOM_LIBRARY, variables)
            answers = run.block(tape_programs.made(seed)).answers
            errors[:] = [isinstance(one, str) for one in answers]
            return [[] if isinstance(one, str) else one for one in answers]

        found = program()
        self._assert_answers(
            seed, ["error" if e else one for e, one in zip(errors, found, strict=True)]
        )


class TestZeros:
    """Zeros for unconnected sources, with TensorFlow's answers for the same programs."""

    @pytest.mark.parametrize(
        ("source", "is_followed"),
        [("variable", True), ("not read", True), ("frozen", False), ("computed", True),
         ("constant", False), ("stopped", False)],
    )  # fmt: skip
    @pytest.mark.parametrize("compile_it", [False, True])
    def test_zeros_are_followed_where_their_source_is(self, source, is_followed, compile_it):
        v, frozen = rx.Variable([1.0, 2.0]), rx.Variable([1.0, 2.0], trainable=False)
        constant = jnp.asarray([1.0, 2.0])

        def program():
            with rx.GradientTape(persistent=True) as tape:
                computed = v * 2 if source != "not read" else None
                sources = {"computed": computed, "constant": constant, "frozen": frozen}
                asked = constant + 1, sources.get(source, v)
                with tape.stop_recording() if source == "stopped" else contextlib.nullcontext():
                    zeros = tape.gradient(*asked, unconnected_gradients="zero")
                y = zeros + 1
            return zeros, tape.gradient(y, zeros), tape.gradient(y, v)

        zeros, of_zeros, of_variable = (rx.function(program) if compile_it else program)()

        assert zeros.tolist() == [0.0, 0.0]
        assert (None if of_zeros is None else of_zeros.tolist()) == (
            [1.0, 1.0] if is_followed else None
        )
        assert of_variable is None

    def test_an_outer_tape_follows_zeros_too(self):
        v = rx.Variable([1.0, 2.0])
        with rx.GradientTape() as outer, rx.GradientTape() as inner:
            computed = v * 2
            zeros = inner.gradient(jnp.ones(2), computed, unconnected_gradients="zero")
            y = zeros * 3
        assert outer.gradient(y, zeros).tolist() == [3.0, 3.0]


class TestReplicas:
    @pytest.mark.parametrize("way", WAYS)
    def test_follows_all_reduce_and_stops_at_merge_call(self, way, two):
        """TensorFlow's answers for the same program, eager and as a tf.function."""
        with two.scope():
            v = rx.Variable(3.0)

        def step(x):
            with rx.GradientTape(persistent=True) as tape:
                y = v * v * x
                total = context().all_reduce("SUM", y)
                square = total * total
                merged = context().merge_call(lambda s, q: s.reduce("SUM", q, axis=None), (y,))
                handed = context().merge_call(lambda s, q: q, (y,))
                mixed = merged * 2 + y
            return [tape.gradient(t, v) for t in (total, square, merged, handed, mixed)]

        x = two.experimental_distribute_values_from_function(
            lambda c: jnp.float32(c.replica_id_in_sync_group + 1)
        )
        total, square, merged, handed, mixed = way(two, step, x)

        assert [float(g) for g in total.values] == [12.0, 24.0]
        assert [float(g) for g in square.values] == [648.0, 1296.0]
        assert merged is None
        assert handed is None
        assert [float(g) for g in mixed.values] == [6.0, 12.0]

    @pytest.mark.parametrize(("way", "count"), [(eagerly, 2), *((compiled, n) for n in (1, 2, 4))])
    def test_gives_one_devices_gradients_on_any_number_of_replicas(self, way, count):
        strategy = mirrored(count)
        rows = np.linspace(-1, 1, 24).reshape(8, 3).astype("float32")
        batch = strategy.experimental_distribute_values_from_function(
            lambda c: jnp.asarray(rows[c.replica_id_in_sync_group :: count])
        )
        start = np.full((3, 2), 0.25, "float32")
        with strategy.scope():
            w = rx.Variable(start)
            seen = rx.Variable(jnp.zeros(2), False, aggregation=rx.VariableAggregation.MEAN)

        def step(x):
            with rx.GradientTape() as tape:
                h = jnp.tanh(x @ w)
                seen.assign(h.mean(0))  # of what depends on the weights, as in batch normalization
                loss = rx.nn.compute_average_loss((h**2).sum(1), global_batch_size=8)
            return context().all_reduce("SUM", tape.gradient(loss, w))

        (gradient, *_) = strategy.experimental_local_results(way(strategy, step, batch))

        one = jax.grad(lambda w: (jnp.tanh(rows @ w) ** 2).sum(1).mean())(jnp.asarray(start))
        np.testing.assert_allclose(gradient, one, rtol=1e-5)
        np.testing.assert_allclose(seen.numpy(), np.tanh(rows @ start).mean(0), atol=1e-6)

    @pytest.mark.parametrize("way", [plainly, in_a_function])
    def test_refuses_a_run_inside_a_tape(self, way, two):
        def around():
            with rx.GradientTape():
                two.run(lambda: jnp.ones(()))

        with pytest.raises(rx.errors.ScopeError, match="inside the replica function"):
            way(around)

    @pytest.mark.parametrize("way", [plainly, in_a_function])
    def test_allows_a_run_while_no_tape_records(self, way, two):
        v = rx.Variable(3.0)

        def around():
            with rx.GradientTape() as tape:
                y = v * v
                with tape.stop_recording():
                    n = two.reduce("SUM", two.run(lambda: jnp.ones(())), axis=None)
            return tape.gradient(y, v), n

        gradient, n = way(around)

        assert (float(gradient), float(n)) == (6.0, 2.0)


class TestCompiled:
    def test_costs_what_value_and_grad_costs(self, two):
        with two.scope():
            layers = [rx.Variable(np.full((32, 32), 0.01, "float32")) for _ in range(4)]
        x = two.experimental_distribute_values_from_function(lambda c: jnp.ones((16, 32)))

        def loss_of(x):
            for w in layers:
                x = jax.nn.relu(x @ w)
            return (jax.nn.log_softmax(x) ** 2).mean()

        def with_tape(x):
            with rx.GradientTape() as tape:
                loss = loss_of(x)
            return apply(tape.gradient(loss, layers))

        def without(x):
            return apply(rx.value_and_grad(loss_of, layers)(x)[1])

        def apply(gradients):
            for w, g in zip(layers, context().all_reduce("SUM", gradients), strict=True):
                w.assign_sub(0.1 * g)

        def cost(step):
            whole = rx.function(lambda x: two.run(step, args=(x,)))
            program = whole.get_concrete_function(x)
            built = program._program.lowered(program._arguments.arrays).compile()
            found, text = built.cost_analysis(), built.as_text()
            kinds = ("dot(", "fusion(", "all-reduce(", "copy(", "exponential(", "tanh(")
            return found["flops"], found["bytes accessed"], {k: text.count(k) for k in kinds}

        assert cost(with_tape) == cost(without)

    def test_a_variable_that_only_a_branch_reads_has_a_gradient(self):
        v = rx.Variable(2.0)

        @rx.function
        def step(x):
            with rx.GradientTape() as tape:
                y = rx.cond(x > 0, lambda: v * v * x, lambda: x)
                _, (ys, _) = rx.scan(lambda c, i: (c, (v * i, c)), 0, jnp.arange(3.0))
                z = y + ys.sum()
            return tape.gradient(z, v)

        assert float(step(jnp.float32(3.0))) == 15.0
        assert float(step(jnp.float32(-3.0))) == 3.0

    def test_an_eager_tape_looks_into_a_function(self):
        v = rx.Variable(2.0)
        double = rx.function(lambda x: v * x)

        with rx.GradientTape() as tape:
            y = double(jnp.float32(3.0))

        assert float(tape.gradient(y, v)) == 3.0

    def test_value_and_grad_inside_a_tape_is_differentiated_again(self):
        v, w = rx.Variable(3.0), rx.Variable(2.0)

        with rx.GradientTape() as tape:
            _, gradient = rx.value_and_grad(lambda: v * v * v * w, v)()

        assert [float(g) for g in tape.gradient(gradient, [v, w])] == [36.0, 27.0]


class TestFunctionsOfJax:
    def test_follows_arrays_that_a_jitted_function_closed_over(self):
        x = jnp.float32(3.0)

        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * 2
            z = jax.jit(lambda u: y * u)(jnp.float32(5.0))

        assert float(tape.gradient(z, x)) == 10.0

    def test_follows_variables_where_jax_takes_arrays(self):
        v = rx.Variable([1.0, 2.0])

        with rx.GradientTape() as tape:
            y = jnp.sum(v) + jnp.dot(v, v)

        assert tape.gradient(y, v).tolist() == [3.0, 5.0]

    def test_an_array_that_is_returned_twice_has_one_gradient(self):
        x = jnp.float32(3.0)
        twice = jax.jit(lambda u: (u * u, u * u, u))

        for way in (plainly, in_a_function):

            def both():
                with rx.GradientTape() as tape:
                    tape.watch(x)
                    a, b, c = twice(x)
                    y = a + b + c
                return tape.gradient(y, x)

            assert float(way(both)) == 13.0

    def test_own_derivatives_are_used_also_a_second_time(self):
        @jax.custom_jvp
        def f(x):
            return x**2

        f.defjvp(lambda p, t: (f(p[0]), 10.0 * p[0] * t[0]))

        @jax.custom_vjp
        def g(x):
            return x**2

        g.defvjp(lambda x: (g(x), x), lambda x, ct: (7.0 * x * ct,))
        x = jnp.float32(3.0)

        for fn, first, second in ((f, 30.0, 10.0), (g, 21.0, 7.0)):
            with rx.GradientTape(persistent=True) as tape:
                tape.watch(x)
                y = fn(x)
                d = tape.gradient(y, x)

            assert float(d) == first
            assert float(tape.gradient(d, x)) == second

    def test_refuses_own_derivatives_that_hide_what_is_followed(self):
        v = rx.Variable(2.0)

        @jax.custom_jvp
        def f(x):
            return x * v

        f.defjvp(lambda p, t: (p[0] * v, t[0] * v))

        with rx.GradientTape(), pytest.raises(rx.errors.TracingError, match="as an argument"):
            f(v * 1.0)

    def test_follows_shard_map(self):
        x = jnp.arange(4.0)
        mesh = jax.sharding.Mesh(jax.devices()[:2], ("i",))
        spec = jax.sharding.PartitionSpec("i")
        square = jax.shard_map(lambda u: u * u, mesh=mesh, in_specs=spec, out_specs=spec)

        with rx.GradientTape() as tape:
            tape.watch(x)
            y = square(x)

        assert tape.gradient(y, x).tolist() == [0.0, 2.0, 4.0, 6.0]

    def test_scan_vmap_and_checkpoint(self):
        x = jnp.float32(2.0)

        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            a, _ = jax.lax.scan(lambda c, i: (c * x, i), jnp.float32(1.0), jnp.arange(3))
            b = jax.vmap(lambda i: x * i)(jnp.arange(3.0)).sum()
            c = jax.checkpoint(lambda u: jnp.sin(u) * x)(x)

        assert float(tape.gradient(a, x)) == 12.0
        assert float(tape.gradient(b, x)) == 3.0
        np.testing.assert_allclose(tape.gradient(c, x), np.sin(2) + 2 * np.cos(2), rtol=1e-6)


class TestUse:
    def test_only_a_persistent_tape_answers_twice(self):
        x = jnp.float32(2.0)
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = x * x

        assert float(tape.gradient(y, x)) == 4.0
        with pytest.raises(RuntimeError, match=r"one set of gradients \(or jacobians\)"):
            tape.gradient(y, x)

    def test_refuses_what_tensorflow_refuses(self):
        x = jnp.float32(2.0)
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = x * x
            with pytest.raises(ValueError, match="still recording"):
                tape.__enter__()

        with pytest.raises(RuntimeError, match="not recording"), tape.stop_recording():
            pass
        with pytest.raises(ValueError, match="not recording"):
            tape.reset()
        with pytest.raises(ValueError, match="of type 'float'"):
            tape.watch(1.0)
        with pytest.raises(TypeError, match="got None"):
            tape.gradient(None, x)
        with pytest.raises(ValueError, match="unconnected_gradients: 'other'"):
            tape.gradient(y, x, unconnected_gradients="other")
        with pytest.raises(TypeError, match="with respect to"):
            tape.gradient(y, 2.0)
        with pytest.raises(ValueError, match="output_gradients"):
            tape.gradient(y, x, output_gradients=[1.0, 2.0])
        with pytest.raises(ValueError, match="first dimension"):
            tape.batch_jacobian(jnp.ones((2, 3)), jnp.ones((3, 3)))

    def test_continues_recording_when_it_is_entered_again(self):
        v = rx.Variable(3.0)
        tape = rx.GradientTape()
        with tape:
            y = v * v
        with tape:
            z = y * y

        assert float(tape.gradient(z, v)) == 108.0

    def test_names_the_variables_that_it_watches(self):
        v, w = rx.Variable(1.0, name="v"), rx.Variable(1.0, trainable=False, name="w")
        with rx.GradientTape() as tape:
            y = v * w

        assert tape.watched_variables() == (v,)
        tape.gradient(y, v)
        assert tape.watched_variables() == (v,)

    def test_keeps_nothing_once_it_has_answered(self):
        x = jnp.arange(5.0)
        with rx.GradientTape() as tape:
            tape.watch(x)
            y = jnp.sin(x)
            z = (y * y).sum()
        kept = weakref.ref(y)
        del y

        tape.gradient(z, x)

        gc.collect()
        assert kept() is None

    def test_an_error_inside_leaves_nothing_open(self):
        with pytest.raises(ZeroDivisionError), rx.GradientTape():
            raise ZeroDivisionError

        assert rx.function(lambda x: x + 1)(jnp.int32(1)) == 2
        assert not rx.GradientTape().watched_variables()

    def test_one_row_after_the_other_gives_the_same_jacobian(self):
        x = jnp.asarray([1.0, 2.0, 3.0])
        with rx.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = jnp.sin(x) * x.sum()

        slowly = tape.jacobian(y, x, experimental_use_pfor=False)

        np.testing.assert_allclose(tape.jacobian(y, x), slowly, rtol=1e-6)
        np.testing.assert_allclose(
            slowly, jax.jacobian(lambda x: jnp.sin(x) * x.sum())(x), rtol=1e-6
        )

    def test_datasets_are_walked_inside(self):
        w = rx.Variable(2.0)
        dataset = rx.data.Dataset.from_tensor_slices(np.arange(6, dtype="float32")).batch(2)

        with rx.GradientTape() as tape:
            y = (w * next(iter(dataset))).sum()
            for x in dataset:
                y = y + (w * x).sum()

        assert float(tape.gradient(y, w)) == 16.0
