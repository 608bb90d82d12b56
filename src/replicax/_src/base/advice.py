"""Advice for common mistakes, added as a note to errors of Python, JAX and other libraries."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_TAPE = (
    "compute the loss inside `with rx.GradientTape() as tape:` and call"
    " `tape.gradient(loss, variables)`, or use `rx.value_and_grad(loss_fn, variables)()`."
)

# The attribute that a program asked for, and what to write instead.
_ATTRIBUTES = {
    "backward": f"Arrays do not record what they were computed from: {_TAPE}",
    "detach": "Write `jax.lax.stop_gradient(x)`.",
    "get_shape": "Write `x.shape`.",
    "minimize": "Write `gradients = tape.gradient(loss, variables)` and then"
    " `optimizer.apply_gradients(zip(gradients, variables))`.",
    "numpy": "Write `numpy.asarray(x)`; inside of compiled code an array has no value yet.",
    "zero_grad": f"Gradients are values here, and there is nothing to reset: {_TAPE}",
}

# The type of an error, a part of its text, and advice.
_TEXTS: tuple[tuple[type[Exception], str, str], ...] = (
    (
        NameError,
        "unbound axis name",
        "Replicas reduce with `rx.distribute.get_replica_context().all_reduce('SUM', x)`, which"
        " needs no name of an axis.",
    ),
    (
        ValueError,
        "No gradients provided for any variable",
        f"Every gradient is None, because the tape did not record the variables' use: {_TAPE}",
    ),
    (
        TypeError,
        "Optimizer.update() missing 1 required positional argument: 'grads'",
        "Optimizers of Flax NNX take the model too: `optimizer.update(model, gradients)`.",
    ),
    (
        UnboundLocalError,
        "",
        "Python takes a name that a function assigns for a local one. To change an rx.Variable"
        " write `w.assign(value)`, `w.assign_add(value)` or `w.assign_sub(value)`, not"
        " `w -= value`.",
    ),
)


def advise(error: Exception) -> Exception:
    """Return ``error``, with a note that says what to write if the mistake is a known one."""
    if advice := _advice(error):
        _add_once(error, advice)
    return error


def advise_caller(
    error: Exception, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Exception:
    """Return `advise` of ``error``, with a note if ``fn`` does not take these arguments."""
    if isinstance(error, TypeError) and not _takes(fn, args, kwargs):
        count = f"{len(args)} argument" + "s" * (len(args) != 1)
        note = f"`strategy.run` passed {count} to {fn.__name__}{inspect.signature(fn)}."
        if len(args) == 1:
            note += " `args=batch` passes the parts of a batch, `args=(batch,)` the whole of it."
        _add_once(error, note)
    return advise(error)


def _advice(error: Exception) -> str:
    if isinstance(error, AttributeError):
        return _ATTRIBUTES.get(error.name or "", "")
    text = str(error)
    found = (advice for kind, part, advice in _TEXTS if isinstance(error, kind) and part in text)
    return next(found, "")


def _takes(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError:
        return not hasattr(fn, "__name__")
    except ValueError:  # a function without a signature
        return True
    return True


def _add_once(error: Exception, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
