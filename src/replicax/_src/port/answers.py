"""Advice on TensorFlow names that the port leaves as they are: what to write instead.

The keys are paths below `tf`; an entry also answers for all names below its path. The longest path
wins. ``{name}`` is the last part of the name that is looked up.
"""

_NO_GRAPHS = (
    "There are no graphs and no sessions: call the function, under `rx.function`. See"
    " docs/estimators.md."
)
_LOOP = (
    "Estimators are gone from TensorFlow too: write `rx.keras` with `fit`, or a loop. See"
    " docs/estimators.md, which ports one step by step."
)
_LITE = "replicax trains models. Export one with `rx.saved_model.save`, and convert that."
_DTENSOR = (
    "Layouts are JAX's: `rx.tpu.LayoutMap` and `strategy(..., variable_policy=)` shard variables;"
    " docs/sharding.md shows both. In place of a mesh write `jax.make_mesh`."
)
_ABSL = "Write `from absl import app, flags`, the package that TensorFlow uses for it."
_OPTIMIZER = (
    "Write the optimizer of `rx.keras.optimizers` with the same name, and"
    " `optimizer.apply_gradients(zip(gradients, variables))` with gradients from a tape."
)
_COLUMNS = "Write the layers of Keras: `rx.keras.layers.CategoryEncoding`, `Hashing`, `Embedding`."
_HOOKS = "Hooks belong to sessions: write the action in the loop, or a callback of Keras."
_COLLECTIONS = "There are no collections: read `model.variables`, or keep a list of your own."
_SUMMARY = (
    "Write `rx.summary.{name}(tag, data, step=step)` under `rx.summary.create_file_writer(folder)"
    ".as_default()`, outside of compiled functions."
)
_OTHER_PIXELS = (
    "It samples at the centers of pixels, version 1 at their corners: the numbers differ."
)
_PRIVATE = (
    "It is a private part of TensorFlow. Use what `tf` itself offers for it: see the list of names"
    " in docs/symbols.md."
)

ADVICE = {
    "version": "This is TensorFlow's version; `rx.__version__` is replicax's.",
    "autograph": (
        "Python control flow is rewritten by `replicax port`, or written as `rx.cond`, `rx.scan`"
        " and `rx.while_loop`: remove it."
    ),
    "app": _ABSL,
    "flags": _ABSL,
    "compat.v1.app": _ABSL,
    "compat.v1.flags": _ABSL,
    "contrib": "TensorFlow removed contrib. Use what `tf` itself has: see docs/symbols.md.",
    "Session": _NO_GRAPHS,
    "InteractiveSession": _NO_GRAPHS,
    "Graph": _NO_GRAPHS,
    "Operation": _NO_GRAPHS,
    "placeholder": _NO_GRAPHS,
    "placeholder_with_default": _NO_GRAPHS,
    "get_default_graph": _NO_GRAPHS,
    "get_default_session": _NO_GRAPHS,
    "reset_default_graph": "There are no graphs: remove it.",
    "import_graph_def": "Load the model with `rx.saved_model.load`, in TensorFlow's own format.",
    "GraphDef": _NO_GRAPHS,
    "RunOptions": "There are no sessions. `jax.profiler.trace(folder)` records a profile.",
    "RunMetadata": "There are no sessions. `jax.profiler.trace(folder)` records a profile.",
    "GPUOptions": "Write `rx.config.experimental.set_memory_growth(device, True)`.",
    "OptimizerOptions": "XLA always compiles: remove it.",
    "disable_eager_execution": _NO_GRAPHS,
    "disable_v2_behavior": _NO_GRAPHS,
    "disable_v2_tensorshape": "Shapes are tuples: remove it.",
    "disable_control_flow_v2": "There is no other control flow: remove it.",
    "disable_tensor_equality": "`==` compares values: write `is` to compare objects.",
    "global_variables_initializer": "Variables have their values at once: remove it.",
    "local_variables_initializer": "Variables have their values at once: remove it.",
    "variables_initializer": "Variables have their values at once: remove it.",
    "initialize_all_variables": "Variables have their values at once: remove it.",
    "tables_initializer": "Tables have their values at once: remove it.",
    "global_variables": _COLLECTIONS,
    "local_variables": _COLLECTIONS,
    "trainable_variables": _COLLECTIONS,
    "all_variables": _COLLECTIONS,
    "get_collection": _COLLECTIONS,
    "add_to_collection": _COLLECTIONS,
    "GraphKeys": _COLLECTIONS,
    "get_variable": "Write `rx.Variable(initial_value, name=...)` once, outside of the step.",
    "get_local_variable": "Write `rx.Variable(initial_value, trainable=False)`.",
    "variable_scope": "Names need no scopes: make variables once, and pass them on.",
    "get_variable_scope": "Names need no scopes: make variables once, and pass them on.",
    "AUTO_REUSE": "Variables are not found by name: make them once, and pass them on.",
    "VariableScope": "Names need no scopes: make variables once, and pass them on.",
    "assign": "Write `variable.assign(value)`.",
    "assign_add": "Write `variable.assign_add(value)`.",
    "assign_sub": "Write `variable.assign_sub(value)`.",
    "gradients": "Write `rx.GradientTape`, or `rx.value_and_grad`.",
    "hessians": "Write `jax.hessian`.",
    "Print": "Write `tf.print(x)`, or `jax.debug.print`.",
    "py_func": "Functions of elements get NumPy values: call the function itself.",
    "scatter_update": "Write `variable.scatter_nd_update`, or `x.at[indices].set(values)`.",
    "scatter_add": "Write `variable.scatter_nd_add`, or `x.at[indices].add(values)`.",
    "FIFOQueue": "Queues are datasets: write `rx.data.Dataset`.",
    "RandomShuffleQueue": "Queues are datasets: write `rx.data.Dataset.shuffle`.",
    "queue": "Queues are datasets: write `rx.data.Dataset`.",
    "io.read_graph": "There are no graphs: load models with `rx.saved_model.load`.",
    "lite": _LITE,
    "tflite": _LITE,
    "mlir": "Write `jax.jit(f).lower(x).as_text()`.",
    "xla": "`rx.function` always compiles with XLA: remove it.",
    "graph_util": _NO_GRAPHS,
    "estimator": _LOOP,
    "compat.v1.estimator": _LOOP,
    "contrib.estimator": _LOOP,
    "contrib.tpu": _LOOP,
    "keras.estimator": _LOOP,
    "feature_column": _COLUMNS,
    "keras.layers.DenseFeatures": _COLUMNS,
    "experimental.dtensor": _DTENSOR,
    "keras.dtensor": _DTENSOR,
    "experimental.tensorrt": _LITE,
    "experimental.async_scope": "Calls return before the device has finished, always: remove it.",
    "experimental.async_clear_error": "Errors are raised where they are found: remove it.",
    "experimental.function_executor_type": "XLA executes functions: remove it.",
    "experimental.register_filesystem_plugin": "Paths may be URLs: see docs/object_stores.md.",
    "experimental.Optional": "Write `rx.data.experimental.Optional`.",
    "experimental.ExtensionType": "Write a dataclass with `jax.tree_util.register_dataclass`.",
    "experimental.dispatch_for_api": "Write a function with the other meaning, and call that.",
    "experimental.extension_type": "Write `jax.tree_util.register_dataclass`.",
    "get_logger": 'Write `logging.getLogger("replicax")`.',
    "raw_ops": (
        "Raw operations are TensorFlow's kernels. Use the public function that calls this one."
    ),
    "load_op_library": "Kernels of your own are JAX's: see `jax.ffi`.",
    "load_library": "Kernels of your own are JAX's: see `jax.ffi`.",
    "sysconfig": "Kernels of your own are JAX's: see `jax.ffi`.",
    "ragged": "There are no ragged tensors: pad, with `dataset.padded_batch(n)`.",
    "RaggedTensor": "There are no ragged tensors: pad, with `dataset.padded_batch(n)`.",
    "RaggedTensorSpec": "There are no ragged tensors: pad, with `dataset.padded_batch(n)`.",
    "sparse": (
        "There are no sparse tensors on devices: `.to_dense()` of the results of"
        " `rx.io.parse_example`, or `jax.experimental.sparse`."
    ),
    "SparseTensorSpec": "There are no sparse tensors on devices: write `rx.TensorSpec`.",
    "SparseTensor": "Write `rx.io.SparseTensor`, on the host, and `.to_dense()` of it.",
    "test": (
        "Write `unittest` or pytest: `unittest.TestCase`, `np.testing.assert_allclose`,"
        " `rx.config.list_physical_devices('GPU')`, and `rx.testing` for replicas."
    ),
    "tpu.XLAOptions": "XLA always compiles: remove it.",
    "compat.v1.tpu": (
        "Sum over replicas with `rx.distribute.get_replica_context().all_reduce`; everything else"
        " of it is done by `rx.distribute.TPUStrategy`."
    ),
    "tpu.cross_replica_sum": ('Write `rx.distribute.get_replica_context().all_reduce("SUM", x)`.'),
    "tpu": "Use `rx.distribute.TPUStrategy`, and `rx.tpu.experimental`.",
    "profiler": "Write `jax.profiler.start_trace(folder)`, `stop_trace()` and `TraceAnnotation`.",
    "compat.v1.profiler": (
        "Write `jax.profiler.trace(folder)`, or `jax.jit(f).lower(x).cost_analysis()`."
    ),
    "types": "Write `Any`, or `jax.typing.ArrayLike` for tensors.",
    "compat.v1.distributions": "Write `jax.scipy.stats`, or `rx.random` to draw numbers.",
    "distributions": "Write `jax.scipy.stats`, or `rx.random` to draw numbers.",
    "layers": "Write the layer of `rx.keras.layers` with the same meaning, once, and call it.",
    "compat.v1.layers": (
        "Write the layer of `rx.keras.layers` with the same meaning, once, and call it."
    ),
    "compat.v1.losses": "Write the loss of `rx.keras.losses`, and average it yourself.",
    "compat.v1.metrics": (
        "Write `rx.metrics` or `rx.keras.metrics`: `update_state`, then `result()`."
    ),
    "compat.v1.summary": _SUMMARY,
    "compat.v1.image.resize": (
        "Version 1 samples at the corners of pixels. `tf.image.resize(images, size, method)`"
        " samples at their centers: use it if the model was not trained on the other."
    ),
    "compat.v1.nn.dropout": "Write `tf.nn.dropout(x, rate=1 - keep_prob)`.",
    "nn.rnn_cell": "Write `rx.keras.layers.LSTMCell` or `GRUCell`.",
    "nn.dynamic_rnn": "Write `rx.keras.layers.RNN(cell)`.",
    "nn.bidirectional_dynamic_rnn": "Write `rx.keras.layers.Bidirectional(layer)`.",
    "nn.static_rnn": "Write `rx.keras.layers.RNN(cell)`.",
    "train.Saver": "Write `rx.train.Checkpoint(model=model)` and `rx.train.CheckpointManager`.",
    "train.Server": (
        "There is no server to start: start the program on each machine, with `replicax launch`"
        " or TF_CONFIG."
    ),
    "train.MonitoredTrainingSession": _HOOKS,
    "train.SessionRunHook": _HOOKS,
    "train.Scaffold": _HOOKS,
    "train.init_from_checkpoint": "Write `rx.train.Checkpoint(model=model).restore(path)`.",
    "train.NewCheckpointReader": "Write `rx.train.load_checkpoint(path)`.",
    "train.get_global_step": "Write `rx.Variable(0)`, or `optimizer.iterations`.",
    "train.get_or_create_global_step": "Write `rx.Variable(0)`, or `optimizer.iterations`.",
    "train.create_global_step": "Write `rx.Variable(0)`, or `optimizer.iterations`.",
    "train.global_step": "Write `int(optimizer.iterations)`.",
    "train.exponential_decay": "Write `rx.keras.optimizers.schedules.ExponentialDecay`.",
    "train.piecewise_constant": "Write `rx.keras.optimizers.schedules.PiecewiseConstantDecay`.",
    "train.polynomial_decay": "Write `rx.keras.optimizers.schedules.PolynomialDecay`.",
    "train.cosine_decay": "Write `rx.keras.optimizers.schedules.CosineDecay`.",
    "train.Coordinator": "Datasets start and stop their own threads: remove it.",
    "train.start_queue_runners": "Datasets start and stop their own threads: remove it.",
    "train.batch": "Write `rx.data.Dataset.batch`.",
    "train.shuffle_batch": "Write `rx.data.Dataset.shuffle` and `batch`.",
    "train.string_input_producer": "Write `rx.data.TFRecordDataset(files)`.",
    "train.ExponentialMovingAverage": (
        "Write `average.assign(decay * average + (1 - decay) * variable)`, or `use_ema=True` of"
        " Keras's optimizers."
    ),
    "train.generate_checkpoint_state_proto": "`rx.train.CheckpointManager` writes it: remove it.",
    "train.write_graph": "There are no graphs: export models with `rx.saved_model`.",
    "train.import_meta_graph": "There are no graphs: load models with `rx.saved_model.load`.",
    "train.SyncReplicasOptimizer": "Strategies are synchronous: use the optimizer itself.",
    "train.experimental.enable_mixed_precision_graph_rewrite": (
        'Write `rx.keras.mixed_precision.set_global_policy("mixed_float16")`.'
    ),
    "train.experimental.MixedPrecisionLossScale": "Write `rx.keras.optimizers.LossScaleOptimizer`.",
    "train.experimental.DynamicLossScale": "Write `rx.keras.optimizers.LossScaleOptimizer`.",
    "saved_model.tag_constants": 'Write `"serve"`.',
    "saved_model.signature_constants": 'Write `"serving_default"`.',
    "saved_model.builder": "Write `rx.saved_model.save(model, folder)`.",
    "saved_model.loader": "Write `rx.saved_model.load(folder)`.",
    "keras.backend.set_session": _NO_GRAPHS,
    "keras.backend.get_session": _NO_GRAPHS,
    "keras.backend.set_learning_phase": "Pass `training=True` or `False` to the call of the model.",
    "keras.backend.learning_phase": "Pass `training=True` or `False` to the call of the model.",
    "keras.backend.get_value": "Write `np.asarray(x)`.",
    "keras.backend.set_value": "Write `variable.assign(value)`.",
    "keras.backend.function": "Write `rx.keras.Model(inputs, outputs)`.",
    "keras.backend.gradients": "Write `rx.GradientTape`.",
    "keras.backend.moving_average_update": (
        "Write `variable.assign(momentum * variable + (1 - momentum) * value)`."
    ),
    "keras.backend.placeholder": "Write `rx.keras.Input(shape)`.",
    "keras.backend.update": "Write `variable.assign(value)`.",
    "keras.backend.update_add": "Write `variable.assign_add(value)`.",
    "keras.backend.rnn": "Write `rx.keras.layers.RNN(cell)`.",
    "keras.backend.ctc": "Write `rx.keras.losses.CTC()` and `rx.keras.ops.ctc_decode`.",
    "keras.backend": "Write the function of `rx.keras.ops` with the same meaning.",
    "keras.preprocessing.image.ImageDataGenerator": (
        "Write `rx.keras.utils.image_dataset_from_directory` and the layers `RandomFlip`,"
        " `RandomRotation`, `RandomZoom`, `Rescaling`."
    ),
    "keras.preprocessing.text": "Write `rx.keras.layers.TextVectorization`.",
    "keras.utils.get_custom_objects": "Write `rx.keras.saving.get_custom_objects()`.",
    "keras.utils.CustomObjectScope": "Write `rx.keras.saving.custom_object_scope`.",
    "keras.utils.DatasetCreator": "Pass the dataset itself to `fit`.",
    "keras.wrappers": "The package scikeras has them.",
    "keras.optimizers.schedules.LinearModel": "Write one `rx.keras.layers.Dense(1)`.",
    "keras.mixed_precision.LossScaleOptimizer": "Write `rx.keras.optimizers.LossScaleOptimizer`.",
    "keras.mixed_precision.FixedLossScale": "Write `rx.keras.optimizers.LossScaleOptimizer`.",
    "keras.mixed_precision.DynamicLossScale": "Write `rx.keras.optimizers.LossScaleOptimizer`.",
    "keras.layers.SyncBatchNormalization": (
        "Write `rx.keras.layers.BatchNormalization(synchronized=True)`."
    ),
    "keras.layers.CuDNNLSTM": "Write `rx.keras.layers.LSTM`.",
    "keras.layers.CuDNNGRU": "Write `rx.keras.layers.GRU`.",
    "keras.layers.LocallyConnected2D": "Keras 3 has no such layer: write one with `rx.keras.ops`.",
    "keras.layers.LocallyConnected1D": "Keras 3 has no such layer: write one with `rx.keras.ops`.",
    "keras.layers.StackedRNNCells": "Write `rx.keras.layers.StackedRNNCells`.",
    "keras.layers.ThresholdedReLU": "Write `rx.keras.layers.Lambda(lambda x: x * (x > theta))`.",
    "keras.premade_models": "Write one `rx.keras.layers.Dense(1)`.",
    "keras.experimental": "Keras 3 has no such name: see https://keras.io/api.",
    "keras": "Keras 3 has no such name. https://keras.io/guides/migrating_to_keras_3 lists them.",
    "python": _PRIVATE,
    "core": _PRIVATE,
    "compiler": _PRIVATE,
    "_api": _PRIVATE,
    "__internal__": _PRIVATE,
    "nn.ctc_beam_search_decoder": "Write `rx.keras.ops.ctc_decode`.",
    "nn.ctc_greedy_decoder": "Write `rx.keras.ops.ctc_decode`.",
    "nn.ctc_loss": "Write `rx.keras.ops.ctc_loss`, or `optax.ctc_loss`.",
    "nn.sampled_softmax_loss": "Write the full softmax: `tf.nn.softmax_cross_entropy_with_logits`.",
    "nn.nce_loss": "Write the full softmax: `tf.nn.softmax_cross_entropy_with_logits`.",
    "nn.RNNCell": "Write `rx.keras.layers.LSTMCell` or `GRUCell`.",
    "nn.experimental": "Write `rx.random` to draw a mask.",
    "image.extract_jpeg_shape": "Write `tf.io.decode_jpeg(contents).shape`.",
    "image.decode_and_crop_jpeg": (
        "Write `tf.io.decode_jpeg(contents)[top : top + height, left : left + width]`."
    ),
    "image.combined_non_max_suppression": (
        "Write `tf.image.non_max_suppression` for each class and image, outside of compiled code."
    ),
    "image.non_max_suppression_with_scores": "Write `tf.image.non_max_suppression`.",
    "image.resize_nearest_neighbor": (
        f'Write `tf.image.resize(images, size, "nearest")`. {_OTHER_PIXELS}'
    ),
    "image.resize_bilinear": f"Write `tf.image.resize(images, size)`. {_OTHER_PIXELS}",
    "image.resize_bicubic": f'Write `tf.image.resize(images, size, "bicubic")`. {_OTHER_PIXELS}',
    "compat.v1.image.sample_distorted_bounding_box": (
        "Write `tf.image.sample_distorted_bounding_box`, without `seed2`."
    ),
    "compat.v1.saved_model": "Write `rx.saved_model.save` and `load`.",
    "make_tensor_proto": "Write `rx.io.serialize_tensor(x)`.",
    "make_ndarray": "Write `rx.io.parse_tensor(data, dtype)`.",
    "GraphOptions": "There are no graphs: remove it.",
    "moving_average_variables": "Write `use_ema=True` of Keras's optimizers.",
    "quantization": "Write `rx.keras.Model.quantize`, or round with jax.numpy.",
    "sets": "Write Python's sets in a function given to a dataset's `map`.",
    "audio": "Read the file with `scipy.io.wavfile` in a function given to a dataset's `map`.",
    "nest": "Write the function of `rx.nest` or `jax.tree` with the same meaning.",
    "numpy": "Write `jnp`, after `import jax.numpy as jnp`.",
    "numpy.experimental_enable_numpy_behavior": "JAX's arrays always have it: remove it.",
    "timestamp": "Write `time.time()`, after `import time`.",
    "sparse_to_dense": "Write `jnp.zeros(shape, dtype).at[indices].set(values)`.",
    "nn.pool": "Write `tf.nn.max_pool` or `tf.nn.avg_pool`.",
    "nn.dilation2d": "Write `jax.lax.conv_general_dilated_patches`, and a maximum over the window.",
    "guarantee_const": "XLA finds constants itself: write `x`.",
    "resource_loader": "Write `pathlib.Path(__file__).parent`.",
    "register_tensor_conversion_function": "Write the class's own `__jax_array__`.",
    "vectorized_map": "Write `jax.vmap`.",
    "data.make_one_shot_iterator": "Write `iter(dataset)`.",
    "data.make_initializable_iterator": "Write `iter(dataset)`.",
    "compat.v1.data.make_one_shot_iterator": "Write `iter(dataset)`.",
    "compat.v1.data.make_initializable_iterator": "Write `iter(dataset)`.",
}
# Advice on whole packages: that on a name of another path of the same function is better.
GENERAL = frozenset(
    [_PRIVATE, ADVICE["keras"], ADVICE["keras.backend"], ADVICE["keras.experimental"]]
)
# Families of names of version 1, by the end of the name.
ENDINGS = {
    "train": {"Optimizer": _OPTIMIZER, "Hook": _HOOKS, "_decay": ADVICE["train.cosine_decay"]}
}


def specific_advice(path: str) -> str:
    """Return what to write in place of ``tf.<path>``; "" if that is unknown."""
    head, _, rest = path.partition(".")
    for end, words in ENDINGS.get(head, {}).items():
        if rest.endswith(end) and path not in ADVICE:
            return words
    parts = path.split(".")
    if path.startswith("compat.v1.") and not _longest(parts):
        return specific_advice(path[len("compat.v1.") :])
    return _longest(parts)


def _longest(parts: list[str]) -> str:
    """Return the advice on the longest path that has some."""
    for size in range(len(parts), 0, -1):
        words = ADVICE.get(".".join(parts[:size]), "")
        if words:
            return words.replace("{name}", parts[-1])
    return ""
