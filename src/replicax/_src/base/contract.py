"""Contracts with other libraries: the private parts of them that replicax relies on.

A `Contract` lists these parts, each with the feature that needs it. If the installed version of the
library lacks a part, or its parameters changed, only that feature is disabled: its hooks are not
installed, and using it raises an error.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from replicax._src.base.errors import ScopeError

_EMPTY = inspect.Parameter.empty
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def never(*_: Any, **__: Any) -> bool:
    """Return False, for features that are checked elsewhere, or whose loss changes no result."""
    return False


@dataclass(frozen=True, eq=False)
class LibraryFeature:
    """A user-visible feature that works only if the library has the parts it needs.

    Attributes:
        name: The name of the feature in error messages.
        instead: The alternative that error messages suggest.
        gates: Functions of the library, usually public, that are called when the feature is used.
            They raise if it is lost. If the library has none of them, reading a variable raises.
        when: Whether a call of a gate with the given arguments, or a read of a variable, uses the
            feature.
        is_checked_by_library: Whether the library itself raises if the feature is missing; that
            error is then replaced by replicax's.
    """

    name: str
    instead: str
    gates: tuple[str, ...] = ()
    when: Callable[..., bool] = never
    is_checked_by_library: bool = False


@dataclass(frozen=True, eq=False)
class PrivatePart:
    """A private function, class or attribute of a library, with the signature replicax expects.

    Attributes:
        place: The module below the library's root, which may be empty, and the name in it:
            ``"layers.layer:Layer"``.
        feature: The feature that needs the part.
        parameters: The parameters of a function, as in its definition; defaults are compared only
            where given. None for attributes.
        is_transparent: Whether a replacement may pass unknown arguments through. Otherwise a call
            with such arguments raises if it uses the feature.
    """

    place: str
    feature: LibraryFeature
    parameters: str | None = None
    is_transparent: bool = False

    @property
    def name(self) -> str:
        """The name without module and class."""
        return self.place.rpartition(":")[2].rpartition(".")[2]


@dataclass(eq=False)
class Contract:
    """The private parts of one library that replicax relies on.

    Attributes:
        library: The name of the library in messages.
        package: The package to import, which has a ``__version__``.
        root: The package that places are relative to.
        tested: The versions that the tests run with.
        storage: The feature without which no other feature works.
        parts: The parts.
        error: The exception to raise if a lost feature is used.
        lost: The features that do not work with the installed version, with the reasons.
    """

    library: str
    package: str
    root: str
    tested: str
    storage: LibraryFeature
    parts: Sequence[PrivatePart]
    error: type[Exception] = ScopeError
    lost: dict[LibraryFeature, str] = field(default_factory=dict, init=False)
    _unseen: list[LibraryFeature] = field(
        default_factory=list, init=False
    )  # lost, without any gate

    @property
    def version(self) -> str:
        """The installed version of the library."""
        return str(importlib.import_module(self.package).__version__)

    @property
    def features(self) -> tuple[LibraryFeature, ...]:
        """All features that need a part."""
        return tuple(dict.fromkeys(part.feature for part in self.parts))

    def find(self, place: str) -> tuple[Any, str]:
        """Return the module or class that contains ``place``, and the name of the attribute."""
        module, _, path = place.partition(":")
        owner: Any = importlib.import_module(f"{self.root}.{module}".rstrip("."))
        *outer, name = path.split(".")
        return functools.reduce(getattr, outer, owner), name

    def get(self, part: PrivatePart, default: Any = None) -> Any:
        """Return a part of the library, or ``default`` if the library lacks it."""
        try:
            owner, name = self.find(part.place)
        except (ImportError, AttributeError):
            return default
        return getattr(owner, name, default)

    def lazily(self, **parts: tuple[PrivatePart, Any]) -> Callable[[str], Any]:
        """Return a module-level ``__getattr__`` that looks parts up on first use.

        This breaks an import cycle: importing the library attaches the hooks, which need the
        module.

        Args:
            **parts: For each name, the part, and its value if the library lacks it.
        """
        found: dict[str, Any] = {}

        def look_up(name: str) -> Any:
            if name not in parts:
                raise AttributeError(f"There is no private part {name!r} of {self.library}.")
            if name not in found:
                found[name] = self.get(*parts[name])
            return found[name]

        return look_up

    def fault(self, part: PrivatePart) -> str:
        """Describe how a part differs from the expected one; an empty string if it does not."""
        try:
            owner, name = self.find(part.place)
            if part.parameters is None and _mentions(owner, name):
                return ""
            found = getattr(owner, name)
            if part.parameters is None:
                return ""
            signature = inspect.signature(found)
        except (ImportError, AttributeError):
            return f"has no {part.place}"
        except (TypeError, ValueError):
            return f"has {part.place}, but not as a function"
        if _accepts(signature, part.parameters):
            return ""
        bare = [p.replace(annotation=_EMPTY) for p in signature.parameters.values()]
        shown = str(inspect.Signature(bare))
        return f"has {part.place}{shown} in place of {part.name}({part.parameters})"

    def faults(self) -> dict[LibraryFeature, str]:
        """Return the features that cannot work with this version, each with the first reason."""
        found: dict[LibraryFeature, str] = {}
        for part in self.parts:
            if part.feature not in found and (fault := self.fault(part)):
                found[part.feature] = fault
        return found

    def attach(self, replacements: Iterable[tuple[PrivatePart, Callable[[Any], Any]]]) -> None:
        """Replace functions of the library, and make the gates of lost features raise.

        Args:
            replacements: Parts, each with a function that takes the original function and returns
                its replacement. Later ones wrap earlier ones of the same place.
        """
        self.lost = self.faults()
        if self.storage in self.lost:
            return
        for part, make in replacements:
            if part.feature not in self.lost:
                owner, name = self.find(part.place)
                self._replace(owner, name, _extended(part, make, self))
        for feature in self.lost:
            if not self._close(feature):
                self._unseen.append(feature)

    def lacks(self, feature: LibraryFeature) -> str:
        """Return the error message for a feature that is lost; empty if it works."""
        return self.explain(feature, self.lost[feature]) if feature in self.lost else ""

    def require(self, feature: LibraryFeature) -> None:
        """Raise if a feature is lost.

        Raises:
            Exception: An exception of type ``self.error``, if the feature is lost.
        """
        if feature in self.lost:
            raise self.error(self.lacks(feature))

    def check_read(self, variable: Any) -> None:
        """Raise if a variable is read where a lost feature without a gate may be in use."""
        for feature in self._unseen:
            if feature.when(variable):
                raise self.error(self.lacks(feature))

    def explain(self, feature: LibraryFeature, fault: str) -> str:
        """Return the error message for a feature that cannot work."""
        others = "" if feature is self.storage else " Other features are not affected."
        return (
            f"replicax cannot support {feature.name} with {self.library} {self.version}, which"
            f" {fault}.{others} Install {self.library} {self.tested}, upgrade"
            f" replicax, or do without: {feature.instead}."
        )

    def _close(self, feature: LibraryFeature) -> bool:
        """Make the gates of a lost feature raise; return whether it has any."""
        closed = False
        for place in feature.gates:
            with contextlib.suppress(ImportError, AttributeError):
                owner, name = self.find(place)
                if callable(getattr(owner, name)):
                    self._replace(owner, name, lambda original: self._gate(feature, original))
                    closed = True
        return closed

    def _gate(self, feature: LibraryFeature, original: Any) -> Any:
        message = self.lacks(feature)

        def gate(*args: Any, **kwargs: Any) -> Any:
            if not feature.is_checked_by_library and feature.when(*args, **kwargs):
                raise self.error(message)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if feature.is_checked_by_library and feature.when(*args, **kwargs):
                    raise self.error(message) from error
                raise

        return gate

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        new: Any = functools.wraps(original)(make(original))
        with contextlib.suppress(TypeError, ValueError):  # functions in C have no signature
            new.__signature__ = inspect.signature(original)  # libraries derive configs from it
        setattr(owner, name, new)
        if isinstance(owner, ModuleType):  # modules that imported the function by name
            for module in list(sys.modules.values()):
                is_theirs = getattr(module, "__name__", "").partition(".")[0] == self._top
                if is_theirs and vars(module).get(name) is original:
                    setattr(module, name, new)

    @property
    def _top(self) -> str:
        return self.root.partition(".")[0]


def _mentions(owner: Any, name: str) -> bool:
    """Whether methods of a class read or write an attribute of that name."""
    functions = (f for c in getattr(owner, "__mro__", ()) for f in vars(c).values())
    codes = (getattr(inspect.unwrap(f), "__code__", None) for f in functions if callable(f))
    return any(code is not None and name in code.co_names for code in codes)


def _accepts(signature: inspect.Signature, expected: str) -> bool:
    """Whether a function with ``signature`` can be called and replaced as ``expected``."""
    known = _parse(expected)
    found = list(signature.parameters.values())
    by_position = [p.name for p in found if p.kind in _BY_POSITION]
    first = [p.name for p in known if p.kind in _BY_POSITION]
    # A parameter inserted in between would change the meaning of positional arguments.
    if by_position[: len(first)] != first:
        return False
    for p in known:
        theirs = signature.parameters.get(p.name)
        if theirs is None or not _is_like(theirs, p):
            return False
    names = {p.name for p in known}
    return all(p.default is not _EMPTY or p.kind in _VARIADIC for p in found if p.name not in names)


def _is_like(found: inspect.Parameter, expected: inspect.Parameter) -> bool:
    """Whether a parameter has a compatible kind, and the expected default if there is one."""
    only_one_way = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY)
    is_passed_so = found.kind is expected.kind or (
        expected.kind in only_one_way and found.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    has_default = expected.default is _EMPTY or (
        type(found.default) is type(expected.default) and found.default == expected.default
    )
    return is_passed_so and has_default


@functools.cache
def _parse(text: str) -> tuple[inspect.Parameter, ...]:
    """Parse a parameter list such as ``"self, x, y=1"``; defaults must be literals."""
    tree = ast.parse(f"def f({text}): ...").body[0].args  # type: ignore[attr-defined]
    kinds = inspect.Parameter
    by_position: list[Any] = [(a, kinds.POSITIONAL_ONLY) for a in tree.posonlyargs]
    by_position += [(a, kinds.POSITIONAL_OR_KEYWORD) for a in tree.args]
    defaults = [None] * (len(by_position) - len(tree.defaults)) + tree.defaults
    found: list[Any] = [(*pair, d) for pair, d in zip(by_position, defaults, strict=True)]
    if tree.vararg:
        found.append((tree.vararg, kinds.VAR_POSITIONAL, None))
    pairs = zip(tree.kwonlyargs, tree.kw_defaults, strict=True)
    found += [(a, kinds.KEYWORD_ONLY, d) for a, d in pairs]
    if tree.kwarg:
        found.append((tree.kwarg, kinds.VAR_KEYWORD, None))
    return tuple(
        inspect.Parameter(a.arg, kind, default=_EMPTY if d is None else ast.literal_eval(d))
        for a, kind, d in found
    )


def _extended(
    part: PrivatePart, make: Callable[[Any], Any], contract: Contract
) -> Callable[[Any], Any]:
    """Extend ``make`` to handle optional parameters that the replacement does not know.

    A call that passes such a parameter bypasses the replacement if the part is transparent,
    raises if the call uses the feature, and otherwise runs the original function.
    """
    known = {p.name for p in _parse(part.parameters or "")}

    def extend(original: Any) -> Any:
        signature = inspect.signature(original)
        others = {n: p for n, p in signature.parameters.items() if n not in known}
        replacement = make(original)
        if not others:
            return replacement

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            extra = {n: bound.arguments.pop(n) for n in others if n in bound.arguments}
            unknown = {n: x for n, x in extra.items() if x is not others[n].default}
            if not unknown:
                return replacement(*bound.args, **bound.kwargs)
            is_positional = any(others[n].kind is inspect.Parameter.VAR_POSITIONAL for n in unknown)
            if part.is_transparent and not is_positional:
                named = {n: x for n, x in unknown.items() if others[n].kind not in _VARIADIC}
                for n in unknown.keys() - named.keys():
                    named |= unknown[n]
                passing = functools.partial(original, **named)
                return make(passing)(*bound.args, **bound.kwargs)
            if part.feature.when(*args, **kwargs):
                names = ", ".join(unknown)
                fault = f"was given {names} in {part.place}, which replicax does not know"
                raise contract.error(contract.explain(part.feature, fault))
            return original(*args, **kwargs)

        return call

    return extend
