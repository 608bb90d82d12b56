"""Methods and attributes that JAX's arrays and Keras 3 have under another name, or not at all.

The class of ``x`` in ``x.method()`` is unknown, so only names with one meaning in programs for
TensorFlow are rewritten, and only if the program defines no method of that name itself.
"""

from collections.abc import Collection, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from replicax._src.port.parts import code_of

_DROPPED = "-"  # a parameter of Keras 2 that has no meaning in Keras 3
_WORKERS = ["max_queue_size", "workers", "use_multiprocessing"]
_WEIGHT = [
    *("name", "shape", "dtype", "initializer", "regularizer", "trainable", "constraint"),
    *("use_resource", "synchronization", "aggregation"),
]
# Methods of Keras 2: the names in Keras 3, and the parameters by place.
_RENAMED = {
    "add_variable": ("add_weight", _WEIGHT),
    "add_weight": ("add_weight", _WEIGHT),
    "evaluate_generator": ("evaluate", ["x", "steps", "callbacks", *_WORKERS, "verbose"]),
    "experimental_run_v2": ("run", ["fn", "args", "kwargs"]),
    "fit_generator": (
        "fit",
        [
            *("x", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
            *("validation_steps", "validation_freq", "class_weight", *_WORKERS),
            *("shuffle", "initial_epoch"),
        ],
    ),
    "predict_generator": ("predict", ["x", "steps", "callbacks", *_WORKERS, "verbose"]),
    "reset_states": ("reset_state", []),
}
# Keyword arguments of Keras 2 by method: another name, or none at all.
_KEYWORDS = {
    "add_weight": dict.fromkeys(
        ["collections", "getter", "partitioner", "synchronization", "use_resource"], _DROPPED
    ),
    "compile": {"experimental_run_tf_function": _DROPPED},
    **{
        name: dict.fromkeys(_WORKERS, _DROPPED) | {"generator": "x"}
        for name in ("evaluate", "fit", "predict")
    },
}
_AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")


def rewritten_call(call: cst.Call, functions: Collection[str]) -> cst.BaseExpression | None:
    """Return a call of a method as JAX and Keras 3 know it; None if it is not one of these.

    Args:
        call: The call.
        functions: The functions and methods that the program defines.
    """
    if m.matches(call, _DECODED) and "numpy" not in functions:
        return _decoded(call)
    if not isinstance(call.func, cst.Attribute) or call.func.attr.value in functions:
        return None
    name, receiver = call.func.attr.value, call.func.value
    if name == "reset_states" and "model" in code_of(receiver).lower():
        return None  # Keras 3 resets layers, not models
    return (None if call.args else _without_call(call, name, receiver)) or _renamed_call(call, name)


def _without_call(call: cst.Call, name: str, receiver: cst.BaseExpression) -> Any:
    """Return the replacement of a call without arguments: ``x.shape`` for ``x.get_shape()``.

    None if the method is not one that JAX or Keras 3 has as an attribute or a function.
    """
    if name == "as_list":
        return cst.Call(cst.Name("list"), [cst.Arg(receiver)], lpar=call.lpar, rpar=call.rpar)
    if name == "num_elements" and _is_shape(receiver):
        return cst.parse_expression(f"int(np.prod({code_of(receiver)}))")
    if name == "is_fully_defined" and _is_shape(receiver):
        return cst.parse_expression(f"(None not in {code_of(receiver)})")
    if name == "get_shape":
        return cst.Attribute(receiver, cst.Name("shape"), lpar=call.lpar, rpar=call.rpar)
    if name == "variables" and _is_optimizer(receiver):
        return call.func  # a method of Keras 2, a property of Keras 3
    return None


_NUMPY = m.Call(m.Attribute(attr=m.Name("numpy")), args=[])
_DECODED = m.Call(m.Attribute(value=_NUMPY, attr=m.Name("decode")))


def _decoded(call: Any) -> cst.BaseExpression:
    """Return ``np.asarray(x).item().decode()`` for ``x.numpy().decode()``."""
    array = cst.Call(cst.parse_expression("np.asarray"), [cst.Arg(call.func.value.func.value)])
    text = cst.Call(cst.Attribute(array, cst.Name("item")))
    made: cst.Call = call.with_changes(func=call.func.with_changes(value=text))
    return made


def is_empty(call: cst.CSTNode, functions: Collection[str]) -> bool:
    """Whether a call has no effect with JAX, and can be removed: ``x.set_shape(shape)``."""
    is_shape = m.matches(call, m.Call(m.Attribute(attr=m.Name("set_shape")), args=[m.Arg()]))
    return is_shape and "set_shape" not in functions


def _is_optimizer(node: cst.CSTNode) -> bool:
    return "optim" in code_of(node).rpartition(".")[2].lower()


def _renamed_call(call: cst.Call, name: str) -> cst.Call | None:
    """Return the call of a method of Keras 2 with the names of Keras 3."""
    new, places = _RENAMED.get(name, (name, ()))
    keywords = _KEYWORDS.get(new, {})
    if name == "add_weight" and not (call.args and _is_text(call.args[0])):
        places = ()  # positional arguments are those of Keras 3
    if any(arg.star for arg in call.args) and new != name and places:
        return None
    args = [
        made
        for place, arg in enumerate(call.args)
        for made in _renamed_argument(arg, place, places, keywords, is_new=new != name)
    ]
    assert isinstance(call.func, cst.Attribute)
    func = call.func.with_changes(attr=cst.Name(new))
    made = call.with_changes(func=func, args=_without_last_comma(args, call.args))
    return None if code_of(made) == code_of(call) else made


def _renamed_argument(
    arg: cst.Arg, place: int, places: Sequence[str], keywords: dict[str, str], *, is_new: bool
) -> list[cst.Arg]:
    """Return an argument under its name in Keras 3; nothing if it is dropped."""
    if arg.star:
        return [arg]
    if arg.keyword is None:
        name = places[place] if place < len(places) else ""
        if not name or (is_new and place == 0 and name in ("x", "fn")):
            return [arg]
    else:
        name = arg.keyword.value
    name = keywords.get(name, name)
    if name == _DROPPED:
        return []
    value = arg.value
    if name == "aggregation" and isinstance(value, cst.Attribute):
        member = value.attr.value
        if member in _AGGREGATIONS:
            value = cst.SimpleString(f'"{member.lower()}"')
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return [
        arg.with_changes(
            keyword=cst.Name(name),
            value=value,
            equal=equal if arg.keyword is None else arg.equal,
        )
    ]


def _without_last_comma(args: list[cst.Arg], old: Sequence[cst.Arg]) -> list[cst.Arg]:
    """Give the last argument that is left the layout of the old last one."""
    if args and len(args) != len(old):
        args[-1] = args[-1].with_changes(
            comma=old[-1].comma, whitespace_after_arg=old[-1].whitespace_after_arg
        )
    return args


def _is_text(arg: cst.Arg) -> bool:
    """Whether an argument is certainly a string."""
    if arg.keyword is not None or arg.star:
        return False
    match arg.value:
        case cst.SimpleString() | cst.FormattedString() | cst.ConcatenatedString():
            return True
        case cst.BinaryOperation(left=left, right=right):
            return _is_text(cst.Arg(left)) or _is_text(cst.Arg(right))
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value="format"))):
            return _is_text(cst.Arg(value))
    return False


def rewritten_attribute(node: cst.Attribute) -> cst.BaseExpression | None:
    """Return an attribute as JAX and Keras 3 know it; None if it is not one of these.

    ``optimizer.lr``; ``x.shape[0].value``, ``x.shape.ndims`` and ``x.shape.rank`` of shapes; and
    ``x.dtype.max`` and others of dtypes.
    """
    name, value = node.attr.value, node.value
    if name in ("lr", "_lr") and _is_optimizer(value):
        return node.with_changes(attr=cst.Name("learning_rate"))
    if isinstance(value, cst.Attribute) and value.attr.value == "dtype":
        return _of_dtype(name, value)
    if name == "value" and isinstance(value, cst.Subscript) and _is_shape(value.value):
        return value
    if name in ("ndims", "rank") and _is_shape(value):
        length = cst.Call(cst.Name("len"), [cst.Arg(value)])
        return length.with_changes(lpar=node.lpar, rpar=node.rpar)
    return None


# Attributes of TensorFlow's dtypes that NumPy's do not have.
DTYPE_ATTRIBUTES = {
    "as_numpy_dtype": "{}",
    "base_dtype": "{}",
    "is_complex": "jnp.issubdtype({}, jnp.complexfloating)",
    "is_floating": "jnp.issubdtype({}, jnp.floating)",
    "is_integer": "jnp.issubdtype({}, jnp.integer)",
    "max": "jnp.finfo({}).max",
    "min": "jnp.finfo({}).min",
}


def _of_dtype(name: str, dtype: cst.Attribute) -> cst.BaseExpression | None:
    """Return an attribute of the dtype of an array: ``x.dtype`` for ``x.dtype.base_dtype``."""
    text = DTYPE_ATTRIBUTES.get(name, "")
    return cst.parse_expression(text.format(code_of(dtype))) if text else None


def _is_shape(node: cst.CSTNode) -> bool:
    """Whether an expression is the shape of an array, judged by its name."""
    if isinstance(node, cst.Call):
        return m.matches(node, m.Call(m.Attribute(attr=m.Name("get_shape")), args=[]))
    return isinstance(node, cst.Attribute) and node.attr.value == "shape"
