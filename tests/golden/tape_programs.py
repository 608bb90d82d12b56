"""Random programs with gradient tapes: nested, persistent, stopped, reset, asked inside.

A program is made of a number, the same one on every machine. `make_tape_programs.py` records what
TensorFlow answers, and `tests/functions/test_tape.py` compares. ``lib`` has the names of
`tape_cases`, and ``negative``, ``identity``, ``halves``, ``joined``, ``where``, ``function``.
Every value has the shape (2, 2), so that any of them can be combined. Programs from number `WIDE`
on also split and join, branch, cast, call compiled functions, enter tapes again, and watch and
differentiate structures and variables.
"""

import random

STARTS = [[[0.5, -1.0], [1.5, 0.25]], [[-0.75, 2.0], [0.5, 1.0]], [[1.25, 0.5], [-0.5, 0.75]]]
CONSTANTS = [[[1.0, 0.5], [-0.5, 2.0]], [[0.25, -1.5], [1.0, -0.75]]]
UNARY = ["sin", "tanh", "sigmoid", "negative", "stop_gradient", "identity"]
BINARY = ["add", "multiply", "matmul", "subtract"]
WIDE = 250
WIDER = ["swap", "twice", "columns", "where", "cast", "called", "branch"]


def made(seed):
    """The statements of a program, as tuples."""
    draw = random.Random(seed)
    draw.is_wide = seed >= WIDE
    return _block(draw, depth=0, size=draw.randint(3, 7), tapes=[])


def _block(draw, depth, size, tapes):
    statements = []
    for _ in range(size):
        kinds = ["unary", "binary", "binary", "assign", "read"]
        if depth < 3:
            kinds += ["tape", "tape"] if tapes else ["tape"] * 6
        if tapes:
            kinds += ["watch", "stop", "reset", "gradient", "gradient"]
            kinds += ["binary", "variable", "variable"]
        if draw.is_wide:
            kinds += ["wider"] * 3 + ["again", "watch_all", "gradient"] * bool(tapes)
        kind = draw.choice(kinds)
        statements.append(_statement(draw, kind, depth, tapes))
    return statements


def _statement(draw, kind, depth, tapes):  # noqa: C901 - one case for each kind
    pick = lambda: draw.randint(0, 11)  # noqa: E731 - which operand, counted from the newest
    if kind == "unary":
        return kind, draw.choice(UNARY), pick()
    if kind == "wider":
        return kind, draw.choice(WIDER), pick(), pick()
    if kind == "again":
        return kind, draw.choice(tapes), _block(draw, depth + 1, draw.randint(1, 2), tapes)
    if kind == "watch_all":
        return kind, draw.choice(tapes), pick(), draw.randint(0, 2)
    if kind == "read":
        return kind, draw.randint(0, 2)
    if kind == "binary":
        return kind, draw.choice(BINARY), pick(), pick()
    if kind == "variable":
        return kind, draw.choice(BINARY), draw.randint(0, 2), pick()
    if kind == "assign":
        return kind, draw.choice(["assign", "assign_add", "assign_sub"]), draw.randint(0, 2), pick()
    if kind == "tape":
        name = len(tapes) + 10 * draw.randint(1, 10**6)
        flags = draw.random() < 0.6, draw.random() < 0.75
        inner = _block(draw, depth + 1, draw.randint(2, 5), [*tapes, name])
        asked = [_gradient(draw, name) for _ in range(draw.randint(1, 2))]
        return kind, name, *flags, inner, asked
    if kind == "stop":
        inner = _block(draw, depth + 1, draw.randint(1, 3), tapes)
        return kind, draw.choice(tapes), inner
    if kind == "watch":
        return kind, draw.choice(tapes), draw.choice(["value", "value", "variable"]), pick()
    if kind == "reset":
        return kind, draw.choice(tapes)
    return _gradient(draw, draw.choice(tapes))


def _gradient(draw, tape):
    verb = draw.choice(["gradient"] * 8 + ["jacobian", "batch_jacobian"])
    targets = [draw.randint(0, 4) for _ in range(1 if verb != "gradient" else draw.randint(1, 2))]
    sources = [("variable", i) for i in range(3)]
    sources += [("value", draw.randint(0, 11)) for _ in range(2)]
    if draw.is_wide and verb == "gradient":
        targets += [("variable", draw.randint(0, 2)) for _ in range(draw.choice([0, 0, 0, 1]))]
        sources += draw.choices(sources, k=draw.choice([0, 0, 1]))  # a source may come twice
    return "gradient", tape, verb, targets, sources, draw.random() < 0.3, draw.random() < 0.3


def variables_of(lib):
    """New variables, of which the last is not trainable."""
    return [lib.Variable(start, trainable=i < 2) for i, start in enumerate(STARTS)]


class Run:
    """A program that is run with one library.

    Attributes:
        answers: What every gradient was: a list of arrays, None, or the name of an error.
    """

    def __init__(self, lib, variables):
        self._lib, self._variables = lib, variables
        self._values = [lib.constant(c) for c in CONSTANTS]
        self._tapes = {}
        self.answers = []

    def block(self, statements):
        for kind, *rest in statements:
            getattr(self, f"_{kind}")(*rest)
        return self

    def _value(self, place):
        return self._values[-1 - place % len(self._values)]

    def _operand(self, place):
        """A value, or a variable: about as often."""
        if place % 4 == 3:
            return self._variables[place // 4]
        return self._value(place)

    def _unary(self, name, place):
        self._values.append(getattr(self._lib, name)(self._operand(place)))

    def _read(self, variable):
        # Two reads outside of tapes give one array with JAX.
        self._values.append(self._lib.identity(self._variables[variable].read_value()))

    def _binary(self, name, one, other):
        self._values.append(self._called(name, self._operand(one), self._operand(other)))

    def _variable(self, name, one, other):
        self._values.append(self._called(name, self._variables[one], self._operand(other)))

    def _called(self, name, x, y):
        if name == "matmul":
            return self._lib.matmul(x, y)
        return {"add": x.__add__, "multiply": x.__mul__, "subtract": x.__sub__}[name](y)

    def _wider(self, name, one, other):
        lib, x, y = self._lib, self._operand(one), self._operand(other)
        if name in ("swap", "twice"):  # an operation with two results, of which one may not count
            a, b = lib.halves(lib.sin(x))
            made = lib.joined(b, a) if name == "swap" else lib.joined(b, b)
        elif name == "columns":
            made = lib.reduce_sum(lib.tanh(x), 0) * y
        elif name == "where":
            made = lib.where(lib.tanh(x) > 0, lib.tanh(y), lib.sin(x))
        elif name == "cast":
            made = lib.cast(lib.cast(lib.tanh(x) * 3, "int32"), "float32") + y
        elif name == "called":
            inner = self._variables[other % 3]
            made = lib.function(lambda z: lib.tanh(z * inner) + lib.stop_gradient(z) * z)(
                lib.identity(x)
            )
        else:
            z = lib.tanh(x)
            made = lib.cond(lib.reduce_sum(z) > 0, lambda: z * y, lambda: lib.stop_gradient(z) + y)
        self._values.append(made)

    def _again(self, name, inner):
        if self._attempt(self._tapes[name].__enter__) != "error":
            try:
                self.block(inner)
            finally:
                self._tapes[name].__exit__(None, None, None)

    def _watch_all(self, name, place, variable):
        watched = {"b": self._value(place), "a": [self._variables[variable]]}
        self._attempt(self._tapes[name].watch, watched)

    def _assign(self, name, variable, place):
        value = self._lib.tanh(self._operand(place))
        getattr(self._variables[variable], name)(value)

    def _tape(self, name, persistent, watches, inner, asked):
        tape = self._lib.GradientTape(persistent=persistent, watch_accessed_variables=watches)
        self._tapes[name] = tape
        with tape:
            self.block(inner)
        self.block(asked)

    def _stop(self, name, inner):
        self._attempt(self._stopped, name, inner)

    def _stopped(self, name, inner):
        # Not a block inside of `_attempt`: an error in it is the program's own.
        with self._tapes[name].stop_recording():
            self.block(inner)

    def _watch(self, name, kind, place):
        x = self._variables[place % 3] if kind == "variable" else self._value(place)
        self._attempt(self._tapes[name].watch, x)

    def _reset(self, name):
        self._attempt(self._tapes[name].reset)

    def _gradient(self, name, verb, targets, sources, is_zero, is_weighted):
        tape = self._tapes[name]
        # The gradient of an array that no tape follows with respect to itself is an accident.
        of_variables = [self._variables[i[1]] for i in targets if isinstance(i, tuple)]
        targets = [i for i in targets if not isinstance(i, tuple)]
        known = {i % len(self._values) for i in targets}
        sources = [
            self._variables[i] if kind == "variable" else self._value(i)
            for kind, i in sources
            if kind == "variable" or i % len(self._values) not in known
        ]
        targets = [self._value(i) for i in targets] + of_variables
        zero = self._lib.UnconnectedGradients.ZERO
        options = {"unconnected_gradients": zero} if is_zero else {}
        if verb == "gradient":
            if is_weighted:
                options["output_gradients"] = [self._lib.constant(CONSTANTS[0]) for _ in targets]
            found = self._attempt(tape.gradient, targets, sources, **options)
        elif verb == "jacobian":
            found = self._attempt(tape.jacobian, targets[0], sources, **options)
        else:
            found = self._attempt(tape.batch_jacobian, targets[0], sources[-1], **options)
        if isinstance(found, str):
            return
        found = found if isinstance(found, list) else [found]
        self.answers.append(found)
        # Gradients go on: of higher order, or in assignments.
        self._values += [g for g in found[-1:] if verb == "gradient" and g is not None]

    def _attempt(self, call, *args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (RuntimeError, ValueError, AttributeError, TypeError):
            self.answers.append("error")
            return "error"
