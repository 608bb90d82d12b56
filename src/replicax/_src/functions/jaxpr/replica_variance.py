"""Analysis of replica functions: which outputs vary between replicas.

A compiled replica function is one program for all replicas. A walk over its jaxpr finds the outputs
that can vary between replicas, and refuses collectives that only some replicas would reach, which
would deadlock.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jaxprs

from replicax._src.base.errors import ReplicaError
from replicax._src.compat.jax import is_of_jax, scan_counts
from replicax._src.topology.mesh import REPLICA_AXIS


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
ELEMENTWISE = _names("""
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """)
# Operations whose results depend only on their inputs, so that equal inputs give equal results on
# all replicas. Omitted on purpose: foreign code (ffi_call, pallas_call, callbacks), stateful
# primitives (get, swap, rng_uniform) and uninitialized arrays (empty).
_DETERMINISTIC = ELEMENTWISE | _names("""
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


def varying_values(
    equations: Sequence[Any], varying_inputs: dict[Any, bool], *, divergent: bool = False
) -> dict[Any, bool]:
    """Return which values can differ between replicas: inputs, and results of equations.

    Args:
        equations: The equations, in order.
        varying_inputs: Which of their inputs differ.
        divergent: Whether only some replicas run them.
    """
    known = dict(varying_inputs)
    for equation in equations:
        inputs = [_varies(x, known) for x in equation.invars]
        outputs = _equation(equation, inputs, divergent=divergent)
        known.update(zip(equation.outvars, outputs, strict=True))
    return known


def _varies(x: Any, known: dict[Any, bool]) -> bool:
    return not isinstance(x, jaxprs.Literal) and known.get(x, False)


def _walk(jaxpr: jaxprs.Jaxpr, ins: list[bool], *, divergent: bool) -> list[bool]:
    """Propagate forward which values vary; `divergent` if only some replicas get here."""
    inputs = dict(zip(jaxpr.invars, ins, strict=True))
    known = varying_values(jaxpr.eqns, inputs, divergent=divergent)
    return [_varies(x, known) for x in jaxpr.outvars]


def _equation(equation: Any, ins: list[bool], *, divergent: bool) -> list[bool]:
    """Return which outputs of one equation can differ, given which of its inputs can.

    The outputs of an unknown primitive (identified by JAX's own object, not by name alone) are
    assumed to vary: it may depend on the device that it runs on.
    """
    name, outs = equation.primitive.name, len(equation.outvars)
    if not is_of_jax(equation.primitive):
        # Only to refuse collectives that some replicas would not reach.
        _inner(equation, [True], divergent=divergent)
        return [True] * outs
    if name in _COLLECTIVES:
        if REPLICA_AXIS not in _axes(equation):  # over an axis of the user's `vmap`
            return [any(ins)] * outs
        _refuse_divergent(name, divergent=divergent)
        # Among groups of replicas, each group has a result of its own.
        whole = equation.params.get("axis_index_groups") is None
        return [not (whole and name in _EQUALISING)] * outs
    if name == "axis_index":
        return [REPLICA_AXIS in _axes(equation)] * outs
    if name in _DETERMINISTIC:
        return [any(ins)] * outs
    if name in _CONTROL:
        return _CONTROL[name](equation, ins, divergent=divergent)
    if name in CALLS:
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
    """Analyse the called function; if its signature is unknown, any of its results may vary."""
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
CALLS = _names("""
    call checkpoint closed_call composite core_call custom_jvp_call custom_lin custom_linear_solve
    custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jit linear_call pjit reduce
    reduce_window remat remat2 remat_opt select_and_scatter shard_map xla_metadata_call
    """)


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
