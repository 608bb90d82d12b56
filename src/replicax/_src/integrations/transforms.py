"""`remat` and `mixed_precision`, for plain functions, NNX modules and Keras layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.base.managers import contextmanager
from replicax._src.functions.control_flow import checkpointed
from replicax._src.functions.gradients import keep_writes
from replicax._src.state.levels import CastLevel, current_trace
from replicax._src.state.variables import variable_of

Policy = str | Sequence[str] | Callable[..., Any] | None


def remat(target: Any, policy: Policy = None) -> Any:
    """Rematerialize: compute the values inside of a function again for its gradients.

    The values need no memory between the forward and the backward pass. Sharded variables that the
    function uses are gathered again. Unlike with `jax.checkpoint`, the function may assign
    variables, and take NNX modules and arguments that are not arrays.

    Args:
        target: A function, which may be a method of an NNX module; or a Keras layer, which is
            changed and returned.
        policy: The values to keep: None for none; the name of one of `jax.checkpoint_policies`,
            such as ``"dots_with_no_batch_dims_saveable"`` (results of matrix products with
            weights); a list of names that `jax.ad_checkpoint.checkpoint_name` gave; or a policy of
            JAX.

    Raises:
        ValueError: If there is no such policy.

    Example:
        >>> w = rx.Variable(3.0)
        >>> layer = rx.remat(lambda x: jnp.sin(w * x), "dots_saveable")
        >>> gradient = rx.function(lambda x: rx.grad(lambda: layer(x), w)())
        >>> f"{float(gradient(2.0)):.4f}"
        '1.9203'
    """
    chosen = _policy(policy)
    layer: Any = getattr(sys.modules.get("keras"), "Layer", None)
    if layer is not None and isinstance(target, layer):
        target.call = remat(target.call, chosen)
        return target
    if not callable(target):
        raise TypeError(f"rx.remat needs a function or a Keras layer, got {target!r}.")

    @wraps(target)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        if not _modules((args, kwargs)):
            return checkpointed(target, chosen, args, kwargs)
        nnx: Any = sys.modules.get("flax.nnx")
        fixed = {k: x for k, x in enumerate(args) if _is_static(x)}
        fixed_named = {k: x for k, x in kwargs.items() if _is_static(x)}

        def of_arrays(given: dict[int, Any], named: dict[str, Any]) -> Any:
            every = given | fixed
            return target(*(every[i] for i in range(len(args))), **named, **fixed_named)

        given = {i: x for i, x in enumerate(args) if i not in fixed}
        named = {k: x for k, x in kwargs.items() if k not in fixed_named}
        return nnx.remat(of_arrays, policy=chosen)(given, named)

    return rematerialized


def _is_static(x: Any) -> bool:
    """Whether an argument is a Python value, and no array or module or structure of them."""
    is_data = lambda y: isinstance(y, jax.Array | np.ndarray) or _is_module(y)  # noqa: E731
    return not any(map(is_data, jax.tree.leaves(x, is_leaf=_is_module)))


def _policy(policy: Policy) -> Any:
    if policy is None or callable(policy):
        return policy
    if not isinstance(policy, str):
        return jax.checkpoint_policies.save_only_these_names(*policy)
    known = vars(jax.checkpoint_policies)
    makers = ("save_", "offload_")  # these take arguments
    if policy not in known or policy.startswith(makers):
        names = [n for n in known if not n.startswith(("_", *makers))]
        raise ValueError(
            f"There is no rematerialization policy {policy!r}. Use one of"
            f" {', '.join(sorted(names))}; a list of names that"
            " jax.ad_checkpoint.checkpoint_name gave; or None to keep nothing."
        )
    return known[policy]


def mixed_precision(fn: Callable[..., Any], dtype: Any = "bfloat16") -> Callable[..., Any]:
    """Return ``fn`` computing in a narrower type, while variables stay in their own.

    Inside of ``fn``, trainable variables and parameters of NNX modules are read in that type, and
    floating-point arguments are converted to it; its results are converted back to float32. The
    gradients of ``fn`` have the types of the variables, so optimizers update float32 values.
    Sharded variables are converted before they are gathered.

    Convert logits to float32 before a loss: ``logits.astype("float32")``. For Keras models use
    `keras.mixed_precision.set_dtype_policy("mixed_bfloat16")` instead.

    Args:
        fn: Computes a loss; it must not assign trainable variables.
        dtype: A floating-point type.

    Raises:
        ValueError: If ``dtype`` is not a floating-point type.

    Example:
        >>> w = rx.Variable(jnp.full((2, 2), 1 / 3))
        >>> def loss(x):
        ...     y = x @ w
        ...     return y.astype("float32").sum(), y.dtype
        >>> compute = rx.value_and_grad(rx.mixed_precision(loss), w, has_aux=True)
        >>> (value, inside), gradient = compute(jnp.ones((1, 2)))
        >>> str(inside), str(gradient.dtype), f"{float(value):.4f}"
        ('bfloat16', 'float32', '1.3359')
    """
    try:
        narrow = jnp.dtype(dtype)
    except TypeError:
        narrow = jnp.dtype(bool)
    if not jnp.issubdtype(narrow, jnp.floating):
        raise ValueError(f"dtype must be a floating-point type such as 'bfloat16', got {dtype!r}.")

    @wraps(fn)
    def narrowed(*args: Any, **kwargs: Any) -> Any:
        level = CastLevel(narrow, current_trace())
        modules = _modules((args, kwargs))
        cast = lambda x: _cast(x, narrow)  # noqa: E731
        args, kwargs = jax.tree.map(cast, (args, kwargs), is_leaf=_is_module)
        with level.active(), _parameters_as(modules, narrow):
            result = fn(*args, **kwargs)
        keep_writes(level)
        wide = lambda x: _cast(x, jnp.dtype("float32"), only=narrow)  # noqa: E731
        return jax.tree.map(wide, result, is_leaf=_is_module)

    return narrowed


def _cast(x: Any, dtype: Any, *, only: Any = None) -> Any:
    is_array = isinstance(x, jax.Array | np.ndarray)
    is_float = is_array and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(x, dtype) if is_float and only in (None, x.dtype) else x


def _is_module(x: Any) -> bool:
    nnx: Any = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.Module)


def _modules(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_module) if _is_module(x)]


@contextmanager
def _parameters_as(modules: list[Any], dtype: Any) -> Iterator[None]:
    """Convert the parameters of NNX modules whose values are not in an `rx.Variable`."""
    if not modules:
        yield
        return
    nnx: Any = sys.modules.get("flax.nnx")
    found = [v for m in modules for _, v in nnx.iter_graph(m) if isinstance(v, nnx.Param)]
    unique = {id(v): v for v in found}.values()
    own = [(v, v.get_value()) for v in unique if variable_of(v) is None]
    own = [(v, x) for v, x in own if isinstance(x, jax.Array)]
    for v, x in own:
        v.set_value(_cast(x, dtype))
    try:
        yield
    finally:
        for v, x in own:
            v.set_value(x)
