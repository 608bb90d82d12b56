"""The placement of the variables of a model, an optimizer or a pytree, as a table or a picture."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from replicax._src.base.rendering import Drawing, Sheet, show_bytes
from replicax._src.state.placement import Placed
from replicax._src.state.variables import variable_of
from replicax._src.topology.devices import short_name
from replicax._src.train.object_graph import graph_contents, is_variable
from replicax._src.values.per_replica import Distributed
from replicax._src.values.placement import is_traced

_MOST_DRAWN, _MOST_COLUMNS = 40, 16
_REPEATED = ("_trainable_variables", "_trainable_variables_indices")  # the model's
_FULL, _PART, _OWN, _EMPTY = "#7da7d9", "#e0a458", "#8fbf8f", "#8882"
_LEGEND = ((_FULL, "all of it"), (_PART, "a part"), (_OWN, "a value of its own"))


@dataclass(frozen=True)
class Placement:
    """The placement of variables: a table as text, a picture as SVG.

    Attributes:
        placed: The placement of each variable.

    Example:
        >>> picture = rx.debug.placement(rx.Variable(jnp.ones((2, 3)), name="w"))
        >>> picture.svg().startswith("<svg")
        True
    """

    placed: tuple[Placed, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """The bytes on each device, by the name of the device.

        Example:
            >>> rx.debug.placement({"w": rx.Variable(jnp.ones((2, 3)))}).bytes_per_device
            {'CPU:0': 24}
        """
        sums: dict[jax.Device, int] = {}
        for one in self.placed:
            for device, (_, _, size) in one.parts.items():
                sums[device] = sums.get(device, 0) + size
        ordered = sorted(sums.items(), key=lambda item: (item[0].process_index, item[0].id))
        return {short_name(device): size for device, size in ordered}

    def svg(self) -> str:
        """Return a picture with a row per variable and a column per device.

        Example:
            >>> "</svg>" in rx.debug.placement(rx.Variable(1.0)).svg()
            True
        """
        devices = sorted(
            {d for one in self.placed for d in one.parts}, key=lambda d: (d.process_index, d.id)
        )
        shown, columns = self.placed[:_MOST_DRAWN], devices[:_MOST_COLUMNS]
        left, wide, high = 300.0, 64.0, 20.0
        drawing = Drawing(left + wide * max(len(columns), 2) + 110, high * (len(shown) + 4))
        for i, device in enumerate(columns):
            middle = left + wide * i + wide / 2 - 3
            drawing.text(middle, 14, short_name(device), anchor="middle", soft=True)
        for row, one in enumerate(shown):
            top = high * (row + 1)
            name = one.name if len(one.name) < 30 else f"…{one.name[-28:]}"
            drawing.text(0, top + 14, f"{name} {one.shape}"[:46])
            for i, device in enumerate(columns):
                _draw_part(drawing, one, device, (left + wide * i, top + 3, wide - 6, high - 6))
            drawing.text(left + wide * len(columns) + 6, top + 14, show_bytes(one.most_bytes))
        bottom = high * (len(shown) + 1) + 16
        drawing.text(0, bottom, "together", soft=True)
        sums = self.bytes_per_device
        for i, device in enumerate(columns):
            middle = left + wide * i + wide / 2 - 3
            drawing.text(middle, bottom, show_bytes(sums[short_name(device)]), anchor="middle")
        for i, (colour, meaning) in enumerate(_LEGEND):
            drawing.rect(130.0 * i, bottom + high - 9, 10, 10, colour)
            drawing.text(130.0 * i + 15, bottom + high, meaning, soft=True)
        for note in _omissions(len(self.placed), len(devices)):
            drawing.text(0, bottom + 2 * high, note, soft=True)
        return str(drawing)

    def sheet(self) -> Sheet:
        """Return the placement as a table.

        Example:
            >>> rx.debug.placement(rx.Variable(1.0)).sheet().columns[0]
            'variable'
        """
        rows = [
            (one.name, str(one.shape), one.dtype, one.layout, show_bytes(one.most_bytes))
            for one in self.placed
        ]
        sums = self.bytes_per_device
        sizes = [f"{name} {show_bytes(size)}" for name, size in list(sums.items())[:8]]
        more = [f"and {len(sums) - 8:,} devices more"] if len(sums) > 8 else []
        what = "variable" if len(rows) == 1 else "variables"
        note = f"{len(rows):,} {what}; together: {', '.join([*sizes, *more]) or 'nothing'}"
        columns = ("variable", "shape", "dtype", "layout", ">bytes per device")
        return Sheet("Placement", (), columns, tuple(rows), (note,))

    def __rich__(self) -> Sheet:
        return self.sheet()

    def __str__(self) -> str:
        return str(self.sheet())

    __repr__ = __str__

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        table = f"<details><summary>as a table</summary>{self.sheet().to_html()}</details>"
        return f"<div>{self.svg()}{table}</div>"


def placement(obj: Any) -> Placement:
    """Return where the variables of an object are, without reading their values.

    Args:
        obj: A variable of replicax, Keras or Flax NNX; a model, layer, optimizer or metric; an
            array or a distributed value; or a structure or object that contains them.

    Returns:
        A `Placement`, which prints as a table, and shows as a picture in notebooks.

    Example:
        >>> strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"], variable_policy="sharded")
        >>> with strategy.scope():
        ...     model = rx.variables({"kernel": jnp.ones((128, 64)), "bias": jnp.ones(64)})
        >>> rx.debug.placement(model)
        Placement
         variable  shape      dtype    layout                           bytes per device
         bias      (64,)      float32  mirrored on 2 devices                       256 B
         kernel    (128, 64)  float32  in 2 parts, one on each replica            16 KiB
        2 variables; together: CPU:0 16.25 KiB, CPU:1 16.25 KiB
    """
    return Placement(tuple(_walk(obj)))


def _walk(root: Any) -> Iterator[Placed]:
    """Yield everything on devices that is reachable from ``root``, breadth first."""
    seen, waiting = {id(root)}, deque([("", root)])
    while waiting:
        path, x = waiting.popleft()
        if (known := _placed(path, x)) is not None:
            yield from known
            continue
        for name, part in _parts(x):
            if id(part) in seen or name in _REPEATED:
                continue
            seen.add(id(part))
            waiting.append((f"{path}/{name}".lstrip("/"), part))


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """Yield the children of an object with their names or descriptions."""
    contents = graph_contents(x)
    yield from contents.named.items()
    yield from ((label, part) for label, _, part in contents.unnamed)


def _placed(path: str, x: Any) -> list[Placed] | None:
    """Return the placement of ``x``; None if it is not on devices itself."""
    variable = variable_of(x)
    if variable is not None:
        own = getattr(x, "path", None) or variable.name.removesuffix(":0")
        name = own if isinstance(own, str) and own not in _DEFAULT_NAMES else path or own
        return [Placed.of_cell(variable.whole.cell, str(name))]
    if isinstance(x, Distributed):
        values = enumerate(x.values)
        return [p for i, v in values for p in _placed(f"{path}/replica {i}".lstrip("/"), v) or ()]
    if is_variable(x):  # a library's variable whose value no strategy manages
        x = x.get_value() if hasattr(type(x), "get_value") else getattr(x, "value", None)
        return (_placed(path, x) or []) if isinstance(x, jax.Array) else []
    if isinstance(x, jax.Array):
        return [] if is_traced(x) else [Placed.of_array(x, path or "array")]
    return None


_DEFAULT_NAMES = ("Variable", "Param", "BatchStat", "OptState", "OptVariable", "OptArray", "Cache")


def _draw_part(
    drawing: Drawing, one: Placed, device: jax.Device, box: tuple[float, float, float, float]
) -> None:
    x, y, width, height = box
    drawing.rect(x, y, width, height, _EMPTY)
    if device not in one.parts:
        return
    begin, end, size = one.parts[device]
    is_own = one.layout.startswith("a value of its own")
    colour = _OWN if is_own else _FULL if (begin, end) == (0.0, 1.0) else _PART
    begin, end = (0.0, 1.0) if is_own else (begin, end)
    tooltip = f"{one.name} on {short_name(device)}: {one.layout}, {show_bytes(size)}"
    drawing.rect(
        x + width * begin, y, max(width * (end - begin), 1.0), height, colour, tooltip=tooltip
    )


def _omissions(variables: int, devices: int) -> list[str]:
    more = []
    if variables > _MOST_DRAWN:
        more.append(f"{variables - _MOST_DRAWN:,} variables")
    if devices > _MOST_COLUMNS:
        more.append(f"{devices - _MOST_COLUMNS:,} devices")
    return [f"and {' and '.join(more)} more"] if more else []
