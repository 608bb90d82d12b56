"""Canonical paths of TensorFlow names: `tf.cast` for `tensorflow.compat.v1.cast` and others."""

from collections.abc import Iterator

# Top-level packages whose names are TensorFlow's, with the path of the package below `tf`.
ROOTS = {"tensorflow": "", "tf_keras": "keras", "keras": "keras"}

# Other packages that come with TensorFlow: what becomes of a program that imports them.
_DATASETS = (
    "TensorFlow Datasets reads its files with TensorFlow, which must be installed for it. Its"
    " datasets are `rx.data` datasets here."
)
# Packages in whose place ported programs import a module of replicax.
REPLACED = {"tensorflow_datasets": ("replicax.compat", "tfds")}
RELATED = {
    "tensorflow_datasets": _DATASETS,
    "tensorflow_hub": "It needs TensorFlow. Load models from `rx.keras.applications` or KerasHub.",
    "tensorflow_text": "It needs TensorFlow. Tokenize with Python in a function given to `map`.",
    "tensorflow_addons": (
        "It is no longer maintained and needs TensorFlow. Keras 3 has most of it: `AdamW`, `Lamb`,"
        " `rx.keras.losses.CategoricalFocalCrossentropy`, `rx.keras.layers.GroupNormalization`."
    ),
    "tensorflow_probability": (
        "It needs TensorFlow. Its JAX form has the same names: `from"
        " tensorflow_probability.substrates import jax as tfp`."
    ),
    "tensorflow_io": "It needs TensorFlow. Read the files with Python, in a function of `map`.",
    "tensorflow_models": "It needs TensorFlow. Copy the layers that you use, and port them.",
    "tensorflow_similarity": "It needs TensorFlow. Write its losses with jax.numpy.",
    "tensorflow_recommenders": "It needs TensorFlow. Write `rx.keras.layers.Embedding` and a task.",
    "tensorflow_gan": "It needs TensorFlow. Write the two losses and steps in `rx.function`.",
    "tensorflow_model_optimization": "It needs TensorFlow. Keras 3 has `model.quantize`.",
    "orbit": (
        "It needs TensorFlow. A controller is a loop: `for batch in rx.train.progress(batches):"
        " step(batch)`, with `rx.train.CheckpointManager` and `rx.summary`."
    ),
    "tf_slim": "It needs TensorFlow. Write `rx.keras.layers`.",
    "tf2_common": "It needs TensorFlow. Copy the functions that you use, and port them.",
}

# Paths below which the names are those of another path. The first that fits is replaced.
_MOVED = {
    "compat.v2": "",
    "_api.v2.v2": "",
    "_api.v2": "",
    ".".join(("keras", "src")): "keras",  # the implementation of Keras
    "python.keras": "keras",
    "python.data": "data",
    "python.ops.array_ops": "",
    "python.ops.math_ops": "math",
    "python.ops.nn": "nn",
    "python.ops.nn_ops": "nn",
    "python.ops.nn_impl": "nn",
    "python.ops.image_ops": "image",
    "python.ops.linalg_ops": "linalg",
    "python.ops.random_ops": "random",
    "python.ops.string_ops": "strings",
    "python.ops.lookup_ops": "lookup",
    "python.ops.init_ops": "keras.initializers",
    "python.ops.variables": "",
    "python.ops.check_ops": "debugging",
    "python.ops.control_flow_ops": "",
    "python.ops.cond": "",
    "python.ops.while_loop": "",
    "python.ops.custom_gradient": "",
    "python.ops.variable_scope": "",
    "python.framework.constant_op": "",
    "python.framework.dtypes": "",
    "python.framework.errors": "errors",
    "python.framework.errors_impl": "errors",
    "python.framework.ops": "",
    "python.framework.tensor_shape": "",
    "python.framework.tensor_spec": "",
    "python.framework.tensor_util": "",
    "python.framework.random_seed": "random",
    "python.distribute.distribution_strategy_context": "distribute",
    "python.distribute.distribute_lib": "distribute",
    "python.distribute.mirrored_strategy": "distribute",
    "python.distribute.collective_all_reduce_strategy": "distribute",
    "python.distribute.reduce_util": "distribute",
    "python.distribute.values": "distribute",
    "python.distribute.cluster_resolver": "distribute.cluster_resolver",
    "python.distribute": "distribute",
    "python.eager.backprop": "",
    "python.eager.def_function": "",
    "python.eager.context": "",
    "python.lib.io.file_io": "io.gfile",
    "python.lib.io.tf_record": "data",
    "python.platform.gfile": "compat.v1.gfile",
    "python.platform.tf_logging": "compat.v1.logging",
    "python.platform.flags": "compat.v1.flags",
    "python.platform.app": "compat.v1.app",
    "python.platform.test": "test",
    "python.saved_model": "saved_model",
    "python.summary": "summary",
    "python.training": "train",
    "python.training.tracking": "train",
    "python.tpu": "tpu",
    "python.util.nest": "nest",
    "python.profiler": "profiler",
    "core.example.example_pb2": "train",
    "core.example.feature_pb2": "train",
    "core.framework.summary_pb2": "compat.v1",
    "core.protobuf.config_pb2": "compat.v1",
    "logging": "compat.v1.logging",
    "compat.v1.gfile": "gfile",
    "contrib.data": "data.experimental",
    "contrib.distribute": "distribute",
    "contrib.framework.nest": "nest",
    "contrib.eager": "",
    "contrib.summary": "summary",
    "experimental.numpy": "numpy",
    "dtypes": "",
    "keras.backend.tf": "",
    # Names that Keras 3 has at other places than Keras 2.
    "keras.layers.experimental.preprocessing": "keras.layers",
    "keras.layers.experimental": "keras.layers",
    "keras.layers.preprocessing": "keras.layers",
    "keras.mixed_precision.experimental": "keras.mixed_precision",
    "keras.experimental": "keras.optimizers.schedules",
    "keras.optimizers.experimental": "keras.optimizers",
    "keras.optimizers.legacy": "keras.optimizers",
    "keras.callbacks.experimental": "keras.callbacks",
    "keras.utils.experimental": "keras.utils",
    "keras.engine.training": "keras",
    "keras.engine.base_layer": "keras.layers",
    "keras.engine": "keras",
    "keras.utils.np_utils": "keras.utils",
    "keras.utils.vis_utils": "keras.utils",
    "keras.utils.layer_utils": "keras.utils",
    "keras.utils.data_utils": "keras.utils",
    "keras.layers.core": "keras.layers",
    "keras.layers.convolutional": "keras.layers",
    "keras.layers.normalization": "keras.layers",
    "keras.layers.pooling": "keras.layers",
    "keras.layers.merge": "keras.layers",
    "keras.layers.embeddings": "keras.layers",
    "keras.layers.recurrent": "keras.layers",
    "keras.layers.advanced_activations": "keras.layers",
    "keras.layers.wrappers": "keras.layers",
    "keras.preprocessing.image_dataset": "keras.utils",
    "keras.preprocessing.sequence": "keras.utils",
    "keras.preprocessing.text_dataset": "keras.utils",
    "keras.applications.resnet50": "keras.applications.resnet",
}
_ORDER = sorted(_MOVED, key=len, reverse=True)
# Keras modules that TensorFlow shows at its top level too.
_KERAS_MODULES = frozenset(["initializers", "losses", "metrics", "optimizers"])
_RENAMED = {
    "keras.preprocessing.image_dataset_from_directory": "keras.utils.image_dataset_from_directory",
    "keras.preprocessing.text_dataset_from_directory": "keras.utils.text_dataset_from_directory",
    "keras.preprocessing.timeseries_dataset_from_array": (
        "keras.utils.timeseries_dataset_from_array"
    ),
    "keras.mixed_precision.set_policy": "keras.mixed_precision.set_global_policy",
    "keras.mixed_precision.global_policy": "keras.mixed_precision.dtype_policy",
    "keras.mixed_precision.Policy": "keras.DTypePolicy",
    "keras.utils.multi_gpu_model": "distribute.MirroredStrategy",
    "keras.Sequence": "keras.utils.Sequence",
    "keras.layers.LayerNorm": "keras.layers.LayerNormalization",
    "keras.layers.BatchNormalizationV1": "keras.layers.BatchNormalization",
    "keras.layers.BatchNormalizationV2": "keras.layers.BatchNormalization",
    "compat.v1.summary.FileWriter": "summary.create_file_writer",
    "compat.v1.set_random_seed": "random.set_seed",
    "set_random_seed": "random.set_seed",
    "random_normal": "random.normal",
    "keras.backend.random_normal": "random.normal",
    "keras.backend.random_uniform": "random.uniform",
    "keras.backend.truncated_normal": "random.truncated_normal",
    "random_uniform": "random.uniform",
    "truncated_normal": "random.truncated_normal",
    "random_shuffle": "random.shuffle",
    "random_crop": "image.random_crop",
    "multinomial": "random.categorical",
    "to_float": "compat.v1.to_float",
    "to_int32": "compat.v1.to_int32",
    "to_int64": "compat.v1.to_int64",
    "constant_initializer": "keras.initializers.Constant",
    "zeros_initializer": "keras.initializers.Zeros",
    "ones_initializer": "keras.initializers.Ones",
    "random_normal_initializer": "keras.initializers.RandomNormal",
    "random_uniform_initializer": "keras.initializers.RandomUniform",
    "truncated_normal_initializer": "compat.v1.truncated_normal_initializer",
    **{
        f"compat.v1.initializers.{name}": f"compat.v1.{name}_initializer"
        for name in ("random_normal", "random_uniform", "truncated_normal")
    },
    "variance_scaling_initializer": "keras.initializers.VarianceScaling",
    "glorot_uniform_initializer": "keras.initializers.GlorotUniform",
    "glorot_normal_initializer": "keras.initializers.GlorotNormal",
    "orthogonal_initializer": "keras.initializers.Orthogonal",
    "compat.v1.orthogonal_initializer": "keras.initializers.Orthogonal",
    **{
        f"keras.{module}.{short}": f"keras.losses.{name}"
        for module in ("losses", "metrics")
        for name, aliases in {
            "kl_divergence": "KLD kld kullback_leibler_divergence",
            "log_cosh": "logcosh",
            "mean_absolute_error": "MAE mae",
            "mean_absolute_percentage_error": "MAPE mape",
            "mean_squared_error": "MSE mse",
            "mean_squared_logarithmic_error": "MSLE msle",
        }.items()
        for short in aliases.split()
    },
    "keras.initializers.variance_scaling": "keras.initializers.VarianceScaling",
    "log": "math.log",
    "log1p": "math.log1p",
    "ceil": "math.ceil",
    "rint": "math.rint",
    "rsqrt": "math.rsqrt",
    "div": "compat.v1.div",
    "floordiv": "math.floordiv",
    "mod": "math.mod",
    "erf": "math.erf",
    "lgamma": "math.lgamma",
    "is_nan": "math.is_nan",
    "is_inf": "math.is_inf",
    "is_finite": "math.is_finite",
    "squared_difference": "math.squared_difference",
    "reciprocal": "math.reciprocal",
    "top_k": "math.top_k",
    "count_nonzero": "math.count_nonzero",
    "confusion_matrix": "math.confusion_matrix",
    "segment_sum": "math.segment_sum",
    "unsorted_segment_sum": "math.unsorted_segment_sum",
    "matrix_band_part": "linalg.band_part",
    "matrix_diag": "linalg.diag",
    "matrix_diag_part": "linalg.diag_part",
    "matrix_inverse": "linalg.inv",
    "matrix_transpose": "linalg.matrix_transpose",
    "matrix_determinant": "linalg.det",
    "cholesky": "linalg.cholesky",
    "svd": "linalg.svd",
    "trace": "linalg.trace",
    "diag": "linalg.tensor_diag",
    "diag_part": "linalg.tensor_diag_part",
    "self_adjoint_eig": "linalg.eigh",
    "depth_to_space": "nn.depth_to_space",
    "space_to_depth": "nn.space_to_depth",
    "is_numeric_tensor": "debugging.is_numeric_tensor",
    "check_numerics": "debugging.check_numerics",
    "assert_equal": "debugging.assert_equal",
    "assert_less": "debugging.assert_less",
    "assert_less_equal": "debugging.assert_less_equal",
    "assert_greater": "debugging.assert_greater",
    "assert_greater_equal": "debugging.assert_greater_equal",
    "assert_rank": "debugging.assert_rank",
    "string_split": "strings.split",
    "string_join": "strings.join",
    "string_to_number": "strings.to_number",
    "as_string": "strings.as_string",
    "regex_replace": "strings.regex_replace",
    "substr": "strings.substr",
    "decode_raw": "io.decode_raw",
    "read_file": "io.read_file",
    "write_file": "io.write_file",
    "parse_example": "io.parse_example",
    "parse_single_example": "io.parse_single_example",
    "FixedLenFeature": "io.FixedLenFeature",
    "VarLenFeature": "io.VarLenFeature",
    "FixedLenSequenceFeature": "io.FixedLenSequenceFeature",
    "python_io.TFRecordWriter": "io.TFRecordWriter",
    "python_io.TFRecordOptions": "io.TFRecordOptions",
    "gfile.GFile": "io.gfile.GFile",
    "gfile.Open": "io.gfile.GFile",
    "gfile.FastGFile": "io.gfile.GFile",
    "gfile.Exists": "io.gfile.exists",
    "gfile.Glob": "io.gfile.glob",
    "gfile.MakeDirs": "io.gfile.makedirs",
    "gfile.MkDir": "io.gfile.mkdir",
    "gfile.ListDirectory": "io.gfile.listdir",
    "gfile.IsDirectory": "io.gfile.isdir",
    "gfile.Copy": "io.gfile.copy",
    "gfile.Rename": "io.gfile.rename",
    "gfile.Remove": "io.gfile.remove",
    "gfile.DeleteRecursively": "io.gfile.rmtree",
    "gfile.Stat": "io.gfile.stat",
    "gfile.Walk": "io.gfile.walk",
    "tensor_scatter_update": "tensor_scatter_nd_update",
    "tensor_scatter_add": "tensor_scatter_nd_add",
    "image.resize_images": "compat.v1.image.resize",
    "image.resize_image_with_crop_or_pad": "image.resize_with_crop_or_pad",
    "ConfigProto": "compat.v1.ConfigProto",
    "io.decode_bmp": "io.decode_image",
    "image.decode_bmp": "io.decode_image",
    "image.decode_gif": "io.decode_image",
    "io.encode_jpeg": "image.encode_jpeg",
    "io.encode_png": "image.encode_png",
    "nn.softmax_cross_entropy_with_logits_v2": "nn.softmax_cross_entropy_with_logits",
    "nn.max_pool_v2": "nn.max_pool",
    "contrib.util.constant_value": "get_static_value",
    "python.client.device_lib.list_local_devices": "config.list_logical_devices",
    "distribute.MirroredStrategyV1": "distribute.MirroredStrategy",
    "distribute.CollectiveAllReduceStrategy": "distribute.MultiWorkerMirroredStrategy",
    "version.VERSION": "__version__",
    "VERSION": "__version__",
    "compat.v1.VERSION": "__version__",
    **{
        name: f"compat.v1.{name}"
        for name in (
            "enable_control_flow_v2",
            "enable_resource_variables",
            "enable_tensor_equality",
            "enable_v2_behavior",
            "enable_v2_tensorshape",
            *(
                f"train.{kind}Optimizer"
                for kind in ("Adagrad", "Adam", "Ftrl", "GradientDescent", "Momentum", "RMSProp")
            ),
        )
    },
    "compat.v1.enable_eager_execution": "enable_eager_execution",
    "contrib.eager.enable_eager_execution": "enable_eager_execution",
}
# `tf.compat.v1` functions that compute something else than those of the same name in `tf`.
_OLDER_MEANING = (
    "image.resize",
    "image.sample_distorted_bounding_box",
    "nn.dropout",
    "nn.conv2d_backprop",
    "nn.weighted_cross_entropy",
    "metrics",
    "losses",
    "layers",
    "summary.scalar",
    "summary.image",
    "summary.histogram",
    "summary.text",
    "train.",
    "saved_model",
    "get_variable",
    "estimator",
    "data.make",
    "test",
    "tpu.",
    "placeholder",
    "gradients",
    "map_fn",
    "where",
    "random_normal_initializer",
    "random_uniform_initializer",
    "truncated_normal_initializer",
    "initializers.random_",
    "initializers.truncated_normal",
)
# Of these, the names that are the same in both.
_SAME_MEANING = frozenset(
    "train." + name
    for name in (
        "Checkpoint",
        "CheckpointManager",
        "ClusterSpec",
        "BytesList",
        "Example",
        "ExponentialMovingAverage",
        "Feature",
        "FeatureList",
        "FeatureLists",
        "Features",
        "FloatList",
        "Int64List",
        "SequenceExample",
        "checkpoints_iterator",
        "get_checkpoint_state",
        "latest_checkpoint",
        "list_variables",
        "load_checkpoint",
        "load_variable",
    )
) | {"where", "map_fn", "tpu.experimental", "saved_model.load", "saved_model.save"}


# Names that Keras 3 only has to say that it has them no longer.
_STUBS = "keras.optimizers.legacy."


def candidates(path: str) -> Iterator[str]:
    """Yield the paths by which a name may be known, the most specific first.

    Example:
        >>> list(candidates("compat.v1.cast"))
        ['compat.v1.cast', 'cast']
    """
    seen: set[str] = set()
    pending = [path]
    while pending:
        current = pending.pop(0)
        if current in seen:
            continue
        seen.add(current)
        if not current.startswith(_STUBS):
            yield current
        pending += _others(current)


def _others(path: str) -> Iterator[str]:
    """Yield the paths that mean the same as ``path``."""
    if path in _RENAMED:
        yield _RENAMED[path]
    for old in _ORDER:
        if path == old or path.startswith(f"{old}."):
            yield ".".join(part for part in (_MOVED[old], path[len(old) + 1 :]) if part)
            break
    head, _, rest = path.partition(".")
    if head in _KERAS_MODULES:
        yield f"keras.{path}"
    if path.startswith("compat.v1.") and is_same_in_v2(path[len("compat.v1.") :]):
        yield path[len("compat.v1.") :]
    if head == "math" and rest and "." not in rest:
        yield rest
    if path.startswith("python.ops."):  # python.ops.<module>.<name>
        yield path.rpartition(".")[2]


def is_same_in_v2(path: str) -> bool:
    """Whether ``tf.compat.v1.<path>`` computes what ``tf.<path>`` does."""
    if path in _SAME_MEANING or path.startswith("tpu.experimental"):
        return True
    return not path.startswith(_OLDER_MEANING)
