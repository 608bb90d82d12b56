"""Programs with a gradient tape, most of them from TensorFlow's guides to differentiation.

The same code runs on TensorFlow (`make_tape.py`, which records `tape.json`) and on replicax
(`tests/functions/test_tape.py`). ``lib`` has the names that both share, and a few functions of
arrays under TensorFlow's names.
"""

import numpy as np


def simple(lib):
    x = lib.constant(3.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    return tape.gradient(y, x)


def dense_layer(lib, w, b):
    x = lib.constant([[1.0, 2.0, 3.0]])
    with lib.GradientTape(persistent=True) as tape:
        y = lib.matmul(x, w) + b
        loss = lib.reduce_mean(y * y)
    both = tape.gradient(loss, {"w": w, "b": b})
    return [both["w"], both["b"], *tape.gradient(loss, [w, b]), tape.gradient(loss, y)]


def what_is_watched(lib, a, b, c):
    untrained = c
    d = lib.constant(3.0)
    added = a + 1.0
    with lib.GradientTape(persistent=True) as tape:
        y = a * a + b * b + untrained * untrained + d * d + added
    return [tape.gradient(y, x) for x in (a, untrained, added, d, b)]


def only_what_is_asked(lib, a, b):
    with lib.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(b)
        y = lib.sin(a) + lib.sin(b)
    return [tape.gradient(y, a), tape.gradient(y, b)]


def intermediate(lib):
    x = lib.constant(3.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x * x
        z = y * y
    return [tape.gradient(z, y), tape.gradient(z, x), tape.gradient(y, x), tape.gradient(z, [x, y])]


def several_targets(lib, a):
    with lib.GradientTape(persistent=True) as tape:
        y0 = a**2
        y1 = 1.0 / a
        y2 = a * lib.constant([3.0, 4.0])
    return [
        tape.gradient({"y0": y0, "y1": y1}, a),
        tape.gradient(y2, a),
        tape.gradient([y0, y2], a, output_gradients=[lib.constant(2.0), lib.constant([1.0, -1.0])]),
    ]


def control_flow(lib, a, b):
    x = lib.constant(1.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        result = lib.cond(x > 0.0, lambda: a * 2.0, lambda: b**2)
    return [tape.gradient(result, a), tape.gradient(result, x)]


def not_connected(lib, a, b):
    with lib.GradientTape(persistent=True) as tape:
        z = b * b
    zero = lib.UnconnectedGradients.ZERO
    return [tape.gradient(z, a), tape.gradient(z, a, unconnected_gradients=zero)]


def through_an_assignment(lib, a, b):
    with lib.GradientTape(persistent=True) as tape:
        b.assign_add(a)
        y = b**2
    return [tape.gradient(y, a), tape.gradient(y, b)]


def assigned_to_itself(lib, a):
    with lib.GradientTape(persistent=True) as tape:
        a.assign(a * 2.0)
        y = a * a
    return [tape.gradient(y, a), tape.gradient(a, a)]


def through_integers(lib):
    x = lib.constant(10.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = lib.cast(lib.cast(x, "int32"), "float32") * 2.0
    return tape.gradient(y, x)


def stopped(lib, a, b):
    with lib.GradientTape(persistent=True) as tape:
        x_sq = a * a
        with tape.stop_recording():
            y_sq = b * b
        z = x_sq + y_sq
        s = x_sq + lib.stop_gradient(b * b)
    return [tape.gradient(z, a), tape.gradient(z, b), tape.gradient(s, [a, b])]


def reset(lib, a, b):
    with lib.GradientTape() as tape:
        y = b * b
        tape.reset()
        z = a * a + y
    return tape.gradient(z, [a, b])


def two_tapes(lib):
    x0, x1 = lib.constant(0.0), lib.constant(0.0)
    with lib.GradientTape() as tape0, lib.GradientTape() as tape1:
        tape0.watch(x0)
        tape1.watch(x1)
        ys = lib.sin(x0) + lib.sigmoid(x1)
    return [tape0.gradient(ys, x0), tape1.gradient(ys, x1)]


def second_order(lib, a):
    with lib.GradientTape() as t2:
        with lib.GradientTape() as t1:
            y = lib.sin(a) * a**3
        dy = t1.gradient(y, a)
    return [dy, t2.gradient(dy, a)]


def gradient_penalty(lib, w):
    x = lib.constant([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])
    with lib.GradientTape() as t2:
        with lib.GradientTape(watch_accessed_variables=False) as t1:
            t1.watch(x)
            y = lib.tanh(lib.matmul(x, w))
            loss = lib.reduce_sum(y * y)
        g1 = t1.gradient(loss, x)
        g1_mag = lib.reduce_sum(g1 * g1)
    return [g1_mag, t2.gradient(g1_mag, w)]


def second_order_on_one_tape(lib):
    x = lib.constant(2.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = lib.sin(x)
        dy = tape.gradient(y, x)
    return tape.gradient(dy, x)


def second_order_afterwards(lib):
    x = lib.constant(2.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = lib.sin(x)
    with lib.GradientTape() as later:
        later.watch(x)
        dy = tape.gradient(y, x)
    return later.gradient(dy, x)


def jacobian_of_a_scalar_source(lib, a):
    delta = lib.constant([-1.0, 0.0, 2.0])
    with lib.GradientTape() as tape:
        y = lib.sigmoid(a + delta)
    return tape.jacobian(y, a)


def jacobian_of_a_layer(lib, w, b):
    x = lib.constant(np.linspace(-1, 1, 6).reshape(2, 3).tolist())
    with lib.GradientTape(persistent=True) as tape:
        y = lib.tanh(lib.matmul(x, w) + b)
    return tape.jacobian(y, [w, b])


def hessian(lib, w):
    x = lib.constant(np.linspace(-1, 1, 6).reshape(2, 3).tolist())
    with lib.GradientTape() as t2:
        with lib.GradientTape() as t1:
            y = lib.sigmoid(lib.matmul(x, w))
            loss = lib.reduce_mean(y * y)
        g = t1.gradient(loss, w)
    return t2.jacobian(g, w)


def batch_jacobian(lib, w):
    x = lib.constant(np.linspace(-1, 1, 6).reshape(2, 3).tolist())
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = lib.tanh(lib.matmul(x, w))
    return tape.batch_jacobian(y, x)


def complex_numbers(lib):
    z = lib.complex(1.0, 2.0)
    with lib.GradientTape(persistent=True) as tape:
        tape.watch(z)
        y = lib.abs(z) ** 2
        h = z * z * lib.complex(1.0, 1.0)
        r = lib.real(h)
    return [lib.parts(tape.gradient(t, z)) for t in (y, h, r)]


def asked_inside(lib):
    x = lib.constant(2.0)
    with lib.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        return [tape.gradient(y, x)]


STARTS = {
    "a": (2.0, True),
    "b": (5.0, True),
    "c": (7.0, False),
    "w": (np.linspace(-0.5, 0.5, 6).reshape(3, 2).tolist(), True),
}
PROGRAMS = [
    simple,
    dense_layer,
    what_is_watched,
    only_what_is_asked,
    intermediate,
    several_targets,
    control_flow,
    not_connected,
    through_an_assignment,
    assigned_to_itself,
    through_integers,
    stopped,
    reset,
    two_tapes,
    second_order,
    gradient_penalty,
    second_order_on_one_tape,
    second_order_afterwards,
    jacobian_of_a_scalar_source,
    jacobian_of_a_layer,
    hessian,
    batch_jacobian,
    complex_numbers,
    asked_inside,
]


def variables_of(program, lib):
    """New variables, for the parameters of a program."""
    names = program.__code__.co_varnames[1 : program.__code__.co_argcount]
    return [lib.Variable(STARTS[n][0], trainable=STARTS[n][1]) for n in names]
