"""`replicax port` gives paths of saved models and weights the endings that Keras 3 needs."""

import pytest

from replicax._src.port.rewrite import port

HEAD = (
    "import os\nimport tensorflow as tf\nfrom tensorflow.keras.callbacks import ModelCheckpoint\n"
)


def body(text):
    code = port(HEAD + text).code
    heads = ("import", "from", "ModelCheckpoint =")
    return "\n".join(line for line in code.splitlines() if not line.startswith(heads))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('m.save_weights("x")', 'm.save_weights("x.weights.h5")'),
        ('m.save_weights("a/x.h5")', 'm.save_weights("a/x.weights.h5")'),
        ('m.save_weights("x.weights.h5")', 'm.save_weights("x.weights.h5")'),
        ('m.save_weights("x", save_format="tf")', 'm.save_weights("x.weights.h5")'),
        ('m.save_weights(d + "/x")', 'm.save_weights(d + "/x.weights.h5")'),
        ('m.save_weights(d / "x")', 'm.save_weights(d / "x.weights.h5")'),
        ('m.save_weights(f"x{i}.h5")', 'm.save_weights(f"x{i}.weights.h5")'),
        ('m.save_weights("x%d" % i)', 'm.save_weights("x%d.weights.h5" % i)'),
        ('m.save_weights("x{}".format(i))', 'm.save_weights("x{}.weights.h5".format(i))'),
        ('m.save_weights(os.path.join(d, "x"))', 'm.save_weights(os.path.join(d, "x.weights.h5"))'),
        (
            'p = "x"\nm.save_weights(p)\nm.load_weights(p)',
            'p = "x"\nm.save_weights(f"{p}.weights.h5")\nm.load_weights(f"{p}.weights.h5")',
        ),
        ('m.load_weights("vgg.h5")', 'm.load_weights("vgg.h5")'),
        (
            'm.save_weights("x.h5")\nm.load_weights("x.h5")',
            'm.save_weights("x.weights.h5")\nm.load_weights("x.weights.h5")',
        ),
        ('model.save("m/")', 'model.save("m.keras")'),
        ('model.save("m.h5")', 'model.save("m.h5")'),
        (
            'model.save("m")\nn = tf.keras.models.load_model("m")',
            'model.save("m.keras")\nn = rx.keras.models.load_model("m.keras")',
        ),
        ('checkpoint.save("m")', 'checkpoint.save("m")'),
        (
            'model.save("m")\nn = tf.saved_model.load("m")',
            'model.save("m")\nn = rx.saved_model.load("m")',
        ),
        ('c = ModelCheckpoint("m")', 'c = ModelCheckpoint("m.keras")'),
        (
            'c = ModelCheckpoint(filepath="m-{epoch}", save_weights_only=True)',
            'c = ModelCheckpoint(filepath="m-{epoch}.weights.h5", save_weights_only=True)',
        ),
        (
            'a.save_weights("x")\nclass A:\n    def save_weights(self, x): ...',
            'a.save_weights("x")\nclass A:\n    def save_weights(self, x): ...',
        ),
    ],
)
def test_paths_get_the_endings_of_keras_3(text, expected):
    assert body(text) == expected


@pytest.mark.parametrize("text", ["m.save_weights(args.path)", "c = ModelCheckpoint(args.path)"])
def test_paths_with_unknown_endings_are_marked(text):
    [mark] = port(HEAD + text).marks

    assert "`.weights.h5`" in mark.words
    assert mark.line == 4
