"""Rewriting of replica functions to compute on shards of sharded variables.

A replica holds one shard of a sharded variable. A replica function reads the whole variable and
writes the whole. `on_shards` rewrites its jaxpr to all-gather as late, and reduce-scatter as early,
as is provably equivalent:

- A variable is gathered where it is used. If a `scan` iterates over a stack of layers, each
  iteration gathers its layer alone; if a `checkpoint` uses a variable, it is gathered again for the
  gradients, not kept. A conversion to a narrower type comes before the gather.
- An optimizer's update is elementwise, so the shard of its result is the same update of shards.
- The norm of a value whose shards are known is the sum, over the replicas, of the shards' norms;
  except in a loss, if the whole value is gathered anyway.
- A sum over the replicas, of which only the shard is used, is a reduce-scatter. If a `scan` stacks
  the summed values, or `accumulate` adds them up, each iteration reduce-scatters its own.

A plan is built from the last equation back. It records in which forms each value is wanted: whole,
as this replica's shard, or as its shard of the sum over the replicas. An equation without a rule is
computed whole, from gathered inputs, and its results are sliced or summed afterwards: slower, never
wrong. Collectives move into `scan` and `checkpoint`, which all replicas run equally often, and into
the branches of a `cond` whose condition is provably equal on all replicas.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jaxprs

from replicax._src.compat.jax import is_of_jax, scan_counts
from replicax._src.functions.jaxpr.lift import ClosedJaxpr, as_function, in_one_equation
from replicax._src.functions.jaxpr.replica_variance import ELEMENTWISE, varying_values
from replicax._src.topology.mesh import REPLICA_AXIS
from replicax._src.values.sharded import ShardLayout

# Calls that can be replaced by their equations, because they have no rules of their own.
_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "jaxpr"}
_CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2", "remat_opt"})

# The name of zeros to which a loop adds values that are summed over the replicas afterwards. Other
# loops, such as the gradients of a recurrent network, sum once, after the loop.
_ACCUMULATED = "replicax_accumulated"

ShardLayouts = Sequence[ShardLayout | None]


def zeros_to_accumulate(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return zeros for the carry of a loop that adds up gradients, which may be kept in shards."""
    zeros: jax.Array = checkpoint_name(jnp.zeros(shape, dtype), _ACCUMULATED)
    return zeros


def on_shards(
    jaxpr: jaxprs.Jaxpr,
    in_layouts: ShardLayouts,
    out_layouts: ShardLayouts,
    varying: Sequence[bool],
    reduce_dtype: Any = None,
) -> Callable[..., list[Any]]:
    """Return the function of `jaxpr`, with shards in place of some whole arrays.

    Args:
        jaxpr: The body of a replica function.
        in_layouts: For each input, its layout if the replica holds only its shard.
        out_layouts: For each output, its layout if the replica keeps only its shard.
        varying: For each input, whether it can differ between replicas.
        reduce_dtype: The dtype in which reduce-scatters sum; None for that of the values.
    """
    if not any((*in_layouts, *out_layouts)):
        return in_one_equation(ClosedJaxpr(jaxpr, ()))
    return _ShardedJaxpr(jaxpr, in_layouts, out_layouts, reduce_dtype, varying).run


@dataclass(frozen=True, eq=False)
class _Link:
    """An elementwise operation of one array and constants, one step of `_Sum.chain`."""

    # Compared by identity (`eq=False`): forms are dictionary keys, and equations cannot be hashed
    # by value.
    equation: jaxprs.JaxprEqn

    @property
    def is_linear(self) -> bool:
        """Whether the operation of a sum is the sum of the operations, up to rounding."""
        first, name = self.equation.invars[0], self.equation.primitive.name
        is_divided = name == "div" and not isinstance(first, jaxprs.Literal)
        dtypes = [x.aval.dtype for x in (first, self.equation.outvars[0])]  # type: ignore[attr-defined]
        is_float = all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
        return is_float and (is_divided or name in ("mul", "neg", "convert_element_type"))

    def apply(self, x: Any) -> Any:
        """Apply the operation."""
        inputs = [v.val if isinstance(v, jaxprs.Literal) else x for v in self.equation.invars]
        return self.equation.primitive.bind(*inputs, **self.equation.params)


@dataclass(frozen=True)
class _Sum:
    """The form of a value as this replica's shard of the sum over the replicas.

    Attributes:
        layout: The layout of the shard.
        dtype: The type in which it is summed; None for its own.
        chain: The operations that each replica applies to its value before the sum, in order.
    """

    layout: ShardLayout
    dtype: Any = None
    chain: tuple[_Link, ...] = ()

    def of(self, x: Any) -> Any:
        """Convert a replica's whole value to this form."""
        for link in self.chain:
            x = link.apply(x)
        return self.layout.reduce_scatter(x, self.dtype)

    @property
    def layer(self) -> "_Sum":
        """The form of one layer of a stack."""
        return replace(self, layout=self.layout.layer)

    @property
    def is_linear(self) -> bool:
        """Whether this form of a sum of values is the sum of their forms."""
        return all(link.is_linear for link in self.chain)

    def dtype_of(self, v: jaxprs.Var) -> Any:
        """Return the type of the shard of a value."""
        out = self.chain[-1].equation.outvars[0] if self.chain else v
        return out.aval.dtype  # type: ignore[attr-defined]


# The form of a value: whole, this replica's shard of it, or its shard of the sum.
_Form = ShardLayout | _Sum | None


def _is_stack(form: _Form) -> bool:
    layout = form.layout if isinstance(form, _Sum) else form
    return layout is not None and layout.is_stack


class _Environment:
    """The values of one run of a `_ShardedJaxpr`, by variable and form."""

    def __init__(self) -> None:
        self._known: dict[tuple[jaxprs.Var, _Form], Any] = {}
        self._layouts: dict[jaxprs.Var, ShardLayout] = {}

    def put(self, v: jaxprs.Var, form: _Form, x: Any) -> None:
        """Store the value of a variable in one form."""
        self._known[v, form] = x
        if isinstance(form, ShardLayout):
            self._layouts[v] = form

    def get(self, x: Any, form: _Form) -> Any:
        """Return the value of a variable in one form, converted from another one if need be."""
        if isinstance(x, jaxprs.Literal):
            return x.val
        if (x, form) not in self._known:
            self._known[x, form] = self._converted(x, form)
        return self._known[x, form]

    def _converted(self, v: jaxprs.Var, form: _Form) -> Any:
        if form is None:
            layout = self._layouts[v]
            return layout.gathered(self._known[v, layout])
        whole = self.get(v, None)
        return form.of(whole) if isinstance(form, _Sum) else form.local_shard(whole)


@dataclass(frozen=True)
class _Action:
    """One operation of which some inputs or outputs are not whole.

    Attributes:
        inputs: The inputs, with the form of each.
        outputs: The outputs, with the form of each.
        call: Computes the outputs.
    """

    inputs: tuple[tuple[Any, _Form], ...]
    outputs: tuple[tuple[jaxprs.Var, _Form], ...]
    call: Callable[..., Sequence[Any]]

    def run(self, values: _Environment) -> None:
        """Compute the outputs."""
        outs = self.call(*(values.get(x, form) for x, form in self.inputs))
        for (v, form), out in zip(self.outputs, outs, strict=True):
            values.put(v, form, out)


class _ShardedJaxpr:
    """How to compute the outputs of a jaxpr in given forms from inputs in given forms.

    Attributes:
        gathered: The inputs of which a shard is given but the whole is used, as a whole: not layer
            by layer in a loop.
    """

    def __init__(
        self,
        jaxpr: jaxprs.Jaxpr,
        in_forms: Sequence[_Form],
        out_forms: Sequence[_Form],
        reduce_dtype: Any,
        varying: Sequence[bool] | None = None,
    ) -> None:
        self._jaxpr, self._in_forms, self._out_forms = jaxpr, in_forms, out_forms
        self._reduce_dtype = reduce_dtype
        equations, self._outvars = _inlined(jaxpr)
        self._shards = _Shards.of(jaxpr.invars, in_forms, equations)
        self._makers = {v: e for e in equations for v in e.outvars}
        # Inside of a loop or checkpoint it is not known which values differ between replicas.
        self._varies: dict[Any, bool] | None = None
        if varying is not None:
            inputs = dict(zip(jaxpr.invars, varying, strict=True))
            self._varies = varying_values(equations, inputs)
        # A reduction in the loss is better computed on the whole value if that is gathered anyway.
        # Only a plan shows what is gathered, so a second one is made with the result of the first.
        self._whole = frozenset[Any]()
        has_losses = self._plan(equations)
        self._whole = frozenset(v for v in self._shards.layouts if None in self._forms(v))
        if has_losses and self._whole:
            self._plan(equations)

    def run(self, *inputs: Any) -> list[Any]:
        """Compute the outputs."""
        values, pending = _Environment(), list[jaxprs.JaxprEqn]()
        for v, form, x in zip(self._jaxpr.invars, self._in_forms, inputs, strict=True):
            values.put(v, form, x)
        for action in self._actions:
            if isinstance(action, _Action):
                self._compute(pending, values)
                action.run(values)
            else:
                pending.append(action)
        self._compute(pending, values)
        return [values.get(x, f) for x, f in zip(self._outvars, self._out_forms, strict=True)]

    def traced(self) -> Any:
        """Return the rewritten jaxpr, closed."""
        avals = [_aval(v, form) for v, form in zip(self._jaxpr.invars, self._in_forms, strict=True)]
        return jax.make_jaxpr(self.run)(*avals)

    def uses_only(self, v: jaxprs.Var, form: _Form) -> bool:
        """Whether an input is used in this form alone."""
        return self._forms(v) <= {form}

    def forms_of_input(self, i: int) -> set[_Form]:
        """Return the forms in which an input is used."""
        return self._forms(self._jaxpr.invars[i])

    def _compute(self, equations: list[jaxprs.JaxprEqn], values: _Environment) -> None:
        """Evaluate equations on whole arrays, and remove them from the list.

        They are evaluated as one jaxpr, which preserves the source lines that JAX has recorded.
        """
        if not equations:
            return
        made = dict.fromkeys(
            v for e in equations for v in e.outvars if not isinstance(v, jaxprs.DropVar)
        )
        used = dict.fromkeys(x for e in equations for x in _variables(e.invars) if x not in made)
        outs = [v for v in made if v in self._wanted]
        part = self._jaxpr.replace(
            invars=list(used),
            outvars=outs,
            eqns=list(equations),
            debug_info=self._jaxpr.debug_info._replace(arg_names=None, result_paths=None),
        )
        equations.clear()
        results = as_function(part, ())(*(values.get(v, None) for v in used))
        for v, x in zip(outs, results, strict=True):
            values.put(v, None, x)

    # Building a plan.

    def _plan(self, equations: Sequence[jaxprs.JaxprEqn]) -> bool:
        """Plan all equations, from the last to the first.

        Returns:
            Whether a reduction of shards, such as a regularizer's, comes before the gradients are
            summed, so that it is part of the loss.
        """
        self._wanted: dict[Any, set[_Form]] = {}
        self._actions: list[_Action | jaxprs.JaxprEqn] = []
        self.gathered: set[Any] = set()
        self._is_before_sums = self._has_losses = False
        for x, form in zip(self._outvars, self._out_forms, strict=True):
            self._want(x, form)
        # Backwards, because how to compute a value depends on the forms in which it is used.
        for equation in reversed(equations):
            self._visit(equation)
        self._actions.reverse()
        shards = self._shards
        self.gathered.update(shards.sources[v] for v in shards.layouts if None in self._forms(v))
        return self._has_losses

    def _forms(self, v: Any) -> set[_Form]:
        return self._wanted.get(v, set())

    def _want(self, x: Any, form: _Form) -> None:
        if isinstance(x, jaxprs.Var):
            self._wanted.setdefault(x, set()).add(form)

    def _add(self, action: _Action) -> None:
        self._actions.append(action)
        for x, form in action.inputs:
            self._want(x, form)

    def _visit(self, equation: jaxprs.JaxprEqn) -> None:
        """Plan one equation, given the forms in which later ones need its results."""
        wanted = [self._forms(v) for v in equation.outvars]
        if not any(wanted):  # dead code, unless it has effects
            if _has_effects(equation):
                self._compute_whole(equation)
        elif equation.outvars[0] in self._shards.layouts and _CalledJaxpr.of(equation) is None:
            self._compute_moved(equation)
        # The first rule that applies counts. An equation without a rule is computed whole, which
        # is always correct: rules can be left out, but must not be wrong.
        elif not (
            self._compute_nested(equation, wanted)
            or self._compute_branches(equation, wanted)
            or (_is_sum(equation) and self._compute_sums(equation, wanted))
            or (len(wanted) == 1 and self._compute_elementwise(equation, wanted[0]))
            or (len(wanted) == 1 and self._compute_reduction(equation, wanted[0]))
        ):
            self._compute_whole(equation)

    def _compute_whole(self, equation: jaxprs.JaxprEqn) -> None:
        self._actions.append(equation)
        for v in equation.outvars:
            if v in self._wanted:
                self._want(v, None)  # `_Environment` converts it to the other forms
        for x in equation.invars:
            self._want(x, None)

    def _compute_moved(self, equation: jaxprs.JaxprEqn) -> None:
        """Compute the shard of a result that `_Shards` follows; gather it if wanted whole."""
        x, (out,) = equation.invars[0], equation.outvars
        layout, given = self._shards.layouts[out], self._shards.layouts[x]
        # The other inputs are indices, such as the start of a dynamic slice.
        params = _resized(equation, given)
        forms = (given, *(None for _ in equation.invars[1:]))
        call = lambda *xs: [equation.primitive.bind(*xs, **params)]  # noqa: E731
        self._add(_Action(tuple(zip(equation.invars, forms, strict=True)), ((out, layout),), call))

    def _compute_sums(self, equation: jaxprs.JaxprEqn, wanted: Sequence[set[_Form]]) -> bool:
        """Compute by reduce-scatters the results of which only shards are wanted."""
        rest = []
        for x, v, forms in zip(equation.invars, equation.outvars, wanted, strict=True):
            form = _only(forms)
            if isinstance(form, ShardLayout):
                self._is_before_sums = True
                total = _Sum(form, self._reduce_dtype)
                # Converting the input to this form is the reduce-scatter: nothing is left to do.
                self._add(_Action(((x, total),), ((v, form),), lambda part: [part]))
            elif forms:
                rest.append((x, v))
        if rest:  # one psum sums many arrays: those of which the whole is used stay in it
            invars, outvars = map(list, zip(*rest, strict=True))
            self._compute_whole(equation.replace(invars=invars, outvars=outvars))
        return True

    def _compute_elementwise(self, equation: jaxprs.JaxprEqn, forms: set[_Form]) -> bool:
        """Compute the shard of the result from shards; False if that is not equivalent."""
        form, (out,) = _only(forms), equation.outvars
        if isinstance(form, _Sum):
            arrays = _variables(equation.invars)
            by_part = _sharded_inputs(equation)
            if form.is_linear and by_part == (True, True) and self._adds_to_sum(equation):
                # Reduce-scatter the other value alone, so that no whole array is accumulated.
                both = tuple((x, form) for x in equation.invars)
                bind = lambda *xs: [equation.primitive.bind(*xs, **equation.params)]  # noqa: E731
                self._add(_Action(both, ((out, form),), bind))
                return True
            if len(arrays) != 1 or by_part is None or sum(by_part) != 1:
                return False
            # Let the value before the operation be summed: a loop that stacks it can then sum each
            # iteration's part, which it could not if the operation stood in between.
            earlier = replace(form, chain=(_Link(equation), *form.chain))
            self._add(_Action(((arrays[0], earlier),), ((out, form),), lambda part: [part]))
            return True
        in_forms = None if form is None else _input_forms(equation, form)
        if form is None or in_forms is None:
            return False
        call = lambda *xs: [_bind_on_shards(equation, form, xs)]  # noqa: E731
        inputs = tuple(zip(equation.invars, in_forms, strict=True))
        self._add(_Action(inputs, ((out, form),), call))
        return True

    def _compute_reduction(self, equation: jaxprs.JaxprEqn, forms: set[_Form]) -> bool:
        """Reduce the shards of a value, then their results; False if the shards are not known."""
        combine = _REDUCTIONS.get(equation.primitive.name)
        if combine is None or not is_of_jax(equation.primitive):
            return False
        if any(isinstance(form, _Sum) for form in forms):
            return False
        (x,), (out,) = equation.invars, equation.outvars
        layout, axes = self._known_layout(x), equation.params["axes"]
        if layout is None or (layout.is_flat and len(axes) < len(layout.shape)):
            return False
        form: ShardLayout | None = None
        if layout.axis is not None and layout.axis not in axes:
            left = layout.axis - sum(a < layout.axis for a in axes)
            form = replace(layout, shape=out.aval.shape, axis=left)  # type: ignore[attr-defined]
        params = equation.params | ({"axes": (0,)} if layout.is_flat else {})

        def call(part: Any) -> list[Any]:
            if layout.is_flat:  # padding must not count
                part = jnp.where(layout.is_inside(), part, jnp.asarray(combine.start, part.dtype))
            reduced = equation.primitive.bind(part, **params)
            return [combine.over_replicas(reduced, layout.members) if form is None else reduced]

        self._has_losses |= self._is_before_sums
        self._add(_Action(((x, layout),), ((out, form),), call))
        return True

    def _known_layout(self, x: Any) -> ShardLayout | None:
        """Return the layout of the shards from which to reduce `x`; None to reduce it whole.

        `x` must be equal on all replicas. It must come by elementwise operations from values whose
        shards are available: sharded inputs, or values that a later equation needs as shards.
        """
        if self._varies is None or isinstance(x, jaxprs.Literal) or self._varies.get(x, True):
            return None
        layouts, seen, rest = set[ShardLayout | None](), {x}, [x]
        # A loss, such as of a regularizer, needs no collective if the weights are gathered anyway.
        # After the gradients are summed, gathered weights would be kept for it.
        is_whole = self._is_before_sums
        while rest:  # back to the values whose shards are known, through elementwise operations
            v = rest.pop()
            if v in self._shards.layouts:
                layouts.add(self._shards.layouts[v])
                is_whole = is_whole and v in self._whole
            elif self._forms(v):
                is_whole = False
                form = _only(self._forms(v))
                layouts.add(form if isinstance(form, ShardLayout) else None)
            else:
                maker = self._makers.get(v)
                by_part = _full_inputs(maker) if maker is not None else None
                if maker is None or by_part is None:
                    return None
                pairs = zip(maker.invars, by_part, strict=True)
                new = [w for w, is_part in pairs if is_part and w not in seen]
                seen.update(new)
                rest += new
        return next(iter(layouts)) if len(layouts) == 1 and not is_whole else None

    def _compute_nested(self, equation: jaxprs.JaxprEqn, wanted: Sequence[set[_Form]]) -> bool:
        """Rewrite the body of a loop or checkpoint to take and return shards.

        Return False if the equation is neither, or none of its inputs and outputs can be a shard.
        """
        body = _CalledJaxpr.of(equation)
        if body is None:
            return False
        forms = [_only(some) for some in wanted]
        ins, outs = body.takes(self._shards), body.returns(forms)
        for i, form in body.sums(forms, self._makers).items():
            ins[body.consts + i] = outs[i] = form
        for i, v in enumerate(equation.outvars):  # gathered where they are used, not here
            if wanted[i] and v in self._shards.layouts:
                outs[i] = self._shards.layouts[v]
        plan = self._plan_body(body, ins, outs)
        if plan is None:
            return False
        if not body.is_loop:
            used = zip(equation.invars, body.jaxpr.invars, strict=True)
            self.gathered.update(self._shards.sources[x] for x, v in used if v in plan.gathered)
        # Accumulated carries start at zero: make the zeros as shards, and never whole.
        zeros = {i: _aval(body.jaxpr.invars[i], ins[i]) for i in body.carried if ins[i]}
        pairs = zip(equation.invars, ins, strict=True)
        given = tuple(pair for i, pair in enumerate(pairs) if i not in zeros)

        def call(*xs: Any) -> Sequence[Any]:
            every = dict(zip([i for i in range(len(ins)) if i not in zeros], xs, strict=True))
            every |= {i: jnp.zeros(a.shape, a.dtype) for i, a in zeros.items()}
            return body.call(plan, [every[i] for i in range(len(ins))])

        self._add(_Action(given, tuple(zip(equation.outvars, outs, strict=True)), call))
        return True

    def _compute_branches(self, equation: jaxprs.JaxprEqn, wanted: Sequence[set[_Form]]) -> bool:
        """Rewrite the branches of a conditional to take and return shards; False if impossible.

        The condition must be equal on all replicas, because branches may contain collectives.
        """
        if equation.primitive.name != "cond" or not is_of_jax(equation.primitive):
            return False
        branches = equation.params["branches"]
        chosen, *inputs = equation.invars
        # Inside of a loop or checkpoint it is not known whether the condition is equal.
        if self._varies is None or any(branch.consts for branch in branches):
            return False
        varying = [isinstance(x, jaxprs.Var) and self._varies.get(x, True) for x in equation.invars]
        wholes_or_shards = [_only(forms) for forms in wanted]
        outs = [f if isinstance(f, ShardLayout) else None for f in wholes_or_shards]
        if varying[0] or not any(outs):
            return False
        ins: list[_Form] = [None] * len(inputs)
        plans = self._plan_branches(branches, ins, outs, varying[1:])
        for i, x in enumerate(inputs):
            forms = set[_Form]().union(*(p.forms_of_input(i) for p in plans))
            known = self._shards.layouts.get(x) if isinstance(x, jaxprs.Var) else None
            form = _only(forms) if forms else known
            ins[i] = form if isinstance(form, ShardLayout) else None
        plans = self._plan_branches(branches, ins, outs, varying[1:])
        given = ((chosen, None), *zip(inputs, ins, strict=True))

        def call(index: Any, *xs: Any) -> Sequence[Any]:
            found: Sequence[Any] = jax.lax.switch(index, [plan.run for plan in plans], *xs)
            return found

        self._add(_Action(given, tuple(zip(equation.outvars, outs, strict=True)), call))
        return True

    def _plan_branches(
        self, branches: Sequence[Any], ins: list[_Form], outs: Sequence[_Form], varying: list[bool]
    ) -> "list[_ShardedJaxpr]":
        """Plan branches; change the forms of inputs that one of them must have whole to None."""
        # A form that is changed to None stays None, so this ends; likewise in `_plan_body`.
        while True:
            plans = [
                _ShardedJaxpr(b.jaxpr, ins, outs, self._reduce_dtype, varying) for b in branches
            ]
            whole = [
                i
                for i, form in enumerate(ins)
                if form and any(p.forms_of_input(i) - {form} for p in plans)
            ]
            if not whole:
                return plans
            for i in whole:
                ins[i] = None

    def _plan_body(
        self, body: "_CalledJaxpr", ins: list[_Form], outs: list[_Form]
    ) -> "_ShardedJaxpr | None":
        """Plan a body; change the forms of inputs and outputs that it must have whole to None."""
        while any((*ins, *outs)):
            layers = body.layers_in(ins), body.layers_out(outs)
            plan = _ShardedJaxpr(body.jaxpr, *layers, self._reduce_dtype)
            # An iteration that uses all of a constant would gather it again: gather it before.
            again = {i for i in body.repeated if body.jaxpr.invars[i] in plan.gathered}
            accumulated = [i for i in body.carried if ins[i]]
            lost = {i for i in accumulated if not plan.uses_only(body.jaxpr.invars[i], ins[i])}
            if not again | lost:
                return plan
            for i in again | lost:
                ins[i] = None
            for i in lost:
                outs[i - body.consts] = None
        return None

    def _adds_to_sum(self, equation: jaxprs.JaxprEqn) -> bool:
        """Whether an operation adds to a value that is accumulated, here or by a loop before."""
        return _is_addition(equation) and any(map(self._is_accumulated, equation.invars))

    def _is_accumulated(self, x: Any) -> bool:
        # Follow the value back, through elementwise operations, to a carry of this loop or to the
        # result of an earlier one.
        while isinstance(x, jaxprs.Var):
            if x in self._jaxpr.invars:
                return isinstance(self._in_forms[self._jaxpr.invars.index(x)], _Sum)
            maker = self._makers.get(x)
            if maker is None:
                return False
            if maker.primitive.name == "scan":
                body, i = _CalledJaxpr.of(maker), maker.outvars.index(x)
                if body is None or i >= body.carries:
                    return False
                return body.accumulates(i, self._makers)
            arrays = _variables(maker.invars)
            x = arrays[0] if len(arrays) == 1 and _sharded_inputs(maker) else None
        return False


@dataclass(frozen=True)
class _CalledJaxpr:
    """The function that a `scan` or a `checkpoint` calls.

    Attributes:
        equation: The loop or the checkpoint.
        jaxpr: The function.
        is_loop: Whether it is a `scan`, which slices and stacks some of its arrays.
        consts: The number of inputs that are the same in each iteration.
        carries: The number of inputs and outputs that each iteration passes to the next.
    """

    equation: jaxprs.JaxprEqn
    jaxpr: jaxprs.Jaxpr
    is_loop: bool
    consts: int = 0
    carries: int = 0

    @classmethod
    def of(cls, equation: jaxprs.JaxprEqn) -> "_CalledJaxpr | None":
        """Return the function of an equation; None if it is another one, or has constants."""
        name, is_loop = equation.primitive.name, equation.primitive.name == "scan"
        if not (is_loop or name in _CHECKPOINTS) or not is_of_jax(equation.primitive):
            return None
        inner: Any = equation.params["jaxpr"]
        if getattr(inner, "consts", ()):
            return None
        counts = scan_counts(equation.params) if is_loop else ()
        return cls(equation, getattr(inner, "jaxpr", inner), is_loop, *counts)

    @property
    def repeated(self) -> range:
        """The inputs that each iteration of a loop uses again."""
        return range(self.consts)

    @property
    def carried(self) -> range:
        """The inputs that each iteration of a loop passes to the next."""
        return range(self.consts, self.consts + self.carries)

    def sums(self, forms: Sequence[_Form], makers: dict[Any, Any]) -> dict[int, _Sum]:
        """Return the carries that accumulate, from zero, values wanted as sums over replicas."""
        return {
            i: form
            for i, form in enumerate(forms[: self.carries])
            if isinstance(form, _Sum) and form.is_linear and self.accumulates(i, makers)
        }

    def accumulates(self, i: int, makers: dict[Any, Any]) -> bool:
        """Whether a carry adds up values, from zeros made by `zeros_to_accumulate`."""
        x = self.equation.invars[self.consts + i]
        maker = None if isinstance(x, jaxprs.Literal) else makers.get(x)
        if maker is None or maker.primitive.name != "name":
            return False
        return bool(maker.params["name"] == _ACCUMULATED)

    def takes(self, shards: "_Shards") -> list[_Form]:
        """Return the layout of each input that may be passed as a shard; None for the others."""
        first = self.consts + self.carries
        given = self.equation.invars
        layouts = [None if isinstance(x, jaxprs.Literal) else shards.layouts.get(x) for x in given]
        # Not the carries of a loop: in the next iteration they are other values, whose shards are
        # not known.
        is_usable = lambda i, c: i < self.consts or (i >= first and _is_stack(c))  # noqa: E731
        return [c if not self.is_loop or is_usable(i, c) else None for i, c in enumerate(layouts)]

    def returns(self, forms: Sequence[_Form]) -> list[_Form]:
        """Return the form of each output that may be returned other than whole, else None."""
        is_usable = lambda i, f: i >= self.carries and _is_stack(f)  # noqa: E731
        return [f if not self.is_loop or is_usable(i, f) else None for i, f in enumerate(forms)]

    def layers_in(self, layouts: Sequence[_Form]) -> list[_Form]:
        """Return the layouts of the inputs of one iteration: of a stack, those of one layer."""
        first = self.consts + self.carries
        return [c.layer if c and self.is_loop and i >= first else c for i, c in enumerate(layouts)]

    def layers_out(self, forms: Sequence[_Form]) -> list[_Form]:
        """Return the forms of the outputs of one iteration: of a stack, those of one layer."""
        first = self.carries
        return [f.layer if f and self.is_loop and i >= first else f for i, f in enumerate(forms)]

    def call(self, plan: _ShardedJaxpr, inputs: Sequence[Any]) -> Sequence[Any]:
        """Call the loop or the checkpoint with a rewritten function."""
        params, traced = self.equation.params, plan.traced()
        new = traced if isinstance(params["jaxpr"], ClosedJaxpr) else traced.jaxpr
        results: Sequence[Any] = self.equation.primitive.bind(*inputs, **(params | {"jaxpr": new}))
        return results


class _Shards:
    """Sharded inputs, and values that conversions, slices and loops make of their shards alone.

    Attributes:
        layouts: The layout of each value's shards.
        sources: The input that each value comes from.
    """

    def __init__(self) -> None:
        self.layouts: dict[Any, ShardLayout] = {}
        self.sources: dict[Any, Any] = {}

    @classmethod
    def of(
        cls, inputs: Sequence[Any], forms: Sequence[_Form], equations: Sequence[jaxprs.JaxprEqn]
    ) -> "_Shards":
        """Follow the shards of some inputs through equations."""
        found = cls()
        for v, layout in zip(inputs, forms, strict=True):
            if isinstance(layout, ShardLayout):
                found.layouts[v], found.sources[v] = layout, v
        for equation in equations:
            found.follow(equation)
        return found

    def follow(self, equation: jaxprs.JaxprEqn) -> None:
        """Record the results of an equation that can be computed from the shards of its inputs."""
        body = _CalledJaxpr.of(equation)
        if body is not None:
            self._follow_body(body)
            return
        x = equation.invars[0] if equation.invars else None
        if isinstance(x, jaxprs.Var) and x in self.layouts:
            layout = _moved(equation, self.layouts[x])
            if layout is not None:
                (out,) = equation.outvars
                self.layouts[out], self.sources[out] = layout, self.sources[x]

    def _follow_body(self, body: _CalledJaxpr) -> None:
        """Follow layers that a loop stacks again, such as weights kept for the gradients."""
        ins = [c if i not in body.repeated else None for i, c in enumerate(body.takes(self))]
        if not any(ins):
            return
        equations, outs = _inlined(body.jaxpr)
        inner = _Shards.of(body.jaxpr.invars, body.layers_in(ins), equations)
        outer = dict(zip(body.jaxpr.invars, body.equation.invars, strict=True))
        for out, x in list(zip(body.equation.outvars, outs, strict=True))[body.carries :]:
            if isinstance(x, jaxprs.Literal) or x not in inner.layouts:
                continue
            layout = inner.layouts[x]
            if body.is_loop:
                assert layout.axis is not None
                shape = out.aval.shape  # type: ignore[attr-defined]
                layout = replace(layout, shape=shape, axis=layout.axis + 1)
            self.layouts[out], self.sources[out] = layout, self.sources[outer[inner.sources[x]]]


@dataclass(frozen=True)
class _Reduction:
    """How to combine the results of the replicas' shards.

    Attributes:
        start: The value that changes no result.
        over_replicas: Combines the results.
    """

    start: Any
    over_replicas: Callable[[Any, Any], Any]


# There is no all-reduce of booleans: "and" counts the replicas that have a False.
_REDUCTIONS = {
    "reduce_sum": _Reduction(0, lambda x, groups: _psum(x, groups)),
    "reduce_and": _Reduction(True, lambda x, groups: _psum((~x).astype(jnp.int32), groups) == 0),
}


def _psum(x: Any, groups: Any) -> Any:
    return jax.lax.psum(x, REPLICA_AXIS, axis_index_groups=groups)


def _only(forms: set[_Form]) -> _Form:
    """Return the form in which a value is wanted; whole if there are several."""
    (form,) = forms if len(forms) == 1 else (None,)
    return form


def _moved(equation: jaxprs.JaxprEqn, layout: ShardLayout) -> ShardLayout | None:
    """Return the result's layout if an equation can be applied to shards; else None.

    None also for operations after which there are more bytes to gather than before.
    """
    if len(equation.outvars) != 1 or not is_of_jax(equation.primitive):
        return None
    params, axis = equation.params, layout.axis
    given, (out,) = equation.invars[0].aval, equation.outvars
    shape = out.aval.shape  # type: ignore[attr-defined]
    # Slices of stacks take layers along axis 0, so the shards must be along another one.
    match equation.primitive.name:
        case "convert_element_type":
            is_narrower = out.aval.dtype.itemsize <= given.dtype.itemsize  # type: ignore[attr-defined]
            return layout if is_narrower else None
        case "squeeze" if axis and axis not in params["dimensions"]:
            before = sum(d < axis for d in params["dimensions"])
            return replace(layout, shape=shape, axis=axis - before)
        case "slice" | "dynamic_slice" if axis and shape[1:] == layout.shape[1:]:
            return replace(layout, shape=shape)
    return None


def _resized(equation: jaxprs.JaxprEqn, layout: ShardLayout) -> dict[str, Any]:
    """Return the parameters of an equation of `_moved`, for a shard of its input."""
    params, axis = dict(equation.params), layout.axis
    for key in ("limit_indices", "slice_sizes"):
        if key in params and axis is not None:
            params[key] = (*params[key][:1], *layout.part_shape[1:])
    return params


def _has_effects(equation: jaxprs.JaxprEqn) -> bool:
    # JAX counts naming a mesh axis as an effect, but it is not observable.
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def _aval(v: Any, form: _Form) -> jax.ShapeDtypeStruct:
    """Return the shape and type that a value has in some form."""
    shape, dtype = v.aval.shape, v.aval.dtype
    if isinstance(form, _Sum):
        shape, dtype = form.layout.part_shape, form.dtype_of(v)
    elif form is not None:
        shape = form.part_shape
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=v.aval.weak_type)


def _is_addition(equation: jaxprs.JaxprEqn) -> bool:
    is_float = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.floating)  # type: ignore[attr-defined]
    return equation.primitive.name in ("add", "add_any") and is_float


def _is_sum(equation: jaxprs.JaxprEqn) -> bool:
    params = equation.params
    return (
        equation.primitive.name == "psum"
        and is_of_jax(equation.primitive)
        and tuple(params["axes"]) == (REPLICA_AXIS,)
        and params["axis_index_groups"] is None
    )


def _sharded_inputs(equation: Any) -> tuple[bool, ...] | None:
    """Return for which inputs shards suffice to compute the result's shard; None if they do not."""
    shapes, shape = [x.aval.shape for x in equation.invars], equation.outvars[0].aval.shape
    # Only one number: broadcasting anything larger may use other elements for other shards.
    if equation.primitive.name == "broadcast_in_dim":
        return (False,) if all(math.prod(s) == 1 for s in shapes) else None
    is_known = all(s == shape or math.prod(s) == 1 for s in shapes)
    return _full_inputs(equation) if is_known else None


def _full_inputs(equation: Any) -> tuple[bool, ...] | None:
    """Return for each input whether it has the shape of the result; the others are broadcast.

    Returns:
        None if an element of the result may depend on another element of a full input.
    """
    name, shape = equation.primitive.name, equation.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        return (False,)
    constants = [x.aval.shape for x in equation.invars if isinstance(x, jaxprs.Literal)]  # type: ignore[attr-defined]
    has_constants = any(constants)
    if name not in ELEMENTWISE or not is_of_jax(equation.primitive) or not shape or has_constants:
        return None
    return tuple(x.aval.shape == shape for x in equation.invars)


def _input_forms(equation: Any, form: ShardLayout) -> tuple[_Form, ...] | None:
    """Return the input forms from which to compute the shard of the result; None if impossible."""
    by_part = _sharded_inputs(equation)
    if by_part is not None:
        return tuple(form if is_part else None for is_part in by_part)
    if form.axis is None or _full_inputs(equation) is None:
        return None
    # Such as the factors of rows and columns of Adafactor: slice those along the sharded axis.
    rank = len(equation.outvars[0].aval.shape)
    axes = equation.params.get("broadcast_dimensions", range(rank))
    forms: list[_Form] = []
    for x in equation.invars:
        shape = x.aval.shape
        if shape and len(shape) != len(axes):
            return None
        is_sliced = shape and form.axis in axes and shape[axes.index(form.axis)] != 1
        forms.append(replace(form, shape=shape, axis=axes.index(form.axis)) if is_sliced else None)
    return tuple(forms)


def _bind_on_shards(equation: Any, form: ShardLayout, xs: Sequence[Any]) -> Any:
    """Apply an elementwise operation or a broadcast to the inputs of `_input_forms`."""
    params, shape = equation.params, form.part_shape
    # Elementwise operations compute shards as they compute whole arrays. Only a broadcast has the
    # shape of its result among its parameters.
    if equation.primitive.name == "broadcast_in_dim":
        if jnp.size(xs[0]) == 1:
            return jnp.broadcast_to(jnp.reshape(xs[0], ()), shape)
        return jax.lax.broadcast_in_dim(xs[0], shape, params["broadcast_dimensions"])
    if form.is_flat:  # a single number, such as a norm, may have the rank of the whole array
        xs = [x.reshape(1) if jnp.ndim(x) > 1 else x for x in xs]
    return equation.primitive.bind(*xs, **params)


def _variables(xs: Iterable[Any]) -> list[jaxprs.Var]:
    return [x for x in xs if isinstance(x, jaxprs.Var)]


def _inlined(jaxpr: jaxprs.Jaxpr) -> tuple[list[jaxprs.JaxprEqn], list[Any]]:
    """Return the equations of a jaxpr, with those of called functions, and its outputs."""
    equations: list[jaxprs.JaxprEqn] = []

    def copy(inner: jaxprs.Jaxpr, names: dict[Any, Any], *, is_outermost: bool) -> list[Any]:
        def renamed(x: Any) -> Any:
            return x if isinstance(x, jaxprs.Literal) else names.get(x, x)

        for e in inner.eqns:
            invars = [*map(renamed, e.invars)]
            called = _called(e)
            if called is None:
                # A function that is called twice has the same variables both times.
                if not is_outermost:
                    new = [v for v in e.outvars if not isinstance(v, jaxprs.DropVar)]
                    names.update((v, jaxprs.Var(v.aval)) for v in new)
                equations.append(e.replace(invars=invars, outvars=[*map(renamed, e.outvars)]))
            else:
                own = dict(zip(called.invars, invars, strict=True))
                outs = copy(called, own, is_outermost=False)
                names.update(zip(e.outvars, outs, strict=True))
        return [*map(renamed, inner.outvars)]

    return equations, copy(jaxpr, {}, is_outermost=True)


def _called(equation: jaxprs.JaxprEqn) -> jaxprs.Jaxpr | None:
    """Return the function that an equation calls, if its equations can take its place."""
    params = equation.params
    key = _INLINED.get(equation.primitive.name)
    inner: Any = params.get(key) if key is not None else None
    if not isinstance(inner, ClosedJaxpr) or inner.consts or _has_effects(equation):
        return None
    # A call with shardings must stay, as they would be lost. JAX's class for none is private.
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    is_free = all(type(s).__name__ == "UnspecifiedValue" for s in shardings)
    return inner.jaxpr if is_free else None
