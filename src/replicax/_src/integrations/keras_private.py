"""The contract with Keras: its private parts that replicax relies on, by feature.

Code outside of this module may name a module of ``keras.src`` or a private attribute of Keras only
if it is listed in `CONTRACT`. The contract test checks all of them.
"""

from typing import Any

from replicax._src.base.contract import Contract, LibraryFeature, PrivatePart, never
from replicax._src.base.lazy import LazyModule
from replicax._src.context.current import current, get_strategy
from replicax._src.data.dataset import Dataset
from replicax._src.input.distributed_dataset import DistributedDataset
from replicax._src.integrations.hook import in_replicas, is_inside, replicas
from replicax._src.integrations.keras_models import home_of
from replicax._src.state.levels import TraceLevel
from replicax._src.values.placement import WHOLE

keras: Any = LazyModule("keras")

_VARIABLE = "backend.common:KerasVariable."
_TRAINER = "backend.jax.trainer:JAXTrainer."
_EPOCH = "trainers.epoch_iterator:EpochIterator."
_BACKUP = "callbacks.backup_and_restore:BackupAndRestore."
_CSV = "callbacks.csv_logger:CSVLogger."
_BOARD = "callbacks.tensorboard:TensorBoard."
_NORMALIZATION = "layers.preprocessing.normalization:Normalization."
_DISCRETIZATION = "layers.preprocessing.discretization:Discretization."
_OPTIMIZER = "optimizers.base_optimizer:BaseOptimizer."
_METHODS = (
    "trainers.trainer:Trainer.compile",
    *(
        f"{_TRAINER}{name}"
        for name in (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
        )
    ),
)

# Predicates for whether a feature is in use. The arguments are those of a gate function, or one
# variable that is read.


def _is_traced(*_: Any, **__: Any) -> bool:
    return isinstance(current().level, TraceLevel)


def _has_distribution(*args: Any, **kwargs: Any) -> bool:
    is_placed = keras.distribution.distribution() is not None or kwargs.get("layout") is not None
    return is_placed and get_strategy().topology is not None


def _builds(layer: Any = None, *_: Any, **__: Any) -> bool:
    is_unbuilt = not getattr(layer, "built", False)
    return is_unbuilt and (current().level is not None or replicas() is not None)


def _synchronizes(*args: Any, **kwargs: Any) -> bool:
    is_layer = bool(args) and isinstance(args[0], keras.Layer | type)
    by_position = args[17:18] if is_layer else args[3:4]  # of the layer, or of `moments`
    return is_inside() and bool(kwargs.get("synchronized", any(by_position)))


def _is_cut(*args: Any, **kwargs: Any) -> bool:
    """Whether a variable among the arguments is sharded over the logical devices of a replica."""
    leaves = keras.tree.flatten([args, kwargs])
    backing = (vars(v).get("_rx") for v in leaves if isinstance(v, keras.Variable))
    cells = [b.cell for b in backing if b is not None]
    return any(cell.spec != WHOLE for cell in cells)


def _trains(model: Any = None, *_: Any, **__: Any) -> bool:
    return is_inside() or (isinstance(model, keras.Model) and home_of(model) is not None)


def _takes_dataset(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(x, Dataset | DistributedDataset) for x in (*args, *kwargs.values()))


VARIABLES = LibraryFeature("Keras variables in scopes", "make the model outside of scopes")
TRACED_VARIABLES = LibraryFeature(
    "Keras variables that are made while a function is traced",
    "make them before the function is called",
    (f"{_VARIABLE}__init__",),
    _is_traced,
)
DISTRIBUTION = LibraryFeature(
    "keras.distribution in scopes",
    "cut variables with `rx.tpu.LayoutMap` in place of `keras.distribution.set_distribution`",
    (f"{_VARIABLE}__init__", "distribution.distribution_lib:ModelParallel.get_tensor_layout"),
    _has_distribution,
)
SEEDS = LibraryFeature(
    "random numbers of Keras that differ between replicas",
    "draw with `jax.random` from a key that is folded with the replica's number, and leave"
    " keras.random and layers such as Dropout out of replica functions",
    (
        "random.seed_generator:SeedGenerator.next",
        "random.seed_generator:draw_seed",
    ),
    in_replicas,
)
BUILDING = LibraryFeature(
    "the building of Keras layers in replica functions",
    "build the model in the scope, with `model.build(shape)` or by calling it once on a batch",
    ("layers.layer:Layer._maybe_build", "layers.layer:Layer.__call__"),
    _builds,
)
LOSSES = LibraryFeature(
    "losses of Keras layers (`add_loss`, regularizers) in replica functions",
    "compute them in the replica function",
    ("layers.layer:Layer.add_loss", "layers.layer:Layer._get_own_losses"),
    in_replicas,
)
BATCH_NORMALIZATION = LibraryFeature(
    "synchronized batch normalization of Keras",
    "make the layer without `synchronized=True`",
    (
        "layers.normalization.batch_normalization:BatchNormalization.__new__",
        "layers.normalization.batch_normalization:BatchNormalization.__init__",
        "backend.jax.nn:moments",
    ),
    _synchronizes,
)
OPTIMIZERS = LibraryFeature(
    "optimizers of Keras in replica functions",
    "return the gradients from `strategy.run`, reduce them, and apply them outside",
    (
        f"{_OPTIMIZER}apply",
        f"{_OPTIMIZER}apply_gradients",
        f"{_OPTIMIZER}stateless_apply",
        f"{_OPTIMIZER}assign",
        f"{_OPTIMIZER}assign_add",
        f"{_OPTIMIZER}assign_sub",
    ),
    in_replicas,
)
LOSS_SCALE = LibraryFeature(
    "keras.optimizers.LossScaleOptimizer in replica functions",
    "scale the loss by a constant, or train in bfloat16",
    (
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.scale_loss",
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite",
    ),
    in_replicas,
)
SLOTS = LibraryFeature(
    "optimizer slots that are cut over logical devices as their weights are",
    "make the model without a layout",
    (f"{_OPTIMIZER}add_variable_from_reference", f"{_OPTIMIZER}build"),
    _is_cut,
)
TRAINING = LibraryFeature(
    "fit, evaluate and predict of Keras models",
    "write the training loop with `strategy.run`",
    _METHODS,
    _trains,
)
DATASETS = LibraryFeature(
    "rx.data datasets in fit, evaluate and predict of Keras models",
    "give arrays, or a generator of NumPy batches",
    _METHODS,
    _takes_dataset,
)
ADAPTATION = LibraryFeature(
    "rx.data datasets in `adapt` of Keras layers",
    "give `adapt` a NumPy array",
    (f"{_NORMALIZATION}adapt", f"{_DISCRETIZATION}adapt"),
    _takes_dataset,
)
BACKUP = LibraryFeature(
    "keras.callbacks.BackupAndRestore",
    "save with `rx.train.CheckpointManager` in a callback of your own",
    (f"{_BACKUP}set_model", f"{_BACKUP}on_train_begin"),
    is_inside,
)
MODEL_CHECKPOINT = LibraryFeature(
    "keras.callbacks.ModelCheckpoint",
    "save with `rx.train.CheckpointManager` in a callback of your own",
    ("callbacks.model_checkpoint:ModelCheckpoint.set_model",),
    is_inside,
)
CSV_LOGGER = LibraryFeature(
    "keras.callbacks.CSVLogger",
    "write the `history` that fit returns",
    (f"{_CSV}set_model", f"{_CSV}on_train_begin"),
    is_inside,
)
TENSORBOARD = LibraryFeature(
    "keras.callbacks.TensorBoard",
    "write with `rx.summary` in a callback of your own",
    (f"{_BOARD}set_params", f"{_BOARD}set_model"),
    is_inside,
)
SAVED_MODEL = LibraryFeature(
    "rx.saved_model.save of Keras models",
    "save an `rx.function` that calls the model, with an input_signature",
    when=never,  # `rx.saved_model.save` checks it
)
RESTORED_SLOTS = LibraryFeature(
    "optimizers of Keras in TensorFlow's checkpoints",
    "restore the model alone",
    when=never,  # the restoring code checks it
)


def _control_flow(name: str) -> LibraryFeature:
    places = (f"ops.core:{name}", f"backend.jax.core:{name}")
    return LibraryFeature(
        f"keras.ops.{name}", f"write it with `rx` or `jax.lax.{name}`", places, is_inside
    )


# Storage.
VALUE = PrivatePart(f"{_VARIABLE}_value", VARIABLES)
IN_STATELESS_SCOPE = PrivatePart("backend.common.stateless_scope:in_stateless_scope", VARIABLES, "")
INITIALIZE = PrivatePart(
    "backend.jax.core:JaxVariable._initialize_with_initializer",
    TRACED_VARIABLES,
    "self, initializer",
)
LAYOUT = PrivatePart(f"{_VARIABLE}_layout", DISTRIBUTION)
INITIALIZE_LAYOUT = PrivatePart(
    "backend.jax.core:JaxVariable._initialize_layout", DISTRIBUTION, "self"
)
TENSOR_LAYOUT = PrivatePart(
    "distribution.distribution_lib:ModelParallel.get_tensor_layout", DISTRIBUTION, "self, path"
)

# Layers.
NEXT_SEED = PrivatePart("random.seed_generator:SeedGenerator.next", SEEDS, "self, ordered=True")
SET_SEED = PrivatePart("utils.rng_utils:set_random_seed", SEEDS, "seed")
GET_SEED = PrivatePart("utils.rng_utils:get_random_seed", SEEDS, "")
GLOBAL_SEED = PrivatePart("random.seed_generator:global_seed_generator", SEEDS, "")
MAYBE_BUILD = PrivatePart("layers.layer:Layer._maybe_build", BUILDING, "self, call_spec")
LAYER_LOSSES = PrivatePart("layers.layer:Layer._losses", LOSSES)
NORMALIZATION = PrivatePart(
    "layers.normalization.batch_normalization:BatchNormalization.__init__",
    BATCH_NORMALIZATION,
    "self, axis, momentum, epsilon, center, scale, beta_initializer, gamma_initializer,"
    " moving_mean_initializer, moving_variance_initializer, beta_regularizer,"
    " gamma_regularizer, beta_constraint, gamma_constraint, renorm, renorm_clipping,"
    " renorm_momentum, synchronized=False, **kwargs",
    is_transparent=True,
)
MOMENTS = PrivatePart(
    "backend.jax.nn:moments", BATCH_NORMALIZATION, "x, axes, keepdims=False, synchronized=False"
)

# Records of the calls and the parts of layers, metrics and losses. They are not in the contract: a
# checkpoint that looked into them would find nothing new.
RECORDS = frozenset({"_tracker", "_parent_path", "_inbound_nodes", "_outbound_nodes"})

# Control flow.
COND = PrivatePart("backend.jax.core:cond", _control_flow("cond"), "pred, true_fn, false_fn")
SCAN = PrivatePart(
    "backend.jax.core:scan",
    _control_flow("scan"),
    "f, init, xs=None, length=None, reverse=False, unroll=1",
)
WHILE_LOOP = PrivatePart(
    "backend.jax.core:while_loop",
    _control_flow("while_loop"),
    "cond, body, loop_vars, maximum_iterations=None",
)
SWITCH = PrivatePart(
    "backend.jax.core:switch", _control_flow("switch"), "index, branches, *operands"
)
FORI_LOOP = PrivatePart(
    "backend.jax.core:fori_loop", _control_flow("fori_loop"), "lower, upper, body_fun, init_val"
)
MAP = PrivatePart("backend.jax.core:map", _control_flow("map"), "f, xs")

# Optimizers.
APPLY = PrivatePart(f"{_OPTIMIZER}apply", OPTIMIZERS, "self, grads, trainable_variables=None")
OPTIMIZED_VARIABLES = PrivatePart(f"{_OPTIMIZER}_trainable_variables", OPTIMIZERS)
LOSS_SCALE_APPLY = PrivatePart(
    "optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
    LOSS_SCALE,
    "self, grads, trainable_variables=None",
)
ADD_SLOT = PrivatePart(
    f"{_OPTIMIZER}add_variable_from_reference",
    SLOTS,
    "self, reference_variable, name=None, initializer='zeros'",
)
RESTORED_VARIABLES = PrivatePart(f"{_OPTIMIZER}_trainable_variables", RESTORED_SLOTS)
ALL_VARIABLES = PrivatePart(f"{_OPTIMIZER}_variables", RESTORED_SLOTS)
LEARNING_RATE = PrivatePart(f"{_OPTIMIZER}_learning_rate", RESTORED_SLOTS)

# Training.
COMPILE = PrivatePart(
    # Patch the base class: saving checks whether the model's class overrides `compile`.
    "trainers.trainer:Trainer.compile",
    TRAINING,
    "self, optimizer, loss, loss_weights, metrics, weighted_metrics, run_eagerly,"
    " steps_per_execution, jit_compile, auto_scale_loss",
    is_transparent=True,
)
_FIT = (
    "self, x, y, batch_size, epochs, verbose, callbacks, validation_split, validation_data,"
    " shuffle, class_weight, sample_weight, initial_epoch, steps_per_epoch, validation_steps,"
    " validation_batch_size, validation_freq"
)
FIT = PrivatePart(f"{_TRAINER}fit", TRAINING, _FIT, is_transparent=True)
EVALUATE = PrivatePart(
    f"{_TRAINER}evaluate",
    TRAINING,
    "self, x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs",
    is_transparent=True,
)
PREDICT = PrivatePart(
    f"{_TRAINER}predict",
    TRAINING,
    "self, x, batch_size, verbose, steps, callbacks",
    is_transparent=True,
)
TRAIN_ON_BATCH = PrivatePart(
    f"{_TRAINER}train_on_batch",
    TRAINING,
    "self, x, y, sample_weight, class_weight, return_dict",
    is_transparent=True,
)
TEST_ON_BATCH = PrivatePart(
    f"{_TRAINER}test_on_batch",
    TRAINING,
    "self, x, y, sample_weight, return_dict",
    is_transparent=True,
)
PREDICT_ON_BATCH = PrivatePart(
    f"{_TRAINER}predict_on_batch", TRAINING, "self, x", is_transparent=True
)
GET_STATE = PrivatePart(
    f"{_TRAINER}_get_jax_state",
    TRAINING,
    "self, trainable_variables=False, non_trainable_variables=False, optimizer_variables=False,"
    " metrics_variables=False, purge_model_variables=False",
)
LOSS_AND_UPDATES = PrivatePart(
    f"{_TRAINER}compute_loss_and_updates",
    TRAINING,
    "self, trainable_variables, non_trainable_variables, metrics_variables, x, y, sample_weight,"
    " training=False, optimizer_variables=None",
)
TRAIN_STEP = PrivatePart(f"{_TRAINER}train_step", TRAINING, "self, state, data")
TEST_STEP = PrivatePart(f"{_TRAINER}test_step", TRAINING, "self, state, data")
PREDICT_STEP = PrivatePart(f"{_TRAINER}predict_step", TRAINING, "self, state, data")
MAKE_TRAIN_FUNCTION = PrivatePart(f"{_TRAINER}make_train_function", TRAINING, "self, force=False")
MAKE_TEST_FUNCTION = PrivatePart(f"{_TRAINER}make_test_function", TRAINING, "self, force=False")
MAKE_PREDICT_FUNCTION = PrivatePart(
    f"{_TRAINER}make_predict_function", TRAINING, "self, force=False"
)
MAKE_FUNCTION = PrivatePart(
    f"{_TRAINER}_make_function", TRAINING, "self, step_function, concatenate_outputs=False"
)
SYMBOLIC_BUILD = PrivatePart(
    "trainers.trainer:Trainer._symbolic_build",
    TRAINING,
    "self, iterator=None, data_batch=None",
    is_transparent=True,
)
LAYERS = PrivatePart("layers.layer:Layer._layers", TRAINING)
LAYER_WEIGHTS = PrivatePart("layers.layer:Layer._trainable_variables", TRAINING)
LAYER_STATE = PrivatePart("layers.layer:Layer._non_trainable_variables", TRAINING)
LAYER_SEEDS = PrivatePart("layers.layer:Layer._seed_generators", TRAINING)
LAYER_METRICS = PrivatePart("layers.layer:Layer._metrics", TRAINING)
METRIC_PARTS = PrivatePart("metrics.metric:Metric._metrics", TRAINING)
METRIC_VARIABLES = PrivatePart("metrics.metric:Metric._variables", TRAINING)
OPTIMIZER_VARIABLES = PrivatePart(f"{_OPTIMIZER}_variables", TRAINING)
EPOCH_BATCHES = PrivatePart("backend.jax.trainer:JAXEpochIterator._get_iterator", TRAINING, "self")
DISTRIBUTE_DATA = PrivatePart(
    "backend.jax.trainer:_distribute_data", TRAINING, "data, layouts=None"
)
GET_DATA_ADAPTER = PrivatePart(
    "trainers.data_adapters:get_data_adapter",
    DATASETS,
    "x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight",
)
DATA_ADAPTER = PrivatePart("trainers.data_adapters.data_adapter:DataAdapter", DATASETS)
UNPACK = PrivatePart(
    "trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight", DATASETS, "data"
)
CLASS_WEIGHTS = PrivatePart(
    "trainers.data_adapters.data_adapter_utils:class_weight_to_sample_weights",
    DATASETS,
    "y, class_weight",
)
ADAPT_NORMALIZATION = PrivatePart(f"{_NORMALIZATION}adapt", ADAPTATION, "self, data")
ADAPT_DISCRETIZATION = PrivatePart(f"{_DISCRETIZATION}adapt", ADAPTATION, "self, data, steps=None")

# Callbacks.
SAVE_CHECKPOINT = PrivatePart(
    "callbacks.model_checkpoint:ModelCheckpoint._save_model",
    MODEL_CHECKPOINT,
    "self, epoch, batch, logs",
    is_transparent=True,
)
SET_BOARD_MODEL = PrivatePart(f"{_BOARD}set_model", TENSORBOARD, "self, model")
BOARD_GRAPH = PrivatePart(f"{_BOARD}_write_keras_model_summary", TENSORBOARD, "self")
BOARD_SUMMARY = PrivatePart(f"{_BOARD}_summary_module", TENSORBOARD)
BOARD_TRAIN_WRITER = PrivatePart(f"{_BOARD}_train_writer", TENSORBOARD)
BOARD_WRITERS = PrivatePart(f"{_BOARD}_writers", TENSORBOARD)
BOARD_TRACE = PrivatePart(f"{_BOARD}_should_trace", TENSORBOARD)
CSV_BEGIN = PrivatePart(f"{_CSV}on_train_begin", CSV_LOGGER, "self, logs", is_transparent=True)
CSV_EPOCH = PrivatePart(f"{_CSV}on_epoch_end", CSV_LOGGER, "self, epoch, logs", is_transparent=True)
CSV_END = PrivatePart(f"{_CSV}on_train_end", CSV_LOGGER, "self, logs", is_transparent=True)

BACKUP_FIT = PrivatePart(f"{_TRAINER}fit", BACKUP, _FIT, is_transparent=True)
BACKUP_BUILD = PrivatePart(SYMBOLIC_BUILD.place, BACKUP, "self, iterator=None, data_batch=None")
BACKUP_BATCHES = PrivatePart(EPOCH_BATCHES.place, BACKUP, "self")
BACKUP_STEPS = PrivatePart(f"{_EPOCH}_enumerate_iterator", BACKUP, "self")
STEPS_SEEN = PrivatePart(f"{_EPOCH}_steps_seen", BACKUP)
INITIAL_EPOCH = PrivatePart("trainers.trainer:Trainer._initial_epoch", BACKUP)
BACKUP_BEGIN = PrivatePart(f"{_BACKUP}on_train_begin", BACKUP, "self, logs=None")
BACKUP_EPOCH_BEGIN = PrivatePart(f"{_BACKUP}on_epoch_begin", BACKUP, "self, epoch, logs=None")
BACKUP_BATCH_END = PrivatePart(f"{_BACKUP}on_train_batch_end", BACKUP, "self, batch, logs=None")
BACKUP_EPOCH_END = PrivatePart(f"{_BACKUP}on_epoch_end", BACKUP, "self, epoch, logs=None")
BACKUP_SAVE = PrivatePart(f"{_BACKUP}_save_model", BACKUP, "self")
BACKUP_INIT = PrivatePart(
    f"{_BACKUP}__init__",
    BACKUP,
    "self, backup_dir, save_freq='epoch', double_checkpoint=False, delete_checkpoint=True",
)
BACKUP_END = PrivatePart(f"{_BACKUP}on_train_end", BACKUP, "self, logs=None")
CURRENT_EPOCH = PrivatePart(f"{_BACKUP}_current_epoch", BACKUP)

# Export.
INPUT_SIGNATURE = PrivatePart("export.export_utils:get_input_signature", SAVED_MODEL, "model")

CONTRACT = Contract(
    "Keras",
    "keras",
    "keras.src",
    "3.15",
    VARIABLES,
    [part for part in vars().values() if isinstance(part, PrivatePart)],
)

__getattr__ = CONTRACT.lazily(
    in_stateless_scope=(IN_STATELESS_SCOPE, lambda: False),
    DataAdapter=(DATA_ADAPTER, object),
    unpack_x_y_sample_weight=(UNPACK, None),
    class_weight_to_sample_weights=(CLASS_WEIGHTS, None),
    get_input_signature=(INPUT_SIGNATURE, None),
)
