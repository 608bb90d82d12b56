"""Analysis of replica functions (which outputs vary), and their rewriting to compute on shards.

A compiled replica function is one program for all replicas. A walk over its jaxpr finds the outputs
that can vary between replicas, and refuses collectives that only some replicas would reach, which
would deadlock.

A replica holds one shard of a sharded variable. A replica function reads the whole variable, which
requires an all-gather, and writes the whole, of which each replica keeps its shard. An optimizer's
update is elementwise, however, so the shard of its result is the same update of the shards. The
second walk goes backward from the writes and computes on shards instead of whole arrays as far as
this is provably equivalent. It stops at a variable, whose shard is local; at a sum over the
replicas, which becomes a reduce-scatter; or at any other operation, whose result is computed whole
and then sliced.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jaxprs

from replicax._src.base.errors import ReplicaError
from replicax._src.compat.jax import is_of_jax, scan_counts
from replicax._src.functions.jaxpr.lift import ClosedJaxpr, as_function, in_one_equation
from replicax._src.topology.mesh import REPLICA_AXIS
from replicax._src.values.sharded import ShardLayout


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Collectives. Over the whole replica axis, these return the same value on all replicas.
_EQUALISING = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}
)
_MOVING = frozenset(
    {"ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter", "psum_scatter", "pbroadcast"}
)
_COLLECTIVES = _EQUALISING | _MOVING
# Operations that compute each element of the result from the elements at the same index.
_ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """)
# Operations whose results depend only on their inputs, so that equal inputs give equal results on
# all replicas. Omitted on purpose: foreign code (ffi_call, pallas_call, callbacks), stateful
# primitives (get, swap, rng_uniform) and uninitialized arrays (empty).
_DETERMINISTIC = _ELEMENTWISE | _names("""
    after_all approx_top_k argmax argmin bessel_i0e bessel_i1e bitcast_convert_type broadcast_in_dim
    broadcast_to cholesky cholesky_update clz concatenate conv_general_dilated create_token
    cumlogsumexp cummax cummin cumprod cumsum device_put dim_as_value dimension_size dot_general
    dynamic_slice dynamic_update_slice eig eigh eq_to fft from_edtype gather geqp3 geqrf hessenberg
    householder_product igamma igamma_grad_a igammac iota iota_2x32_shape layout_constraint le_to
    log2 lt_to lu lu_pivots_to_permutation mulhi multiple_of name one_minus_square
    optimization_barrier ormqr pad philox2x32 philox4x32 platform_index polygamma polynomial
    population_count pvary qr ragged_dot_general random_bits random_clone random_fold_in
    random_gamma random_seed random_split random_unwrap random_wrap reciprocal reduce_and
    reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_min
    reduce_window_sum reduce_xor regularized_incomplete_beta relayout reshape reshard rev
    rng_bit_generator scaled_dot scaled_matmul scaled_matmul_wrapper scatter scatter-add scatter-max
    scatter-min scatter-mul scatter-sub schur select_and_gather_add select_and_scatter_add
    shape_assertion sharding_constraint slice sort split squeeze stack stop_gradient svd
    symmetric_product threefry2x32 threefry4x32 tie tile to_edtype top_k transpose triangular_solve
    tridiagonal tridiagonal_solve unstack with_memory_space_constraint xla_metadata_value zeros_like
    zeta
    """)


def varying_outputs(jaxpr: jaxprs.Jaxpr, varying_inputs: Sequence[bool]) -> list[bool]:
    """Return which outputs can differ between replicas.

    Args:
        jaxpr: The body of a replica function.
        varying_inputs: Which of its inputs differ.

    Raises:
        ReplicaError: If only some replicas would reach a collective.
    """
    return _walk(jaxpr, list(varying_inputs), divergent=False)


def _walk(jaxpr: jaxprs.Jaxpr, ins: list[bool], *, divergent: bool) -> list[bool]:
    """Propagate forward which values vary; `divergent` if only some replicas get here."""
    known: dict[Any, bool] = dict(zip(jaxpr.invars, ins, strict=True))

    def varies(x: Any) -> bool:
        return not isinstance(x, jaxprs.Literal) and known.get(x, False)

    for equation in jaxpr.eqns:
        inputs = [varies(x) for x in equation.invars]
        outputs = _equation(equation, inputs, divergent=divergent)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [varies(x) for x in jaxpr.outvars]


def _equation(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    """Return which outputs of one equation can differ, given which of its inputs can.

    The outputs of an unknown primitive (identified by JAX's own object, not by name alone) are
    assumed to vary: it may depend on the device that it runs on.
    """
    name, outs = equation.primitive.name, len(equation.outvars)
    if not is_of_jax(equation.primitive):
        _inner(equation, [True], divergent=divergent)
        return [True] * outs
    if name in _COLLECTIVES:
        if REPLICA_AXIS not in _axes(equation):
            return [any(ins)] * outs
        _refuse_divergent(name, divergent=divergent)
        whole = equation.params.get("axis_index_groups") is None
        return [not (whole and name in _EQUALISING)] * outs
    if name == "axis_index":
        return [REPLICA_AXIS in _axes(equation)] * outs
    if name in _DETERMINISTIC:
        return [any(ins)] * outs
    if name in _CONTROL:
        return _CONTROL[name](equation, ins, divergent=divergent)
    if name in _CALLS:
        return _call(equation, ins, divergent=divergent)
    _inner(equation, [True], divergent=divergent)
    return [True] * outs


# `scan` and `while` iterate to a fixed point: a carry that varies after one iteration varies from
# then on. The set of varying carries only grows, so this terminates.
def _scan(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    consts, carries = scan_counts(equation.params)
    body, state = equation.params["jaxpr"].jaxpr, list(ins)
    while True:
        outs = _walk(body, state, divergent=divergent)
        carried = [a or b for a, b in zip(state[consts : consts + carries], outs, strict=False)]
        if carried == state[consts : consts + carries]:
            return [*carried, *outs[carries:]]
        state[consts : consts + carries] = carried


def _while(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    nc, nb = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    cond, body = equation.params["cond_jaxpr"].jaxpr, equation.params["body_jaxpr"].jaxpr
    state = ins[nc + nb :]
    while True:
        # If the condition varies, replicas run different numbers of iterations: then every carry
        # varies, and neither the body nor the condition may contain collectives.
        (stops,) = _walk(cond, ins[:nc] + state, divergent=divergent)
        outs = _walk(body, ins[nc : nc + nb] + state, divergent=divergent or stops)
        new = [a or b or stops for a, b in zip(state, outs, strict=True)]
        if new == state:
            if stops:
                _walk(cond, ins[:nc] + state, divergent=True)
            return state
        state = new


def _cond(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    chosen = ins[0]
    branches = [
        _walk(b.jaxpr, ins[1:], divergent=divergent or chosen) for b in equation.params["branches"]
    ]
    return [chosen or any(column) for column in zip(*branches, strict=True)]


def _call(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    """Walk the called function; if its signature is unknown, assume the worst of its results."""
    outs = len(equation.outvars)
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(key)
        if inner is None:
            continue
        jaxpr = inner.jaxpr if hasattr(inner, "jaxpr") else inner
        if len(jaxpr.invars) == len(ins) and len(jaxpr.outvars) == outs:
            return _walk(jaxpr, ins, divergent=divergent)
    return [_inner(equation, ins, divergent=divergent)] * outs


def _inner(equation: Any, ins: list[bool], *, divergent: bool) -> bool:
    """Return whether any result of the inner functions can differ, assuming any input may."""
    varies = any(ins)
    for jaxpr in jaxprs.jaxprs_in_params(equation.params):
        varies |= any(_walk(jaxpr, [any(ins)] * len(jaxpr.invars), divergent=divergent))
    return varies


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
# Equations that call functions, which are jaxprs in their parameters.
_CALLS = _names("""
    call checkpoint closed_call composite core_call custom_jvp_call custom_lin custom_linear_solve
    custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jit linear_call pjit reduce
    reduce_window remat remat2 remat_opt select_and_scatter shard_map xla_metadata_call
    """)
# Calls that can be replaced by their equations, because they have no rules of their own.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "jaxpr"}


def _axes(equation: Any) -> tuple[Any, ...]:
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _refuse_divergent(name: str, *, divergent: bool) -> None:
    if divergent:
        raise ReplicaError(
            f"A collective ({name}) is inside a branch or loop that depends on values that differ"
            " between replicas, so some replicas would wait for others that never come. Take"
            " the all_reduce, all_gather, merge_call or variable assignment out of the rx.cond or"
            " rx.while_loop, or make its condition equal on all replicas with an all_reduce."
        )


ShardLayouts = Sequence[ShardLayout | None]


def on_shards(
    jaxpr: jaxprs.Jaxpr, in_layouts: ShardLayouts, out_layouts: ShardLayouts
) -> Callable[..., list[Any]]:
    """Return the function of `jaxpr`, with shards in place of some whole arrays.

    Args:
        jaxpr: The body of a replica function.
        in_layouts: For each input, its layout if the replica holds only its shard.
        out_layouts: For each output, its layout if the replica keeps only its shard.
    """
    if not any((*in_layouts, *out_layouts)):
        return in_one_equation(ClosedJaxpr(jaxpr, ()))
    sharded = {v for v, layout in zip(jaxpr.invars, in_layouts, strict=True) if layout is not None}
    plan = _ShardingPlan.of(jaxpr, out_layouts)
    plan.whole.update(v for v in jaxpr.invars if v in plan.parts and v not in sharded)
    whole_inputs = [i for i, v in enumerate(jaxpr.invars) if v in plan.whole]
    wanted = {*plan.parts, *plan.used, *_variables(jaxpr.outvars)}
    made = [v for e in plan.equations[::-1] for v in e.outvars]
    known = [v for v in (*(jaxpr.invars[i] for i in whole_inputs), *made) if v in wanted]
    # Two phases: `first` computes the values that are needed whole, from gathered inputs; then the
    # steps of the plan compute on shards, from local shards and slices of those whole values.
    first = jaxpr.replace(
        invars=[jaxpr.invars[i] for i in whole_inputs],
        outvars=known,
        eqns=plan.equations[::-1],
        debug_info=jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    call = as_function(first, ())

    def function(*inputs: Any) -> list[Any]:
        shards: dict[Any, Any] = {
            v: x for v, x in zip(jaxpr.invars, inputs, strict=True) if v in sharded
        }
        arrays = [
            inputs[i] if (layout := in_layouts[i]) is None else layout.gathered(inputs[i])
            for i in whole_inputs
        ]
        whole = dict(zip(known, call(*arrays), strict=True))
        for v, layout in plan.parts.items():
            if v in whole and v not in shards:
                shards[v] = layout.local_shard(whole[v])
        for step in reversed(plan.steps):
            shards[step.out] = step.run(whole, shards)
        return [
            shards[v] if layout is not None else _value(v, whole)
            for v, layout in zip(jaxpr.outvars, out_layouts, strict=True)
        ]

    return function


def _value(x: Any, values: dict[Any, Any]) -> Any:
    return x.val if isinstance(x, jaxprs.Literal) else values[x]


@dataclass(frozen=True)
class _Step:
    """One operation on shards.

    Attributes:
        out: The variable of which it computes a shard.
        shard_layout: The layout of `out`.
        equation: The operation on whole arrays.
        by_part: Which of its inputs are shards.
    """

    out: jaxprs.Var
    shard_layout: ShardLayout
    equation: jaxprs.JaxprEqn
    by_part: tuple[bool, ...]

    def run(self, whole: dict[Any, Any], shards: dict[Any, Any]) -> Any:
        """Compute the shard from the known whole arrays and shards."""
        equation = self.equation
        inputs = [
            _value(x, shards if is_part else whole)
            for x, is_part in zip(equation.invars, self.by_part, strict=True)
        ]
        name = equation.primitive.name
        if name == "psum":
            return self.shard_layout.reduce_scatter(inputs[equation.outvars.index(self.out)])
        if name == "broadcast_in_dim":
            return jnp.broadcast_to(inputs[0], self.shard_layout.part_shape)
        return equation.primitive.bind(*inputs, **equation.params)


@dataclass
class _ShardingPlan:
    """Which values are computed whole and which as shards; built from the last equation back.

    Attributes:
        whole: The values that are needed whole.
        parts: The values of which a shard is needed, with their layouts.
        used: The whole values that operations on shards take.
        equations: The operations on whole arrays, last one first.
        steps: The operations on shards, last one first.
    """

    whole: set[Any]
    parts: dict[Any, ShardLayout]
    used: set[Any] = field(default_factory=set)
    equations: list[jaxprs.JaxprEqn] = field(default_factory=list)
    steps: list[_Step] = field(default_factory=list)

    @classmethod
    def of(cls, jaxpr: jaxprs.Jaxpr, out_layouts: ShardLayouts) -> "_ShardingPlan":
        """Plan to compute shards of the outputs in `out_layouts`, and the others whole."""
        outs = [
            (v, c)
            for v, c in zip(jaxpr.outvars, out_layouts, strict=True)
            if isinstance(v, jaxprs.Var)
        ]
        plan = cls({v for v, c in outs if c is None}, {v: c for v, c in outs if c is not None})
        rest = list(jaxpr.eqns)
        while rest:
            rest += plan.visit(rest.pop())
        return plan

    def visit(self, equation: jaxprs.JaxprEqn) -> Sequence[jaxprs.JaxprEqn]:
        """Decide how to compute one operation; return the equations to visit if it is inlined."""
        parts = [v for v in equation.outvars if v in self.parts and v not in self.whole]
        if not parts:
            if _has_effects(equation) or not self.whole.isdisjoint(equation.outvars):
                self._compute_whole(equation)
        elif _is_sum(equation):
            self._compute_as_reduce_scatter(equation, parts)
        elif inner := _inlined_equations(equation):
            return inner
        elif (by_part := _sharded_inputs(equation)) is not None:
            self._compute_on_shards(equation, by_part)
        else:
            self.whole.update(parts)
            self._compute_whole(equation)
        return ()

    def _compute_whole(self, equation: jaxprs.JaxprEqn) -> None:
        self.equations.append(equation)
        self.whole.update(v for v in equation.outvars if v in self.parts)
        self.whole.update(_variables(equation.invars))

    def _compute_as_reduce_scatter(
        self, equation: jaxprs.JaxprEqn, parts: Sequence[jaxprs.Var]
    ) -> None:
        """Compute the shards of a sum over the replicas; other outputs of it stay whole."""
        rest = [
            (x, v)
            for x, v in zip(equation.invars, equation.outvars, strict=True)
            if v not in parts and v in self.whole
        ]
        if rest:
            invars, outvars = map(list, zip(*rest, strict=True))
            self._compute_whole(equation.replace(invars=invars, outvars=outvars))
        # One psum may reduce several arrays: each needed shard becomes its own reduce-scatter.
        nothing = (False,) * len(equation.invars)
        for v in parts:
            place = equation.outvars.index(v)
            alone = equation.replace(invars=[equation.invars[place]], outvars=[v])
            self._add_step(_Step(v, self.parts[v], alone, nothing[:1]))

    def _compute_on_shards(self, equation: jaxprs.JaxprEqn, by_part: tuple[bool, ...]) -> None:
        (out,) = equation.outvars
        self._add_step(_Step(out, self.parts[out], equation, by_part))

    def _add_step(self, step: _Step) -> None:
        """Add a step, and record in which form it needs its inputs."""
        self.steps.append(step)
        for x, is_part in zip(step.equation.invars, step.by_part, strict=True):
            if not isinstance(x, jaxprs.Var):
                continue
            if is_part:
                self.parts[x] = step.shard_layout
            else:
                self.whole.add(x)
                self.used.add(x)


def _has_effects(equation: jaxprs.JaxprEqn) -> bool:
    # JAX counts naming a mesh axis as an effect, but it is not observable.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def _is_sum(equation: jaxprs.JaxprEqn) -> bool:
    params = equation.params
    return (
        equation.primitive.name == "psum"
        and is_of_jax(equation.primitive)
        and tuple(params["axes"]) == (REPLICA_AXIS,)
        and params["axis_index_groups"] is None
    )


def _sharded_inputs(equation: Any) -> tuple[bool, ...] | None:
    """Which inputs are shards if the result is; None if the result would then be different."""
    name, shapes = equation.primitive.name, [x.aval.shape for x in equation.invars]
    # Only a scalar: broadcasting anything larger may use other elements for other shards.
    if name == "broadcast_in_dim":
        return (False,) if shapes == [()] else None
    shape = equation.outvars[0].aval.shape
    known = [
        s for x, s in zip(equation.invars, shapes, strict=True) if isinstance(x, jaxprs.Literal)
    ]
    if name not in _ELEMENTWISE or not is_of_jax(equation.primitive) or shape == () or any(known):
        return None
    if any(s not in ((), shape) for s in shapes):
        return None
    return tuple(s == shape for s in shapes)


def _variables(xs: Iterable[Any]) -> list[jaxprs.Var]:
    return [x for x in xs if isinstance(x, jaxprs.Var)]


def _inlined_equations(equation: jaxprs.JaxprEqn) -> list[jaxprs.JaxprEqn] | None:
    """Return the equations of a called function, renamed to the caller's variables."""
    key = _INLINED.get(equation.primitive.name)
    inner: Any = equation.params.get(key) if key is not None else None
    if not isinstance(inner, ClosedJaxpr) or inner.consts or _has_effects(equation):
        return None
    jaxpr = inner.jaxpr
    computed = {v for e in jaxpr.eqns for v in e.outvars}
    if len(computed.intersection(_variables(jaxpr.outvars))) < len(equation.outvars):
        return None  # it returns an input, a constant, or one result twice
    names: dict[Any, Any] = dict(zip(jaxpr.invars, equation.invars, strict=True))
    results = zip(jaxpr.outvars, equation.outvars, strict=True)
    names.update((v, out) for v, out in results if not isinstance(out, jaxprs.DropVar))

    def renamed(x: Any) -> Any:
        return x if isinstance(x, jaxprs.Literal) else names.setdefault(x, jaxprs.Var(x.aval))

    return [
        e.replace(invars=[*map(renamed, e.invars)], outvars=[*map(renamed, e.outvars)])
        for e in jaxpr.eqns
    ]
