"""CSV files drawn at random, and how to read them: the same for TensorFlow and for replicax.

Numbers, quotes, ends of lines and delimiters are mixed so that most files are broken somewhere.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NUM_CASES = 600
_MOST_RECORDS = 40
_FIELDS = [
    *("1", "-2", "3.5", "1e3", "nan", "inf", "", "", "x", "NA", " 4", "5 ", "+6", "0x1F"),
    *("99999999999", "1e400", "é", "\ufeff7", "a b", "'q'", "1_0", "."),
    *('"', '""', '""""', '"a"', '"a""b"', '"1"', '"NA"', '"a,b"', '"a;b"', '"a\nb"', '"a\r\nb"'),
    *('a"b', 'a"', '"a"b', '"a" ', ' "a"', '"a""', '"\r', "\x00"),
]
_PLAIN = [field for field in _FIELDS if '"' not in field]
_ENDS = ["\n", "\n", "\n", "\r\n", "\r", "\n\n", "\r\r", "\n\r"]


class Case(NamedTuple):
    """One file, and the arguments of `CsvDataset` by name; columns are the kinds of defaults."""

    text: str
    columns: list[str]
    options: dict[str, Any]

    def defaults(self, int32: Any, float32: Any, string: Any) -> list[Any]:
        """The record_defaults, given the dtypes of a library."""
        kinds = {"int": int32, "float": float32, "text": string}
        known = {"int?": [7], "float?": [0.5], "text?": ["none"]}
        return [kinds[kind] if kind in kinds else known[kind] for kind in self.columns]


def cases(count: int = NUM_CASES, seed: int = 0) -> list[Case]:
    """The files, the same in every process."""
    draw = random.Random(seed)
    return [_case(draw) for _ in range(count)]


def outcome(iterator: Iterator[Any], failure: type[Exception], listed: Callable[..., Any]) -> Any:
    """All records as lists, with an "error" in the place of each that fails."""
    found: list[Any] = []
    while len(found) < _MOST_RECORDS:
        try:
            found.append([_plain(value) for value in listed(next(iterator))])
        except StopIteration:
            return found
        except failure:
            found.append("error")
    return found


def _plain(value: Any) -> Any:
    """A value as JSON tells it, with NaN equal to itself."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return int(value) if getattr(value.dtype, "kind", "") == "i" else repr(float(value))


def _case(draw: random.Random) -> Case:
    width = draw.choice([1, 2, 2, 3])
    end = draw.choice(_ENDS)
    fields = _PLAIN if draw.random() < 0.3 else _FIELDS
    delimiter = draw.choice([",", ",", ",", ";", "\t"])
    lines = []
    for _ in range(draw.randint(0, 5)):
        count = width if draw.random() < 0.85 else draw.randint(0, 4)
        lines.append(delimiter.join(draw.choice(fields) for _ in range(count)))
    ends = [end if draw.random() < 0.9 else draw.choice(_ENDS) for _ in lines]
    if ends and draw.random() < 0.4:
        ends[-1] = ""
    text = "".join(line + end for line, end in zip(lines, ends, strict=True))
    options: dict[str, Any] = {"field_delim": delimiter}
    if draw.random() < 0.25:
        options["use_quote_delim"] = False
    if draw.random() < 0.3:
        options["header"] = True
    if draw.random() < 0.3:
        options["na_value"] = "NA"
    places = range(width)
    if draw.random() < 0.3:
        places = sorted(draw.sample(range(4), draw.randint(1, 2)))
        options["select_cols"] = list(places)
    kinds = ["text", "text?", "text?", "int", "int?", "float?", "float"]
    return Case(text, [draw.choice(kinds) for _ in places], options)
