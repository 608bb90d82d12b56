"""Expressions of TensorFlow, for every row of the table by which `replicax port` writes JAX."""

import numpy as np


def _names(text: str) -> list[str]:
    return text.split()


_GRID = np.array([[-1.5, -0.5, 0.0], [0.5, 1.25, 2.5]], np.float32)
NAMES = {
    "a": _GRID,
    "b": np.array([[2.0, -0.5, 1.5], [0.5, 3.0, -2.0]], np.float32),
    "c": np.array([[0.25, 1.0], [-1.0, 2.0], [0.5, -0.75]], np.float32),
    "p": np.abs(_GRID) + np.float32(0.25),
    "i": np.array([[5, -3, 7], [2, 9, -4]], np.int32),
    "j": np.array([[2, 2, 3], [-3, 4, 3]], np.int32),
    "k": np.array([2, 0, 1], np.int32),
    "m": np.array([[True, False, True], [True, True, False]]),
    "n": np.array([[False, False, True], [True, False, False]]),
    "q": np.array([[np.nan, 1.0, np.inf], [-np.inf, 0.0, 2.0]], np.float32),
    "one_row": _GRID[:1],
}

_UNARY = _names(
    "abs math.abs cos math.cos cosh math.cosh exp math.exp floor math.floor math.ceil"
    " math.log_sigmoid negative math.negative nn.elu nn.gelu nn.leaky_relu nn.log_softmax"
    " math.log_softmax nn.relu nn.relu6 nn.selu nn.silu nn.swish nn.softmax math.softmax"
    " nn.softplus math.softplus nn.softsign math.softsign norm linalg.norm round math.round"
    " sigmoid math.sigmoid nn.sigmoid sign math.sign sin math.sin sinh math.sinh square"
    " math.square tan math.tan tanh math.tanh nn.tanh argsort sort ones_like zeros_like"
    " stop_gradient transpose cumsum math.cumsum math.cumprod argmax math.argmax argmin"
    " math.argmin convert_to_tensor"
)
_POSITIVE = _names("math.log math.log1p math.rsqrt sqrt math.sqrt")
_BINARY = _names(
    "divide math.divide equal math.equal greater math.greater greater_equal math.greater_equal"
    " less math.less less_equal math.less_equal math.floordiv math.mod"
    " math.floormod math.squared_difference maximum math.maximum minimum math.minimum multiply"
    " math.multiply not_equal math.not_equal subtract math.subtract"
)
_REDUCTIONS = _names(
    "math.reduce_std math.reduce_variance reduce_logsumexp math.reduce_logsumexp reduce_max"
    " math.reduce_max reduce_mean math.reduce_mean reduce_min math.reduce_min reduce_prod"
    " math.reduce_prod reduce_sum math.reduce_sum"
)
_OF_TRUTH = _names("reduce_all math.reduce_all reduce_any math.reduce_any")
_TRUTH = _names("logical_and math.logical_and logical_or math.logical_or")

_KERAS_UNARY = _names(
    "abs argmax argmin cos cumsum exp expand_dims flatten ones_like relu round sigmoid sign sin"
    " softmax softplus sqrt square stop_gradient tanh transpose zeros_like"
)
_KERAS_BINARY = _names("equal greater greater_equal less less_equal maximum minimum not_equal")
_LOSSES = _names("absolute_difference hinge_loss huber_loss mean_squared_error")
_KERAS_REDUCTIONS = _names("max mean min prod std sum var")

EXPRESSIONS = [
    *(f"tf.{name}(a)" for name in _UNARY),
    *(f"tf.{name}(p)" for name in _POSITIVE),
    *(f"tf.{name}(a, b)" for name in _BINARY),
    *(f"tf.{name}(i, j)" for name in ("math.floordiv", "math.mod", "maximum", "divide", "equal")),
    *(f"tf.{name}(m, n)" for name in _TRUTH),
    *(f"tf.{name}({'m' if name in _OF_TRUTH else 'a'})" for name in (*_REDUCTIONS, *_OF_TRUTH)),
    *(
        f"tf.{name}({'m' if name in _OF_TRUTH else 'a'}, axis=1, keepdims=True)"
        for name in (*_REDUCTIONS, *_OF_TRUTH)
    ),
    "tf.reduce_sum(a, 0, name='sum')",
    "tf.reduce_sum(i)",
    "tf.reduce_max(input_tensor=i, axis=[0, 1])",
    "tf.logical_not(m)",
    "tf.math.logical_not(m)",
    *(f"tf.{name}(q)" for name in ("math.is_nan", "math.is_inf", "math.is_finite")),
    "tf.add_n([a, b, a])",
    "tf.math.add_n([a])",
    "tf.argmax(a, axis=-1)",
    "tf.argmin(i, 1)",
    "tf.argsort(i, axis=0)",
    "tf.sort(i, 0)",
    "tf.broadcast_to(k, [2, 3])",
    "tf.cast(a, tf.int32)",
    "tf.cast(p * 1.99, dtype=tf.uint8)",
    "tf.cast(m, tf.float32)",
    "tf.cast(i, tf.bool)",
    "tf.cast(2.75, tf.int32)",
    "tf.clip_by_value(a, -1.0, 1.0)",
    "tf.concat([a, b], 0)",
    "tf.concat(axis=1, values=[a, b])",
    "tf.cond(tf.reduce_sum(p) > 0.0, lambda: a, lambda: b)",
    "tf.convert_to_tensor([1, 2, 3])",
    "tf.convert_to_tensor([1.5, 2], dtype=tf.float16)",
    "tf.cumsum(a, axis=1)",
    "tf.math.cumprod(a, axis=1)",
    "tf.einsum('ij,jk->ik', a, c)",
    "tf.linalg.einsum('ij,ij->i', a, b)",
    "tf.expand_dims(a, axis=-1)",
    "tf.eye(3)",
    "tf.linalg.eye(2, dtype=tf.int32)",
    "tf.fill([2, 3], 1.5)",
    "tf.fill([2], 3)",
    "tf.gather(a, [1, 0, 1])",
    "tf.gather(a, k, axis=1)",
    "tf.matmul(a, c)",
    "tf.linalg.matmul(c, a)",
    "tf.math.log_softmax(a, axis=0)",
    "tf.nn.softmax(a, axis=0)",
    "tf.nn.bias_add(a, [1.0, 2.0, 3.0])",
    "tf.nn.gelu(a, approximate=True)",
    "tf.nn.leaky_relu(a, alpha=0.3)",
    "tf.nn.softmax_cross_entropy_with_logits(labels=tf.nn.softmax(b), logits=a)",
    "tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(b), 40.0 * a)",
    "tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[2, 0], logits=a)",
    "tf.nn.sparse_softmax_cross_entropy_with_logits([2, 0], 40.0 * a)",
    "tf.one_hot([0, 2, 5, -1], 3)",
    "tf.one_hot(k, depth=3, dtype=tf.int32)",
    "tf.ones([2, 2])",
    "tf.ones(3, dtype=tf.int32)",
    "tf.ones_like(i, dtype=tf.float32)",
    "tf.zeros((2, 1))",
    "tf.zeros([2], tf.bool)",
    "tf.zeros_like(i)",
    "tf.pow(p, 2.5)",
    "tf.math.pow(i, 2)",
    "tf.range(4)",
    "tf.range(1, 9, 3)",
    "tf.rank(a)",
    "tf.repeat(a, 2, axis=0)",
    "tf.repeat(k, [1, 0, 2])",
    "tf.reshape(a, [3, -1])",
    "tf.reshape(tensor=a, shape=(6,))",
    "tf.reverse(a, axis=[1])",
    "tf.reverse(a, [0, 1])",
    "tf.round([0.5, 1.5, 2.5, -0.5])",
    "tf.shape(a)[0]",
    "tf.squeeze(one_row)",
    "tf.squeeze(one_row, axis=0)",
    "tf.stack([a, b])",
    "tf.stack([a, b], axis=-1)",
    "tf.tensordot(a, c, 1)",
    "tf.linalg.tensordot(a, b, axes=[[0], [0]])",
    "tf.tile(a, [2, 1])",
    "tf.transpose(a, perm=[1, 0])",
    "tf.where(m, a, b)",
    "tf.where(a > 0.0, a, 0.0)",
    "tf.compat.v1.where(m, a, b)",
    "tf.math.squared_difference(a - 1.0, b)",
    "a[:, tf.newaxis] * 2.0",
    *(f"tf.keras.backend.{name}(a)" for name in _KERAS_UNARY),
    *(f"tf.keras.backend.{name}(a, b)" for name in _KERAS_BINARY),
    *(f"tf.keras.backend.{name}(a, axis=1, keepdims=True)" for name in _KERAS_REDUCTIONS),
    *(f"tf.keras.backend.{name}(a)" for name in _KERAS_REDUCTIONS),
    "tf.keras.backend.arange(3)",
    "tf.keras.backend.batch_flatten(a)",
    "tf.keras.backend.eye(2)",
    "tf.keras.backend.gather(a, [1, 0])",
    "tf.keras.backend.hard_sigmoid(a * 2.0)",
    "tf.keras.backend.l2_normalize(a, axis=-1)",
    "tf.fill([tf.keras.backend.ndim(a)], 1.0)",
    "tf.keras.backend.one_hot(k, 3)",
    "tf.keras.backend.relu(a, alpha=0.1, max_value=1.0)",
    "tf.reshape(a, [tf.keras.backend.shape(a)[1], 2])",
    "tf.keras.backend.switch(m, a, b)",
    "tf.keras.backend.variable(3) * 2.0",
    "tf.keras.backend.all(m, axis=0)",
    "tf.keras.backend.any(m, 1)",
    "tf.keras.backend.argmax(i, 0)",
    "tf.keras.backend.binary_crossentropy(tf.nn.sigmoid(b), tf.nn.sigmoid(a))",
    "tf.keras.backend.binary_crossentropy(tf.nn.sigmoid(b), a, from_logits=True)",
    "tf.keras.backend.cast(i, 'float32')",
    "tf.keras.backend.categorical_crossentropy(tf.nn.softmax(b), tf.nn.softmax(a))",
    "tf.keras.backend.categorical_crossentropy(tf.nn.softmax(b), a, from_logits=True)",
    "tf.keras.backend.clip(a, -1.0, 1.0)",
    "tf.keras.backend.concatenate([a, b])",
    "tf.keras.backend.concatenate([a, b], axis=0)",
    "tf.keras.backend.cumsum(a, axis=1)",
    "tf.keras.backend.dot(a, c)",
    "tf.keras.backend.expand_dims(a, 0)",
    "tf.constant(tf.keras.backend.int_shape(a))",
    "tf.constant(tf.keras.backend.get_value(a))",
    "tf.keras.backend.log(p)",
    "tf.keras.backend.permute_dimensions(a, (1, 0))",
    "tf.keras.backend.pow(p, 2.5)",
    "tf.keras.backend.repeat_elements(a, 2, axis=1)",
    "tf.keras.backend.reshape(a, (3, 2))",
    "tf.keras.backend.sparse_categorical_crossentropy(k[:2], tf.nn.softmax(a))",
    "tf.keras.backend.squeeze(one_row, 0)",
    "tf.keras.backend.stack([a, b])",
    "tf.keras.backend.sum(i, [0, 1])",
    "tf.keras.backend.tile(a, [2, 1])",
    *(f"tf.compat.v1.losses.{name}(a, b)" for name in _LOSSES),
    *(f"tf.compat.v1.losses.{name}(a, b, 0.5, reduction='none')" for name in _LOSSES),
    *(
        f"tf.compat.v1.losses.mean_squared_error(a, b, {weights}, reduction='{reduction}')"
        for weights in ("p", "[[0.0], [2.0]]", "0.0")
        for reduction in (
            "weighted_sum",
            "weighted_mean",
            "weighted_sum_over_batch_size",
            "weighted_sum_by_nonzero_weights",
        )
    ),
    "tf.compat.v1.losses.cosine_distance(a, b, axis=1)",
    "tf.compat.v1.losses.huber_loss(a, b, delta=0.5)",
    "tf.compat.v1.losses.log_loss(tf.nn.sigmoid(b), tf.nn.sigmoid(a), epsilon=1e-3)",
    "tf.compat.v1.losses.sigmoid_cross_entropy(n, a, label_smoothing=0.2)",
    "tf.compat.v1.losses.softmax_cross_entropy(tf.nn.softmax(b), a, label_smoothing=0.1)",
    "tf.compat.v1.losses.softmax_cross_entropy([[1, 0, 0], [0, 0, 1]], a, [0.0, 3.0])",
    "tf.compat.v1.losses.sparse_softmax_cross_entropy([2, 0], a)",
    "tf.compat.v1.losses.sparse_softmax_cross_entropy([[2], [0]], a, weights=[[1.0], [2.0]])",
    "tf.compat.v1.losses.compute_weighted_loss(a, weights=b)",
]
