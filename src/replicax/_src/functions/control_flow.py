"""Control flow on array values that supports assignments to variables.

Outside of a trace these are plain Python. Inside a trace each body is lifted once, and the
variables that it writes are carried through JAX's own control flow.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.errors import TracingError
from replicax._src.context.current import in_replica
from replicax._src.functions.iterator_inputs import IteratorInput, enclosing_inputs
from replicax._src.functions.jaxpr.lift import Lifted, as_input, from_output, lift
from replicax._src.functions.modes import HostDriven
from replicax._src.state.cell import Cell
from replicax._src.state.hooks import read
from replicax._src.state.levels import Storage, TraceLevel, is_staging, level


def cond(
    pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], *operands: Any
) -> Any:
    """Call one of two functions, by a condition that may be an array.

    Both must return the same structure. Assignments in the chosen function take effect.

    Args:
        pred: A boolean scalar.
        true_fn: Called with ``operands`` if ``pred`` is true.
        false_fn: Called with ``operands`` if ``pred`` is false.
        *operands: Arrays, or structures of them.

    Example:
        >>> @rx.function
        ... def clip(x):
        ...     return rx.cond(x > 1, lambda: jnp.float32(1), lambda: x)
        >>> float(clip(jnp.float32(3)))
        1.0
    """
    _check_functions("cond", "rx.cond(pred, lambda: a, lambda: b)", true_fn, false_fn)
    if not is_staging() and not _is_mapped(pred):
        return true_fn(*operands) if bool(pred) else false_fn(*operands)
    leaves, treedef = jax.tree.flatten(operands)
    branches = [_LoopBody(f, leaves, treedef) for f in (true_fn, false_fn)]
    a, b = branches
    if a.out != b.out:
        raise TypeError(
            f"The two functions of rx.cond return different structures: {a.out} and {b.out}."
        )
    if a.level.taken != b.level.taken:
        raise HostDriven  # the number of elements taken depends on `pred`
    inputs = [*a.iterator_inputs, *b.iterator_inputs]
    replacements: dict[Cell, Cell] = dict(
        zip(inputs, enclosing_inputs(inputs, a.level.taken), strict=True)
    )
    writes = list(dict.fromkeys([*a.lifted.writes, *b.lifted.writes]))
    own = [*a.lifted.reads, *b.lifted.reads, *writes]
    reads = list(dict.fromkeys(replacements.get(c, c) for c in own))
    outside = level()
    state = [as_input(read(c), c) for c in reads]
    results = jax.lax.cond(
        jnp.asarray(pred, bool),
        *(body.with_state(reads, writes, replacements) for body in branches),
        leaves,
        state,
    )
    outs, new = results
    _write(outside, writes, new)
    return jax.tree.unflatten(a.out, outs)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Like `jax.lax.scan`, with support for assignments in ``f``.

    Args:
        f: Takes the carry and one slice of ``xs``; returns the new carry and an output.
        init: The initial carry.
        xs: Arrays to scan over along the first axis, or None with ``length``.
        length: The number of steps, if ``xs`` is None.
        reverse: Scan from the last slice to the first.
        unroll: The number of steps to unroll.

    Returns:
        The final carry, and the stacked outputs.

    Example:
        >>> total = rx.Variable(0.0)
        >>> def step(carry, x):
        ...     total.assign_add(x)
        ...     return carry + 1, x * x
        >>> count, squares = rx.function(lambda xs: rx.scan(step, 0, xs))(jnp.arange(3.0))
        >>> int(count), squares.tolist(), float(total)
        (3, [0.0, 1.0, 4.0], 3.0)
    """
    steps = _steps(xs, length)
    xs = jax.tree.map(jnp.asarray, xs)
    _check_functions("scan", "rx.scan(lambda carry, x: (carry, y), init, xs)", f)
    if steps and not is_staging():
        return _eager_scan(f, init, xs, steps, reverse=reverse)
    carry, carry_def = jax.tree.flatten(jax.tree.map(jnp.asarray, init))
    leaves, xs_def = jax.tree.flatten(xs)
    slices = [jax.ShapeDtypeStruct(jnp.shape(x)[1:], jnp.result_type(x)) for x in leaves]

    def step(*flat: Any) -> Any:
        c = jax.tree.unflatten(carry_def, flat[: len(carry)])
        result = f(c, jax.tree.unflatten(xs_def, flat[len(carry) :]))
        _check_turn(result, carry_def)
        return result

    body = _LoopBody(step, [*carry, *slices], None, idle=not steps)
    lifted, outside = body.lifted, level()
    constants = [c for c in lifted.reads if c not in {*lifted.writes, *body.iterator_inputs}]
    fixed = [as_input(read(c), c) for c in constants]
    run = body.with_state([*body.iterator_inputs, *constants, *lifted.writes], lifted.writes)
    inputs = enclosing_inputs(body.iterator_inputs, body.level.taken, (steps, reverse))
    elements = [outside.read(c) for c in inputs]

    def loop_step(state: Any, x: Any) -> Any:
        (carried, changing), (slices, pulled) = state, x
        outs, new = run([*carried, *slices], [*pulled, *fixed, *changing])
        new = [jnp.asarray(n, o.dtype) for n, o in zip(new, changing, strict=True)]
        return (outs[: len(carry)], new), outs[len(carry) :]

    first = [as_input(read(c), c) for c in lifted.writes]
    (last, new), ys = jax.lax.scan(
        loop_step, (carry, first), (leaves, elements), length=length, reverse=reverse, unroll=unroll
    )
    _write(outside, lifted.writes, new)
    pair: tuple[Any, Any] = jax.tree.unflatten(body.out, [*last, *ys])
    return pair


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Like `jax.lax.while_loop`, with support for assignments in ``body_fun``.

    Args:
        cond_fun: Takes the value; returns whether to continue.
        body_fun: Takes the value; returns the next value.
        init_val: The initial value.

    Example:
        >>> turns = rx.Variable(0)
        >>> def halve(x):
        ...     turns.assign_add(1)
        ...     return x / 2
        >>> f = rx.function(lambda x: rx.while_loop(lambda x: x > 1, halve, x))
        >>> float(f(jnp.float32(8))), int(turns)
        (1.0, 3)
    """
    _check_functions("while_loop", "rx.while_loop(cond, body, init)", cond_fun, body_fun)
    value = jax.tree.map(jnp.asarray, init_val)
    while not is_staging():
        going = cond_fun(value)
        if _is_mapped(going):
            break
        if not bool(going):
            return value
        value = body_fun(value)
        _check_same("body_fun of rx.while_loop", value, jax.tree.structure(init_val))
    leaves, treedef = jax.tree.flatten(value)
    unflat = lambda fn: lambda *flat: fn(jax.tree.unflatten(treedef, flat))  # noqa: E731
    test, body = (
        _LoopBody(unflat(cond_fun), leaves, None),
        _LoopBody(unflat(body_fun), leaves, None),
    )
    _check_structure("body_fun of rx.while_loop", body.out, treedef)
    if test.lifted.writes:
        raise TracingError(
            f"cond_fun of rx.while_loop assigns variable {test.lifted.writes[0].name!r}. A"
            " condition must have no side effects; assign in body_fun."
        )
    if test.level.taken or body.level.taken:
        raise HostDriven  # the number of elements taken depends on the condition
    writes = body.lifted.writes
    outside = level()
    reads = list(dict.fromkeys([*test.lifted.reads, *body.lifted.reads, *writes]))
    constants = [c for c in reads if c not in set(writes)]
    fixed = [as_input(read(c), c) for c in constants]
    order = [*constants, *writes]

    def condition(state: Any) -> Any:
        outs, _ = test.with_state(order, [])(state[0], [*fixed, *state[1]])
        return outs[0]

    def loop_step(state: Any) -> Any:
        return body.with_state(order, writes)(state[0], [*fixed, *state[1]])

    first = [as_input(read(c), c) for c in writes]
    outs, new = jax.lax.while_loop(condition, loop_step, (leaves, first))
    _write(outside, writes, new)
    return jax.tree.unflatten(treedef, outs)


def checkpointed(
    fn: Callable[..., Any], policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function under `jax.checkpoint`, with support for assignments in it.

    Outside of a trace there is nothing to save, so the function is called directly.
    """
    if not is_staging():
        return fn(*args, **kwargs)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
    arrays = [leaves[i] for i in places]

    def of_arrays(*xs: Any) -> Any:
        every = list(leaves)
        for i, x in zip(places, xs, strict=True):
            every[i] = x
        own, named = jax.tree.unflatten(treedef, every)
        return fn(*own, **named)

    outside = level()
    if isinstance(outside, Storage):  # a trace of JAX's own, where no variable can be assigned
        return jax.checkpoint(of_arrays, policy=policy)(*arrays)
    body = _LoopBody(of_arrays, arrays, None)
    lifted = body.lifted
    reads = list(dict.fromkeys([*lifted.reads, *lifted.writes]))
    state = [as_input(read(c), c) for c in reads]
    run = body.with_state(reads, lifted.writes)
    outs, new = jax.checkpoint(run, policy=policy)(arrays, state)
    _write(outside, lifted.writes, new)
    return jax.tree.unflatten(body.out, outs)


class _LoopBody:
    """A function of flat arrays, lifted in the current trace."""

    def __init__(
        self, fn: Callable[..., Any], leaves: list[Any], treedef: Any, *, idle: bool = False
    ) -> None:
        self.out: Any = None

        def body(*flat: Any) -> list[Any]:
            args = flat if treedef is None else jax.tree.unflatten(treedef, flat)
            outs, self.out = jax.tree.flatten(fn(*args))
            return [jnp.asarray(x) for x in outs]

        outside = level()
        self.level = inner = TraceLevel(in_replica=in_replica(), outer=outside)
        inner.is_idle = idle
        self.lifted: Lifted = lift(body, leaves, inner)
        self.iterator_inputs = [c for c in self.lifted.reads if isinstance(c, IteratorInput)]
        for topology, what in inner.topologies.items():
            outside.uses(topology, what)

    def with_state(
        self, reads: list[Cell], writes: list[Cell], replacements: Mapping[Cell, Cell] | None = None
    ) -> Callable[..., Any]:
        """Return `f(arrays, read_values) -> (outputs, written_values)`.

        Args:
            reads: The cells of `read_values`.
            writes: The cells of `written_values`.
            replacements: Maps cells that the body reads to the cells in `reads` that replace them.
        """
        lifted, replacements = self.lifted, replacements or {}
        place = {c: i for i, c in enumerate(reads)}
        order = [place[replacements.get(c, c)] for c in lifted.reads]

        def call(leaves: Any, state: Any) -> tuple[list[Any], list[Any]]:
            results = lifted.call(*leaves, *(state[i] for i in order))
            outs, own = results[: lifted.num_outs], results[lifted.num_outs :]
            new = dict(zip(lifted.writes, own, strict=True))
            return outs, [new[c] if c in new else state[place[c]] for c in writes]

        return call


def _check_functions(who: str, usage: str, *fns: object) -> None:
    for fn in fns:
        if not callable(fn):
            raise TypeError(
                f"rx.{who} needs functions, got a value of type {type(fn).__name__}: write"
                f" `{usage}`."
            )


def out_avals(fn: Callable[..., list[Any]], avals: list[Any]) -> list[Any]:
    """Return the shapes and dtypes of the results of a function that may read variables."""
    return _LoopBody(fn, avals, None, idle=True).lifted.out_avals


def _is_mapped(x: Any) -> bool:
    """Whether `x` has no concrete boolean value, as under `jax.vmap`."""
    try:
        bool(x)
    except jax.errors.ConcretizationTypeError:
        return True
    return False


def _steps(xs: Any, length: int | None) -> int:
    """Return the number of steps; raise `ValueError` if the sizes disagree."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(xs)]
    sizes = {s[0] for s in shapes if s} | ({length} if length is not None else set())
    if len(sizes) == 1 and all(shapes):
        return sizes.pop()
    raise ValueError(
        f"rx.scan walks over the first axis of xs for `length` steps, which must be the same for"
        f" all arrays: got xs of shapes {shapes} and length={length}."
    )


def _check_turn(result: Any, carry: Any) -> None:
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(
            "The function of rx.scan must return a pair, the next carry and an output, got"
            f" {type(result).__name__}. Without an output, `return carry, None`."
        )
    _check_same("The function of rx.scan", result[0], carry)


def _check_same(who: str, value: Any, expected: Any) -> None:
    _check_structure(who, jax.tree.structure(value), expected)


def _check_structure(who: str, structure: Any, expected: Any) -> None:
    if structure != expected:
        raise TypeError(
            f"{who} returns the structure {structure}, but is called with {expected}; each"
            " iteration must return the structure that the next one takes."
        )


def _write(outside: Any, cells: list[Cell], values: Any) -> None:
    for cell, value in zip(cells, values, strict=True):
        outside.write(cell, from_output(value, cell))


def _eager_scan(f: Any, init: Any, xs: Any, steps: int, *, reverse: bool) -> tuple[Any, Any]:
    """Run a scan as a Python loop."""
    carry = jax.tree.map(jnp.asarray, init)
    structure, outputs = jax.tree.structure(carry), []
    for i in reversed(range(steps)) if reverse else range(steps):
        result = f(carry, jax.tree.map(lambda x: x[i], xs))  # noqa: B023
        _check_turn(result, structure)
        carry, y = result
        outputs.append(y)
    if reverse:
        outputs.reverse()
    return carry, jax.tree.map(lambda *ys: jnp.stack(ys), *outputs)
