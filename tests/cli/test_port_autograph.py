"""`replicax port` rewrites control flow on tensors in compiled functions, or says why not.

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
            "k = tf.reduce_max(x)\nfor i in tf.range(k):\n    y = y + x[i]\nreturn y",
            "k = jnp.max(x)\ndef loop_body(i, y):\n    y = y + x[i]\n    return i + 1, y\n"
            "i, y = tf.while_loop(lambda i, y: i < k, loop_body, [0, y])\nreturn y",
        ),
        (
            "k = tf.constant(3)\nfor _ in tf.range(k - 1, -1, -2):\n    v.assign_add(y)\nreturn y",
            "k = rx.constant(3)\ndef loop_body(turn):\n    v.assign_add(y)\n    return turn - 2\n"
            "tf.while_loop(lambda turn: turn > -1, loop_body, [k - 1])\nreturn y",
        ),
        (  # the bound is computed once
            "k = tf.constant(3)\nfor i in tf.range(k * 2):\n    k = k + i\nreturn k",
            "k = rx.constant(3)\nlimit = k * 2\n"
            "def loop_body(i, k):\n    k = k + i\n    return i + 1, k\n"
            "i, k = tf.while_loop(lambda i, k: i < limit, loop_body, [0, k])\nreturn k",
        ),
        (
            "k = tf.reduce_max(x)\nfor i in tf.range(k):\n    for j in tf.range(k):\n"
            "        if x[j] > 0.0:\n            y = y + x[i]\nreturn y",
            "k = jnp.max(x)\ndef loop_body(i, y):\n    def loop_body(j, y):\n"
            "        y = rx.cond(x[j] > 0.0, lambda: y + x[i], lambda: y)\n"
            "        return j + 1, y\n"
            "    j, y = tf.while_loop(lambda j, y: j < k, loop_body, [0, y])\n"
            "    return i + 1, y\n"
            "i, y = tf.while_loop(lambda i, y: i < k, loop_body, [0, y])\nreturn y",
        ),
        (
            "for row in tf.exp(x):\n    y = y + row\nreturn y",
            "def loop_body(y, row):\n    y = y + row\n    return y\n"
            "y = tf.foldl(loop_body, jnp.exp(x), y)\nreturn y",
        ),
        (
            "s = 0.0\nfor row in tf.exp(x):\n    y = y + row\n    s = s - row\nreturn y, s",
            "s = 0.0\ndef loop_body(state, row):\n    y, s = state\n    y = y + row\n"
            "    s = s - row\n    return y, s\n"
            "y, s = tf.foldl(loop_body, jnp.exp(x), (y, s))\nreturn y, s",
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
        "for i in tf.range(3):\n    x = x + i\nreturn x",
        "for row in tf.nn.moments(x, 0):\n    y = y + row\nreturn y",
        "found = []\nfor row in tf.exp(x):\n    found.append(row)\nreturn found",
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
        (
            "for i in tf.range(tf.size(x) + tf.argmax(x)):\n    x = next(n)\nreturn x",
            "for",
            "`next`",
        ),
        ("for i in tf.range(tf.argmax(x)):\n    y += 1\nreturn i", "for", "`i` is read after it"),
        ("for i in tf.range(tf.argmax(x)):\n    y += 1\n    break\nreturn y", "for", "`break`"),
        ("z = None\nfor i in tf.range(tf.argmax(x)):\n    z = i\nreturn z", "for", "not always"),
        ("for i in tf.range(0, 5, tf.argmax(x)):\n    y += 1\nreturn y", "for", "the sign of"),
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


def test_a_loop_whose_bound_may_be_a_tensor_is_marked_with_the_code_to_write():
    code = (
        "import tensorflow as tf\n@tf.function\ndef f(x, steps):\n"
        "    for i in tf.range(steps):\n        x = x + 1.0\n    return x\n"
    )
    [mark] = port(code).marks

    assert (mark.line, mark.name, mark.is_left) == (4, "for", False)
    assert mark.code.endswith("tf.while_loop(lambda i, x: i < steps, loop_body, [0, x])")
    assert "    for i in range(steps):" in port(code).code


def test_a_bound_of_a_loop_is_passed_as_a_number():
    code = (
        "import tensorflow as tf\n@tf.function\ndef train(it, steps):\n"
        "    for _ in tf.range(steps):\n        strategy.run(step, args=(next(it),))\n"
        "train(it, tf.convert_to_tensor(n))\ntrain(it, steps=tf.constant(5, tf.int32))\n"
    )

    assert port(code).code.endswith("train(it, n)\ntrain(it, steps=5)\n")
