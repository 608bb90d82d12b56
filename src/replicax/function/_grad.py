"""Gradients with respect to variables."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from replicax._errors import VariableError
from replicax.context._current import current
from replicax.variables._held import variable_of
from replicax.variables._levels import Overlay, current_trace, level
from replicax.variables._policy import write_own
from replicax.variables._variable import Variable


def value_and_grad(
    fn: Callable[..., Any], variables: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that computes ``fn`` and its gradients with respect to variables.

    Assignments that ``fn`` makes are kept. Inside `strategy.run` the gradients are this replica's
    own; all-reduce them before they are applied.

    Args:
        fn: Returns a scalar, or a scalar and something else with ``has_aux``.
        variables: A variable or a structure of them.
        has_aux: Whether ``fn`` returns a pair.

    Returns:
        A function of the arguments of ``fn`` that returns its result, and the gradients in the
        structure of ``variables``.

    Raises:
        TypeError: If ``variables`` holds something else, or ``fn`` returns no scalar array.

    Example:
        >>> w = rx.Variable(3.0)
        >>> value, gradient = rx.value_and_grad(lambda x: w * w * x, w)(2.0)
        >>> float(value), float(gradient)
        (18.0, 12.0)
    """
    leaves, treedef = jax.tree.flatten(variables, is_leaf=_is_variable)
    if not leaves:
        raise TypeError(
            f"value_and_grad needs the variables to differentiate with respect to, got"
            f" {variables!r}. Write `rx.value_and_grad(fn, [w, b])`; for arguments, use"
            " jax.value_and_grad."
        )
    given = [_checked(v) for v in leaves]
    # A variable that is named twice has one gradient, and gets it twice.
    cells = list(dict.fromkeys(v.cell for v in given))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        overlays: list[Overlay] = []
        around = current_trace()

        def pure(values: list[jax.Array]) -> tuple[jax.Array, Any]:
            overlay = Overlay(dict(zip(cells, values, strict=True)), around)
            with overlay.opened():
                result = fn(*args, **kwargs)
            loss, aux = _pair(result) if has_aux else (result, None)
            overlays.append(overlay)
            return _scalar(loss), (aux, list(overlay.writes.values()))

        values = [next(v for v in given if v.cell is c).read_value() for c in cells]
        (loss, (aux, new)), gradients = jax.value_and_grad(pure, has_aux=True)(values)
        _keep(overlays[-1], new)
        own = dict(zip(cells, gradients, strict=True))
        gradients = [own[v.cell] for v in given]
        return ((loss, aux) if has_aux else loss), jax.tree.unflatten(treedef, gradients)

    return wrapped


def _keep(overlay: Overlay, values: Iterable[Any]) -> None:
    """Write what was written in an overlay to what is outside."""
    outside, replica = level(), current().replica
    for cell, value in zip(overlay.writes, values, strict=True):
        if outside.is_eager and replica is not None and not cell.per_replica:
            write_own(cell, value, replica)
        else:
            outside.write(cell, value)


def grad(
    fn: Callable[..., Any], variables: Any = None, has_aux: bool = False
) -> Callable[..., Any]:
    """Like `value_and_grad`, without the value.

    Example:
        >>> w = rx.Variable(3.0)
        >>> float(rx.grad(lambda: w * w, w)())
        6.0
    """
    both = value_and_grad(fn, variables, has_aux)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result, gradients = both(*args, **kwargs)
        return (gradients, result[1]) if has_aux else gradients

    return wrapped


def _is_variable(x: Any) -> bool:
    return variable_of(x) is not None


def _checked(x: Any) -> Variable:
    v = variable_of(x)
    if v is None:
        raise TypeError(
            f"value_and_grad differentiates with respect to variables, got {x!r}"
            f" ({type(x).__name__}). For arrays, use jax.value_and_grad."
        )
    if not jnp.issubdtype(v.dtype, jnp.inexact):
        raise VariableError(
            f"Variable {v.name!r} of dtype {v.dtype} has no gradient; only floating-point"
            " variables have one."
        )
    return v


def _pair(result: Any) -> tuple[Any, Any]:
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise TypeError(
        "With has_aux=True the function given to value_and_grad must return a pair, the loss and"
        f" something else; got {type(result).__name__}."
    )


def _scalar(loss: Any) -> jax.Array:
    if isinstance(loss, jax.Array | float | int) and jnp.shape(loss) == ():
        return jnp.asarray(loss)
    what = (
        f"shape {jnp.shape(loss)}" if isinstance(loss, jax.Array) else f"type {type(loss).__name__}"
    )
    raise TypeError(
        f"The function given to value_and_grad must return one scalar, got {what}. Reduce it, for"
        " example with `rx.nn.compute_average_loss(per_example_loss, global_batch_size=...)`;"
        " return more than the loss with `has_aux=True`."
    )
