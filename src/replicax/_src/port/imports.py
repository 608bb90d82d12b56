"""Write a program's TensorFlow names as imports, before they are resolved.

Star imports become imports by name, and aliases such as ``layers = tf.keras.layers`` become
imports, so that one mechanism follows all of them.
"""

import builtins
from collections import Counter
from types import ModuleType
from typing import Any

import libcst as cst
import libcst.matchers as m

from replicax._src.port.flow import reads, writes
from replicax._src.port.parts import Facts, code_of, is_root, statement
from replicax._src.port.paths import ROOTS
from replicax._src.port.rules import Rules, Untranslated


def normalized(module: cst.Module, facts: Facts, rules: Rules) -> cst.Module:
    """Return a program with the same lines, whose TensorFlow names are imported by name."""
    module = _by_name(module, facts, rules)
    counts = Counter(name for line in module.body for name in writes([line]))
    changed = {item.name.value for each in m.findall(module, m.Global()) for item in each.names}  # type: ignore[attr-defined]
    once = {name for name, count in counts.items() if count == 1} - changed
    paths: dict[str, str] = {}
    body = [_as_import(line, paths, once, rules) for line in module.body]
    return module.with_changes(body=body)


def _by_name(module: cst.Module, facts: Facts, rules: Rules) -> cst.Module:
    """Replace star imports by imports of the names that the program uses."""
    free = sorted(reads(module) - facts.bound.keys() - set(dir(builtins)))

    class _Stars(cst.CSTTransformer):
        def leave_ImportFrom(  # noqa: N802
            self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
        ) -> cst.ImportFrom:
            home = code_of(original_node.module)
            is_star = isinstance(original_node.names, cst.ImportStar)
            if not is_star or original_node.relative or not is_root(home):
                return updated_node
            base = _path(home)
            known = [
                name for name in free if not isinstance(rules.of(_joined(base, name)), Untranslated)
            ]
            aliases = [cst.ImportAlias(cst.Name(name)) for name in known]
            return updated_node.with_changes(names=aliases) if aliases else updated_node

    return module.visit(_Stars()) if "*" in module.code else module


def _as_import(line: Any, paths: dict[str, str], once: set[str], rules: Rules) -> Any:
    """Return ``from a import b as c`` for ``c = a.b`` of a module of TensorFlow."""
    if not isinstance(line, cst.SimpleStatementLine):
        return line
    parts = []
    for small in line.body:
        made = _alias(small, paths, once, rules)
        for name, path in _imported(made):
            if name in once:
                paths[name] = path
        parts.append(made.with_changes(semicolon=small.semicolon))
    return line.with_changes(body=parts)


def _alias(small: Any, paths: dict[str, str], once: set[str], rules: Rules) -> Any:
    simple = m.Assign(targets=[m.AssignTarget(m.Name())], value=m.Name() | m.Attribute())
    if not m.matches(small, simple):
        return small
    name, value = small.targets[0].target.value, code_of(small.value)
    root, _, rest = value.partition(".")
    if root not in paths or name not in once or not value.replace(".", "").isidentifier():
        return small
    path = _joined(paths[root], rest)
    if not path:
        return statement(f"import tensorflow as {name}")
    if not _is_module(rules.of(path)):
        return small
    home, _, last = f"tensorflow.{path}".rpartition(".")
    return statement(f"from {home} import {last}" + (f" as {name}" if name != last else ""))


def _is_module(answer: Any) -> bool:
    return isinstance(getattr(answer, "value", None), ModuleType)


def _imported(small: Any) -> list[tuple[str, str]]:
    """Return the names that an import binds, with their paths below ``tf``."""
    if isinstance(small, cst.Import):
        return [
            (alias.evaluated_alias or alias.evaluated_name, _path(alias.evaluated_name))
            for alias in small.names
            if is_root(alias.evaluated_name)
            and (alias.evaluated_alias or "." not in alias.evaluated_name)
        ]
    if not isinstance(small, cst.ImportFrom) or isinstance(small.names, cst.ImportStar):
        return []
    home = code_of(small.module)
    if small.relative or not is_root(home):
        return []
    return [
        (a.evaluated_alias or a.evaluated_name, _joined(_path(home), a.evaluated_name))
        for a in small.names
    ]


def _path(name: str) -> str:
    """Return the path below ``tf`` of a module."""
    root, _, inner = name.partition(".")
    return _joined(ROOTS[root], inner)


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)
