"""`replicax port` rewrites `if` and `while` on tensors in compiled functions, or says why not.

`tests/golden/port/autograph.py` is run beside TensorFlow by `test_port.py`; these are the forms.
"""

import textwrap

import pytest

from replicax._src.port.rewrite import port

HEAD = "import tensorflow as tf\n@tf.function\ndef f(x, y, n=3):\n"


def ported(body):
    return port(HEAD + textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n")


def lines(body):
    """The body of the ported function."""
    code = ported(body).code
    return textwrap.dedent(code[code.index("def f") :].partition("\n")[2]).strip("\n")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            "if tf.reduce_sum(x) > 0:\n    y = x\nelse:\n    y = -x\nreturn y",
            "y = rx.cond(jnp.sum(x) > 0, lambda: x, lambda: -x)\nreturn y",
        ),
        (
            "if tf.reduce_any(x):\n    y = y + 1\nreturn y",
            "y = rx.cond(jnp.any(x), lambda: y + 1, lambda: y)\nreturn y",
        ),
        (
            "s = tf.exp(x)\nif s > 1 and not s > 2:\n    return x\nreturn y",
            "s = jnp.exp(x)\n"
            "return rx.cond(jnp.logical_and(s > 1, jnp.logical_not(s > 2)), lambda: x, lambda: y)",
        ),
        (
            "return x if 0 < tf.exp(x) < 1 else y",
            "return rx.cond(jnp.logical_and(0 < jnp.exp(x), jnp.exp(x) < 1), lambda: x, lambda: y)",
        ),
        (
            "while tf.reduce_sum(x) > 1:\n    t = x / 2\n    x = t\nreturn x",
            "def loop_body(x):\n    t = x / 2\n    x = t\n    return (x,)\n"
            "(x,) = tf.while_loop(lambda x: jnp.sum(x) > 1, loop_body, [x])\nreturn x",
        ),
        (
            "if tf.exp(x) > 1:\n    y += 1\n    z = y\nelse:\n    z = x\nreturn y + z",
            "def if_true(y=y):\n    y += 1\n    z = y\n    return (y, z)\n"
            "def if_false():\n    z = x\n    return (y, z)\n"
            "y, z = rx.cond(jnp.exp(x) > 1, if_true, if_false)\nreturn y + z",
        ),
        (
            "if tf.exp(x) > 1:\n    v.assign(x)\nreturn y",
            "def if_true():\n    v.assign(x)\n"
            "rx.cond(jnp.exp(x) > 1, if_true, lambda: None)\nreturn y",
        ),
        (  # a name that is only used in the branch stays there
            "if tf.exp(x) > 1:\n    t = x + 1\n    y = t * t\nreturn y",
            "def if_true():\n    t = x + 1\n    y = t * t\n    return y\n"
            "y = rx.cond(jnp.exp(x) > 1, if_true, lambda: y)\nreturn y",
        ),
        (
            "if optimizer.iterations % 10 == 0:\n    return x\nelse:\n    return y",
            "return rx.cond(optimizer.iterations % 10 == 0, lambda: x, lambda: y)",
        ),
    ],
)
def test_control_flow_on_tensors_becomes_calls(body, expected):
    assert lines(body) == expected
    assert not ported(body).marks


@pytest.mark.parametrize(
    "body",
    [
        "if n == 3:\n    x = y\nreturn x",
        "if x is None:\n    x = y\nreturn x",
        "if tf.shape(x)[0] > 2:\n    x = y\nreturn x",
        "if x.shape[0] > 2:\n    x = y\nreturn x",
        "if tf.rank(x) == 2:\n    x = y\nreturn x",
        "while n > 0:\n    n -= 1\nreturn x",
        "return x if n else y",
    ],
)
def test_control_flow_on_python_values_stays(body):
    assert "cond" not in lines(body)
    assert "while_loop" not in lines(body)
    assert not ported(body).marks


@pytest.mark.parametrize(
    ("body", "name", "words"),
    [
        ("while tf.exp(x) > 1:\n    x -= 1\n    break\nreturn x", "while", "`break`"),
        ("while tf.exp(x) > 1:\n    x -= 1\n    continue\nreturn x", "while", "`continue`"),
        ("if tf.exp(x) > 1:\n    raise ValueError\nreturn x", "if", "`raise`"),
        ("if tf.exp(x) > 1:\n    self.x = x\nreturn x", "if", "self.x"),
        ("if tf.exp(x) > 1:\n    found.append(x)\nreturn x", "if", "found.append"),
        ("if tf.exp(x) > 1:\n    z = x\nreturn z", "if", "z may be undefined"),
        ("while tf.exp(x) > 1:\n    z = x\n    x -= 1\nreturn z", "while", "z may be undefined"),
        ("if tf.exp(x) > 1:\n    return x\nprint(y)", "if", "another does not"),
        ("g = lambda: y\nif tf.exp(x) > 1:\n    y = x\nreturn g()", "if", "another function"),
        ("global c\nif tf.exp(x) > 1:\n    c = x\nreturn c", "if", "another function"),
    ],
)
def test_control_flow_that_functions_cannot_express_is_marked(body, name, words):
    marks = [mark for mark in ported(body).marks if mark.is_left]

    assert [mark.name for mark in marks] == [name]
    assert words in marks[0].words
    assert marks[0].line == HEAD.count("\n") + 1 + body.split("\n").index(
        next(line for line in body.split("\n") if line.startswith(name))
    )


def test_a_condition_that_may_be_a_tensor_is_marked_with_the_code_to_write():
    [mark] = ported("if x > 1:\n    y = y + tf.exp(x)\nreturn y").marks

    assert not mark.is_left
    assert mark.code == "y = rx.cond(x > 1, lambda: y + jnp.exp(x), lambda: y)"
    assert (
        f"    #     {mark.code}\n    if x > 1:"
        in ported("if x > 1:\n    y = y + tf.exp(x)\nreturn y").code
    )


def test_functions_outside_of_compiled_code_stay():
    code = (
        "import tensorflow as tf\ndef f(x):\n    if tf.exp(x) > 1:\n        return x\n    return 2"
    )

    assert "cond" not in port(code).code


def test_functions_that_compiled_functions_call_are_rewritten_and_functions_of_elements_are_not():
    code = (
        "import tensorflow as tf\n"
        "def g(x):\n    return x if tf.exp(x) > 1 else -x\n"
        "def h(x):\n    return x if tf.exp(x) > 1 else -x\n"
        "data.map(h)\n"
        "@tf.function\ndef f(x):\n    h(1)\n    return g(x)\n"
    )
    new = port(code).code

    assert "def g(x):\n    return rx.cond(" in new
    assert "def h(x):\n    return x if np.exp(x) > 1 else -x" in new


def test_lines_of_marks_are_those_of_the_original():
    code = HEAD + (
        "    if tf.exp(x) > 1:\n        y += 1\n        y += 2\n    else:\n        y = x\n"
        "    z = tf.reduce_mean(y)\n    return z\n"
    )

    assert [mark.line for mark in port(code).marks] == [9]


def test_names_of_branches_are_free_names():
    code = HEAD + "    if_true = 1\n    if tf.exp(x) > 1:\n        v.assign(if_true)\n"

    assert "def if_true_():" in port(code).code
