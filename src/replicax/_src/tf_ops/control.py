"""Control flow with TensorFlow's signatures, and functions that belong to its graphs."""

import contextlib
import functools
import sys
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from replicax._src.base.tf_errors import InvalidArgumentError
from replicax._src.functions.control_flow import cond as rx_cond
from replicax._src.functions.control_flow import scan as rx_scan
from replicax._src.functions.control_flow import while_loop as rx_while_loop
from replicax._src.state.levels import is_staging
from replicax._src.tf_ops.core import as_tensor


def cond(pred: Any, true_fn: Any = None, false_fn: Any = None, name: str | None = None) -> Any:
    """Call ``true_fn`` or ``false_fn``, depending on a condition that may be an array.

    Example:
        >>> tf.cond(jnp.float32(2) > 1, lambda: 1.0, lambda: 0.0)
        1.0
    """
    return rx_cond(pred, true_fn, false_fn)


def case(
    pred_fn_pairs: Any,
    default: Any = None,
    exclusive: Any = False,
    strict: Any = False,
    name: str | None = "case",
) -> Any:
    """Call the function paired with the first condition that is true.

    Example:
        >>> tf.case([(False, lambda: 1.0)], default=lambda: 2.0)
        2.0
    """
    pairs = list(pred_fn_pairs.items() if isinstance(pred_fn_pairs, dict) else pred_fn_pairs)
    if default is None:
        *pairs, (_, default) = pairs
    chosen = default
    for pred, fn in reversed(pairs):
        chosen = functools.partial(rx_cond, pred, fn, chosen)
    return chosen()


def switch_case(
    branch_index: Any, branch_fns: Any, default: Any = None, name: str | None = "switch_case"
) -> Any:
    """Call the branch function that ``branch_index`` selects.

    Example:
        >>> tf.switch_case(1, [lambda: 1.0, lambda: 2.0])
        2.0
    """
    pairs: list[Any] = list(
        branch_fns.items() if isinstance(branch_fns, dict) else enumerate(branch_fns)
    )
    if pairs and isinstance(pairs[0][1], tuple):  # a list of pairs of a number and a function
        pairs = [pair for _, pair in pairs]
    last = pairs[-1][1] if default is None else default
    return case([(as_tensor(branch_index) == key, fn) for key, fn in pairs], default=last)


def while_loop(
    cond: Any,
    body: Any,
    loop_vars: Any,
    shape_invariants: Any = None,
    parallel_iterations: Any = 10,
    back_prop: Any = True,
    swap_memory: Any = False,
    maximum_iterations: Any = None,
    name: str | None = None,
) -> Any:
    """Call ``body(*loop_vars)`` while ``cond(*loop_vars)`` is true.

    Example:
        >>> tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), [0])[0]
        Array(3, dtype=int32)
    """
    if not isinstance(loop_vars, (list, tuple)):
        results = while_loop(cond, body, [loop_vars], maximum_iterations=maximum_iterations)
        return results[0] if isinstance(results, (list, tuple)) and len(results) == 1 else results
    start = tuple(jax.tree.map(as_tensor, value) for value in loop_vars)
    most = None if maximum_iterations is None else as_tensor(maximum_iterations)

    def proceeds(state: Any) -> Any:
        turn, values = state
        goes_on = cond(*values)
        return goes_on if most is None else jnp.logical_and(turn < most, goes_on)

    def step(state: Any) -> Any:
        turn, values = state
        results = body(*values)
        results = tuple(results) if isinstance(results, (list, tuple)) else (results,)
        if len(results) != len(values):
            raise InvalidArgumentError(
                f"while_loop: body returned {len(results)} values for {len(values)} loop_vars."
            )
        return turn + 1, jax.tree.map(_like, results, values)

    _, result = rx_while_loop(proceeds, step, (jnp.int32(0), start))
    kind = type(loop_vars)
    return kind(*result) if hasattr(kind, "_fields") else kind(result)


def _like(new: Any, old: Any) -> Any:
    return jnp.asarray(new, getattr(old, "dtype", None))


def scan(
    fn: Any,
    elems: Any,
    initializer: Any = None,
    parallel_iterations: Any = 10,
    back_prop: Any = True,
    swap_memory: Any = False,
    infer_shape: Any = True,
    reverse: Any = False,
    name: str | None = None,
) -> Any:
    """Return the results of ``fn(previous, element)`` for each element.

    Example:
        >>> tf.scan(lambda a, x: a + x, jnp.arange(4))
        Array([0, 1, 3, 6], dtype=int32)
    """
    first, rest = _start(elems, initializer, reverse)

    def step(carry: Any, x: Any) -> Any:
        result = jax.tree.map(_like, fn(carry, x), carry)
        return result, result

    _, results = rx_scan(step, first, rest, reverse=reverse)
    if initializer is not None:
        return results

    def with_first(start: Any, others: Any) -> Any:
        return jnp.concatenate([others, start[None]] if reverse else [start[None], others])

    return jax.tree.map(with_first, first, results)


def _start(elems: Any, initializer: Any, reverse: Any) -> tuple[Any, Any]:
    """Return the initial carry, by default the first element, and the elements that follow."""
    elems = jax.tree.map(as_tensor, elems)
    if initializer is None:
        first, rest = (-1, slice(None, -1)) if reverse else (0, slice(1, None))
        initializer = jax.tree.map(lambda x: x[first], elems)
        elems = jax.tree.map(lambda x: x[rest], elems)
    return jax.tree.map(as_tensor, initializer), elems


def _fold(fn: Any, elems: Any, initializer: Any, reverse: Any) -> Any:
    first, rest = _start(elems, initializer, reverse)
    result, _ = rx_scan(
        lambda c, x: (jax.tree.map(_like, fn(c, x), c), None), first, rest, reverse=reverse
    )
    return result


def foldl(
    fn: Any,
    elems: Any,
    initializer: Any = None,
    parallel_iterations: Any = 10,
    back_prop: Any = True,
    swap_memory: Any = False,
    name: str | None = None,
) -> Any:
    """Fold ``fn`` over the elements, from the first to the last.

    Example:
        >>> tf.foldl(lambda a, x: a + x, jnp.arange(4))
        Array(6, dtype=int32)
    """
    return _fold(fn, elems, initializer, False)


def foldr(
    fn: Any,
    elems: Any,
    initializer: Any = None,
    parallel_iterations: Any = 10,
    back_prop: Any = True,
    swap_memory: Any = False,
    name: str | None = None,
) -> Any:
    """Fold ``fn`` over the elements, from the last to the first.

    Example:
        >>> tf.foldr(lambda a, x: a + x, jnp.arange(4))
        Array(6, dtype=int32)
    """
    return _fold(fn, elems, initializer, True)


def map_fn(
    fn: Any,
    elems: Any,
    dtype: Any = None,
    parallel_iterations: Any = None,
    back_prop: Any = True,
    swap_memory: Any = False,
    infer_shape: Any = True,
    name: str | None = None,
    fn_output_signature: Any = None,
) -> Any:
    """Apply a function to each element along the first axis.

    Example:
        >>> tf.map_fn(lambda x: x * 2, jnp.arange(3))
        Array([0, 2, 4], dtype=int32)
    """
    leaves = jax.tree.leaves(elems)
    if is_staging() or any(isinstance(x, jax.core.Tracer) for x in leaves):
        arrays = jax.tree.map(as_tensor, elems)
        _, results = rx_scan(lambda c, x: (c, fn(x)), jnp.int32(0), arrays)
        return results
    parts = jax.tree.map(as_tensor, elems)
    size = len(jax.tree.leaves(parts)[0])
    results = [fn(jax.tree.map(lambda x, i=i: x[i], parts)) for i in range(size)]
    return jax.tree.map(lambda *xs: _stacked(xs), *results)


def _stacked(values: Any) -> Any:
    arrays = [as_tensor(value) for value in values]
    return (np if isinstance(arrays[0], np.ndarray) else jnp).stack(arrays)


def vectorized_map(
    fn: Any, elems: Any, fallback_to_while_loop: Any = True, warn: Any = True
) -> Any:
    """Apply a function to all elements along the first axis at once.

    Example:
        >>> tf.vectorized_map(lambda x: x * 2, jnp.arange(3))
        Array([0, 2, 4], dtype=int32)
    """
    return jax.vmap(fn)(jax.tree.map(jnp.asarray, elems))


def executing_eagerly() -> Any:
    """Whether operations run at once: False in compiled functions.

    Example:
        >>> tf.executing_eagerly()
        True
    """
    return not is_staging()


def inside_function() -> Any:
    """Whether a function is being compiled.

    Example:
        >>> tf.inside_function()
        False
    """
    return is_staging()


def init_scope() -> Any:
    """Return a null context: variables are always created immediately.

    Example:
        >>> with tf.init_scope():
        ...     x = rx.Variable(1.0)
    """
    return contextlib.nullcontext()


def control_dependencies(control_inputs: Any) -> Any:
    """Return a null context: statements run in program order.

    Example:
        >>> with tf.control_dependencies([1.0]):
        ...     x = 2.0
    """
    return contextlib.nullcontext()


class name_scope(contextlib.ContextDecorator):  # noqa: N801 - TensorFlow's name
    """A name scope for operations, as shown in profiles.

    Example:
        >>> with tf.name_scope("loss") as name:
        ...     name
        'loss/'
    """

    def __init__(self, name: str | None, default_name: Any = None, values: Any = None) -> None:
        self._name = name or default_name or "scope"
        self._inner = contextlib.ExitStack()

    @property
    def name(self) -> Any:
        """The name."""
        return self._name

    def __enter__(self) -> str:
        self._inner.enter_context(jax.named_scope(self._name))
        return f"{self._name}/"

    def __exit__(self, *problem: Any) -> None:
        self._inner.__exit__(*problem)


def group(*inputs: Any, **kwargs: Any) -> None:
    """Do nothing and return None: statements run in program order.

    Example:
        >>> tf.group(1.0)
    """


def no_op(name: str | None = None) -> None:
    """Return None.

    Example:
        >>> tf.no_op()
    """


def print(
    *inputs: Any,
    output_stream: Any = sys.stderr,
    summarize: Any = 3,
    sep: Any = " ",
    end: Any = "\n",
    name: str | None = None,
) -> None:
    """Print values, also from compiled functions; by default to stdout.

    Example:
        >>> tf.print("loss", 1.5)
        loss 1.5
    """
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        stream = sys.stdout if output_stream is sys.stderr else output_stream
        getattr(stream, "write", sys.stdout.write)(sep.join(str(_shown(x)) for x in inputs) + end)
        return
    texts = [
        x.replace("{", "{{").replace("}", "}}") if isinstance(x, str) else "{}" for x in inputs
    ]
    jax.debug.print(sep.join(texts), *(x for x in inputs if not isinstance(x, str)))


def _shown(value: Any) -> Any:
    return np.asarray(value) if hasattr(value, "dtype") else value


def py_function(
    func: Any = None, inp: Any = None, Tout: Any = None, name: str | None = None
) -> Any:
    """Call a Python function on the host; unavailable in compiled functions.

    Example:
        >>> tf.py_function(lambda x: x + 1, [1], jnp.int32)
        2
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inp)):
        raise InvalidArgumentError(
            "py_function: a compiled function cannot call back into Python without the shape of the"
            " result. Write `jax.pure_callback(func, jax.ShapeDtypeStruct(shape, dtype), *inp)`."
        )
    return func(*(inp or ()))


def numpy_function(
    func: Any = None,
    inp: Any = None,
    Tout: Any = None,
    stateful: Any = True,
    name: str | None = None,
) -> Any:
    """Call a function on NumPy values, on the host; unavailable in compiled functions.

    Example:
        >>> tf.numpy_function(lambda x: x + 1, [1], jnp.int32)
        2
    """
    return py_function(func, [_shown(x) for x in inp or ()], Tout)


def custom_gradient(f: Any = None) -> Any:
    """Define the gradient of a function that returns its value and a gradient function.

    Example:
        >>> twice = tf.custom_gradient(lambda x: (x * 2, lambda dy: dy * 10))
        >>> jax.grad(twice)(1.0)
        Array(10., dtype=float32, weak_type=True)
    """
    if f is None:
        return custom_gradient

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = tuple(jax.tree.map(jnp.asarray, arg) for arg in args)

        @jax.custom_vjp
        def run(*xs: Any) -> Any:
            return f(*xs, **kwargs)[0]

        def run_forward(*xs: Any) -> Any:
            return f(*xs, **kwargs)[0], xs

        def run_backward(xs: Any, cotangent: Any) -> Any:
            _, backward = f(*xs, **kwargs)
            flat = cotangent if isinstance(cotangent, (list, tuple)) else (cotangent,)
            gradients = backward(*flat)
            gradients = tuple(gradients) if isinstance(gradients, (list, tuple)) else (gradients,)
            return tuple(
                jnp.zeros_like(x) if g is None else g for g, x in zip(gradients, xs, strict=True)
            )

        run.defvjp(run_forward, run_backward)
        return run(*given)

    return call


def recompute_grad(f: Any) -> Any:
    """Return a function whose values are recomputed in the backward pass, to save memory.

    Example:
        >>> float(tf.recompute_grad(lambda x: x * 2)(1.0))
        2.0
    """
    return jax.checkpoint(f)


def grad_pass_through(f: Any) -> Any:
    """Return ``f`` with the gradient of the identity, as a straight-through estimator needs.

    Example:
        >>> jax.grad(lambda x: tf.grad_pass_through(jnp.round)(x))(1.2)
        Array(1., dtype=float32, weak_type=True)
    """

    @functools.wraps(f)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return x + jax.lax.stop_gradient(f(x, *args, **kwargs) - x)

    return call
