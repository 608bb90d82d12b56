"""Registration of integrations: how replicax treats the classes of another library.

`register_integration` calls an integration's ``attach`` function when the library is imported, and
attaches the handlers in the returned `Integration` to the library's classes. Programs that do not
import the library pay nothing. Equinox, Flax NNX and Keras are integrated so, see `join_libraries`.

Handlers are stored as attributes of the classes (``__rx_variable__`` and similar), which the lower
layers look up by name: they need neither a list of integrations nor an import of this package.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from replicax._src.state.variable import Variable


@dataclass(frozen=True)
class Integration:
    """Handlers for the classes of a library. Subclasses inherit the handlers of their bases.

    Attributes:
        variables: For each class whose objects hold a variable, a function that returns the
            `rx.Variable` behind an object, or None if it has none. Such objects are accepted
            wherever an `rx.Variable` is: by gradients, tapes, `reduce`, checkpoints. Checkpoints
            use the attributes ``value``, ``shape`` and ``dtype`` of an object that has none.
        pending: For each class whose objects can exist before their value does, a function that
            returns whether an object has no value yet. Checkpoints restore such an object when it
            gets its value.
        bookkeeping: For each class, the names of attributes in which the library only records
            something, such as the calls of a layer. Checkpoints do not look into them.
        opaque: For each class whose objects JAX may treat as pytrees, a function that returns
            whether an object must stay whole, because it contains variables.
        exports: For each class that `rx.saved_model.save` accepts, a function that returns an
            object's forward function and the specs of its arguments.
        checkpoint_children: For each class, a function of an object and a name in a TensorFlow
            checkpoint that returns the child of that name, or None.
        checkpoint_slots: For each optimizer class, a function of an optimizer, one of its
            variables and the name of a slot in a TensorFlow checkpoint that returns the slot
            variable, or None.

    Example:
        >>> class Parameter:
        ...     def __init__(self, value):
        ...         self.variable = rx.Variable(value)
        >>> integration = rx.extend.Integration(variables={Parameter: lambda p: p.variable})
        >>> integration.variables[Parameter](Parameter(1.0)).shape
        ()
    """

    variables: Mapping[type, Callable[[Any], Variable | None]] = field(default_factory=dict)
    pending: Mapping[type, Callable[[Any], bool]] = field(default_factory=dict)
    bookkeeping: Mapping[type, Collection[str]] = field(default_factory=dict)
    opaque: Mapping[type, Callable[[Any], bool]] = field(default_factory=dict)
    exports: Mapping[type, Callable[[Any], tuple[Callable[..., Any], Any]]] = field(
        default_factory=dict
    )
    checkpoint_children: Mapping[type, Callable[[Any, str], Any]] = field(default_factory=dict)
    checkpoint_slots: Mapping[type, Callable[[Any, Any, str], Any]] = field(default_factory=dict)


# The class attribute under which each group of handlers is stored.
_ATTRIBUTES = {
    "variables": "__rx_variable__",
    "pending": "__rx_pending__",
    "bookkeeping": "__rx_bookkeeping__",
    "opaque": "__rx_opaque__",
    "exports": "__rx_export__",
    "checkpoint_children": "__rx_part__",
    "checkpoint_slots": "__rx_slot__",
}

Attach = Callable[[], Integration]


def register_integration(library: str, attach: Attach | str) -> None:
    """Integrate another library: use its variables and models like those of replicax.

    Args:
        library: The name of the library's module, such as ``"keras"``.
        attach: A function without arguments, called once: now if the library is imported, else at
            the end of its import. It attaches hooks to the library if it needs any, and returns an
            `Integration`. Instead of the function, its place ``"module:function"``, which is
            imported only when the library is.

    Raises:
        TypeError: If ``attach`` is neither a function nor such a string, or returns no
            `Integration`, or a class of the `Integration` does not accept attributes.

    Example:
        >>> import types, sys
        >>> class Parameter:  # of a library whose variables have the attribute `data`
        ...     def __init__(self, data):
        ...         self.data = data
        >>> sys.modules["paramlib"] = types.ModuleType("paramlib")
        >>> def attach():
        ...     Parameter.data = property(
        ...         lambda p: p.variable.read_value(),
        ...         lambda p, data: vars(p).__setitem__("variable", rx.Variable(data)),
        ...     )
        ...     return rx.extend.Integration(variables={Parameter: lambda p: p.variable})
        >>> rx.extend.register_integration("paramlib", attach)
        >>> p = Parameter(3.0)
        >>> value, [gradient] = rx.value_and_grad(lambda: p.data**2, [p])()
        >>> float(value), float(gradient)
        (9.0, 6.0)
    """
    is_place = isinstance(attach, str) and ":" in attach
    if not (callable(attach) or is_place):
        raise TypeError(
            f"attach is {attach!r}; it must be a function that returns an rx.extend.Integration, or"
            ' its place, such as "mylibrary_replicax:attach".'
        )
    if library in sys.modules:
        _attach(library, attach)
    else:
        if not _finder.pending:
            sys.meta_path.insert(0, _finder)
        _finder.pending.setdefault(library, []).append(attach)


def join_libraries() -> None:
    """Register the integrations of Equinox, Flax NNX and Keras."""
    register_integration("equinox", "replicax._src.integrations.equinox_state:attach")
    register_integration("flax.nnx", "replicax._src.integrations.nnx:attach")
    register_integration("keras", "replicax._src.integrations.keras:attach")


def _attach(library: str, attach: Attach | str) -> None:
    """Call ``attach``, and attach the handlers that it returns to the library's classes."""
    if isinstance(attach, str):
        module, _, name = attach.partition(":")
        attach = getattr(importlib.import_module(module), name)
    integration: object = attach()  # type: ignore[operator]
    if not isinstance(integration, Integration):
        raise TypeError(
            f"The integration of {library} returned {integration!r}; its attach function must"
            " return an rx.extend.Integration."
        )
    for group in fields(integration):
        for kind, handler in getattr(integration, group.name).items():
            try:
                setattr(kind, _ATTRIBUTES[group.name], handler)
            except TypeError as error:
                raise TypeError(
                    f"The integration of {library} names {kind.__name__!r} in {group.name!r}, a"
                    " class that takes no attributes (it is built in or immutable): derive a class"
                    " from it, and name that."
                ) from error


class _Finder(importlib.abc.MetaPathFinder):
    """An import finder that attaches pending integrations once their library was imported.

    It takes the module's spec from the other finders.
    """

    def __init__(self) -> None:
        self.pending: dict[str, list[Attach | str]] = {}
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a library with a pending integration; None for all other modules."""
        if name not in self.pending or getattr(self._asking, "name", None) == name:
            return None
        self._asking.name = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.name = None
        if spec is not None and spec.loader is not None:
            _follow(spec.loader, self.pending[name])
        return spec


_finder = _Finder()


def _follow(loader: Any, pending: Sequence[Attach | str]) -> None:
    """Make ``loader`` attach the pending integrations after it has executed the module."""
    # Patch the loader in place: a wrapper would not be the loader that tools expect.
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        try:
            execute(module)
        except ModuleNotFoundError as error:
            if module.__name__ == "keras":  # its default backend is TensorFlow
                error.add_note(
                    "replicax runs Keras on JAX: set KERAS_BACKEND=jax in the environment of the"
                    " program, or write `keras = rx.keras` in place of `import keras`."
                )
            raise
        for attach in pending:
            _attach(module.__name__, attach)

    loader.exec_module = exec_module
