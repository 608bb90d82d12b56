"""The private parts of Keras that replicax relies on, and the feature that needs each.

Nothing outside of this module names a module of ``keras.src`` or a private attribute of Keras
without its part in `CONTRACT`. The contract test goes through all of them.
"""

from typing import Any

import keras

from replicax._contract import Contract, Feature, Part, never
from replicax.context._current import current, get_strategy
from replicax.data._dataset import Dataset
from replicax.input._distributed import DistributedDataset
from replicax.integrations._hook import in_replicas, is_inside, replicas
from replicax.integrations._keras_models import home_of
from replicax.state._levels import TraceLevel
from replicax.values._placement import WHOLE

_VARIABLE = "backend.common:KerasVariable."
_TRAINER = "backend.jax.trainer:JAXTrainer."
_EPOCH = "trainers.epoch_iterator:EpochIterator."
_BACKUP = "callbacks.backup_and_restore:BackupAndRestore."
_CSV = "callbacks.csv_logger:CSVLogger."
_BOARD = "callbacks.tensorboard:TensorBoard."
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

# When a feature is used. The arguments are those of a gate, or one variable that is read.


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
    by_position = args[17:18] if is_layer else args[3:4]  # else of `moments`
    return is_inside() and bool(kwargs.get("synchronized", any(by_position)))


def _is_cut(*args: Any, **kwargs: Any) -> bool:
    """Whether a variable among the arguments is cut over the logical devices of each replica."""
    leaves = keras.tree.flatten([args, kwargs])
    held = (vars(v).get("_rx") for v in leaves if isinstance(v, keras.Variable))
    cells = [h.cell for h in held if h is not None]
    return any(cell.spec != WHOLE and not cell.sharded for cell in cells)


def _trains(model: Any = None, *_: Any, **__: Any) -> bool:
    return is_inside() or (isinstance(model, keras.Model) and home_of(model) is not None)


def _takes_dataset(*args: Any, **kwargs: Any) -> bool:
    return any(isinstance(x, Dataset | DistributedDataset) for x in (*args, *kwargs.values()))


VARIABLES = Feature("Keras variables in scopes", "make the model outside of scopes")
TRACED_VARIABLES = Feature(
    "Keras variables that are made while a function is traced",
    "make them before the function is called",
    (f"{_VARIABLE}__init__",),
    _is_traced,
)
DISTRIBUTION = Feature(
    "keras.distribution in scopes",
    "cut variables with `rx.tpu.LayoutMap` in place of `keras.distribution.set_distribution`",
    (f"{_VARIABLE}__init__", "distribution.distribution_lib:ModelParallel.get_tensor_layout"),
    _has_distribution,
)
SEEDS = Feature(
    "random numbers of Keras that differ between replicas",
    "draw with `jax.random` from a key that is folded with the replica's number, and leave"
    " keras.random and layers such as Dropout out of replica functions",
    (
        "random.seed_generator:SeedGenerator.next",
        "random.seed_generator:draw_seed",
    ),
    in_replicas,
)
BUILDING = Feature(
    "the building of Keras layers in replica functions",
    "build the model in the scope, with `model.build(shape)` or by calling it once on a batch",
    ("layers.layer:Layer._maybe_build", "layers.layer:Layer.__call__"),
    _builds,
)
LOSSES = Feature(
    "losses of Keras layers (`add_loss`, regularizers) in replica functions",
    "compute them in the replica function",
    ("layers.layer:Layer.add_loss", "layers.layer:Layer._get_own_losses"),
    in_replicas,
)
BATCH_NORMALIZATION = Feature(
    "synchronized batch normalization of Keras",
    "make the layer without `synchronized=True`",
    (
        "layers.normalization.batch_normalization:BatchNormalization.__new__",
        "layers.normalization.batch_normalization:BatchNormalization.__init__",
        "backend.jax.nn:moments",
    ),
    _synchronizes,
)
OPTIMIZERS = Feature(
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
LOSS_SCALE = Feature(
    "keras.optimizers.LossScaleOptimizer in replica functions",
    "scale the loss by a constant, or train in bfloat16",
    (
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.scale_loss",
        "optimizers.loss_scale_optimizer:LossScaleOptimizer.check_finite",
    ),
    in_replicas,
)
SLOTS = Feature(
    "optimizer slots that are cut over logical devices as their weights are",
    "make the model without a layout",
    (f"{_OPTIMIZER}add_variable_from_reference", f"{_OPTIMIZER}build"),
    _is_cut,
)
TRAINING = Feature(
    "fit, evaluate and predict of Keras models",
    "write the training loop with `strategy.run`",
    _METHODS,
    _trains,
)
DATASETS = Feature(
    "rx.data datasets in fit, evaluate and predict of Keras models",
    "give arrays, or a generator of NumPy batches",
    _METHODS,
    _takes_dataset,
)
BACKUP = Feature(
    "keras.callbacks.BackupAndRestore",
    "save with `rx.train.CheckpointManager` in a callback of your own",
    (f"{_BACKUP}set_model", f"{_BACKUP}on_train_begin"),
    is_inside,
)
MODEL_CHECKPOINT = Feature(
    "keras.callbacks.ModelCheckpoint",
    "save with `rx.train.CheckpointManager` in a callback of your own",
    ("callbacks.model_checkpoint:ModelCheckpoint.set_model",),
    is_inside,
)
CSV_LOGGER = Feature(
    "keras.callbacks.CSVLogger",
    "write the `history` that fit returns",
    (f"{_CSV}set_model", f"{_CSV}on_train_begin"),
    is_inside,
)
TENSORBOARD = Feature(
    "keras.callbacks.TensorBoard",
    "write with `rx.summary` in a callback of your own",
    (f"{_BOARD}set_params", f"{_BOARD}set_model"),
    is_inside,
)
SAVED_MODEL = Feature(
    "rx.saved_model.save of Keras models",
    "save an `rx.function` that calls the model, with an input_signature",
    when=never,  # `rx.saved_model.save` checks it
)
RESTORED_SLOTS = Feature(
    "optimizers of Keras in TensorFlow's checkpoints",
    "restore the model alone",
    when=never,  # the restoring code checks it
)


def _control_flow(name: str) -> Feature:
    places = (f"ops.core:{name}", f"backend.jax.core:{name}")
    return Feature(
        f"keras.ops.{name}", f"write it with `rx` or `jax.lax.{name}`", places, is_inside
    )


# Storage.
VALUE = Part(f"{_VARIABLE}_value", VARIABLES)
IN_STATELESS_SCOPE = Part("backend.common.stateless_scope:in_stateless_scope", VARIABLES, "")
INITIALIZE = Part(
    "backend.jax.core:JaxVariable._initialize_with_initializer",
    TRACED_VARIABLES,
    "self, initializer",
)
LAYOUT = Part(f"{_VARIABLE}_layout", DISTRIBUTION)
INITIALIZE_LAYOUT = Part("backend.jax.core:JaxVariable._initialize_layout", DISTRIBUTION, "self")
TENSOR_LAYOUT = Part(
    "distribution.distribution_lib:ModelParallel.get_tensor_layout", DISTRIBUTION, "self, path"
)

# Layers.
NEXT_SEED = Part("random.seed_generator:SeedGenerator.next", SEEDS, "self, ordered=True")
MAYBE_BUILD = Part("layers.layer:Layer._maybe_build", BUILDING, "self, call_spec")
LAYER_LOSSES = Part("layers.layer:Layer._losses", LOSSES)
NORMALIZATION = Part(
    "layers.normalization.batch_normalization:BatchNormalization.__init__",
    BATCH_NORMALIZATION,
    "self, axis, momentum, epsilon, center, scale, beta_initializer, gamma_initializer,"
    " moving_mean_initializer, moving_variance_initializer, beta_regularizer,"
    " gamma_regularizer, beta_constraint, gamma_constraint, renorm, renorm_clipping,"
    " renorm_momentum, synchronized=False, **kwargs",
    is_transparent=True,
)
MOMENTS = Part(
    "backend.jax.nn:moments", BATCH_NORMALIZATION, "x, axes, keepdims=False, synchronized=False"
)

# Control flow.
COND = Part("backend.jax.core:cond", _control_flow("cond"), "pred, true_fn, false_fn")
SCAN = Part(
    "backend.jax.core:scan",
    _control_flow("scan"),
    "f, init, xs=None, length=None, reverse=False, unroll=1",
)
WHILE_LOOP = Part(
    "backend.jax.core:while_loop",
    _control_flow("while_loop"),
    "cond, body, loop_vars, maximum_iterations=None",
)
SWITCH = Part("backend.jax.core:switch", _control_flow("switch"), "index, branches, *operands")
FORI_LOOP = Part(
    "backend.jax.core:fori_loop", _control_flow("fori_loop"), "lower, upper, body_fun, init_val"
)
MAP = Part("backend.jax.core:map", _control_flow("map"), "f, xs")

# Optimizers.
APPLY = Part(f"{_OPTIMIZER}apply", OPTIMIZERS, "self, grads, trainable_variables=None")
OPTIMIZED_VARIABLES = Part(f"{_OPTIMIZER}_trainable_variables", OPTIMIZERS)
LOSS_SCALE_APPLY = Part(
    "optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",
    LOSS_SCALE,
    "self, grads, trainable_variables=None",
)
ADD_SLOT = Part(
    f"{_OPTIMIZER}add_variable_from_reference",
    SLOTS,
    "self, reference_variable, name=None, initializer='zeros'",
)
RESTORED_VARIABLES = Part(f"{_OPTIMIZER}_trainable_variables", RESTORED_SLOTS)
ALL_VARIABLES = Part(f"{_OPTIMIZER}_variables", RESTORED_SLOTS)
LEARNING_RATE = Part(f"{_OPTIMIZER}_learning_rate", RESTORED_SLOTS)

# Training.
COMPILE = Part(
    # Of the base class: saving asks whether a model's own class has another `compile`.
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
FIT = Part(f"{_TRAINER}fit", TRAINING, _FIT, is_transparent=True)
EVALUATE = Part(
    f"{_TRAINER}evaluate",
    TRAINING,
    "self, x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict, **kwargs",
    is_transparent=True,
)
PREDICT = Part(
    f"{_TRAINER}predict",
    TRAINING,
    "self, x, batch_size, verbose, steps, callbacks",
    is_transparent=True,
)
TRAIN_ON_BATCH = Part(
    f"{_TRAINER}train_on_batch",
    TRAINING,
    "self, x, y, sample_weight, class_weight, return_dict",
    is_transparent=True,
)
TEST_ON_BATCH = Part(
    f"{_TRAINER}test_on_batch",
    TRAINING,
    "self, x, y, sample_weight, return_dict",
    is_transparent=True,
)
PREDICT_ON_BATCH = Part(f"{_TRAINER}predict_on_batch", TRAINING, "self, x", is_transparent=True)
GET_STATE = Part(
    f"{_TRAINER}_get_jax_state",
    TRAINING,
    "self, trainable_variables=False, non_trainable_variables=False, optimizer_variables=False,"
    " metrics_variables=False, purge_model_variables=False",
)
TRAIN_STEP = Part(f"{_TRAINER}train_step", TRAINING, "self, state, data")
TEST_STEP = Part(f"{_TRAINER}test_step", TRAINING, "self, state, data")
PREDICT_STEP = Part(f"{_TRAINER}predict_step", TRAINING, "self, state, data")
MAKE_TRAIN_FUNCTION = Part(f"{_TRAINER}make_train_function", TRAINING, "self, force=False")
MAKE_TEST_FUNCTION = Part(f"{_TRAINER}make_test_function", TRAINING, "self, force=False")
MAKE_PREDICT_FUNCTION = Part(f"{_TRAINER}make_predict_function", TRAINING, "self, force=False")
MAKE_FUNCTION = Part(
    f"{_TRAINER}_make_function", TRAINING, "self, step_function, concatenate_outputs=False"
)
SYMBOLIC_BUILD = Part(
    "trainers.trainer:Trainer._symbolic_build",
    TRAINING,
    "self, iterator=None, data_batch=None",
    is_transparent=True,
)
EPOCH_BATCHES = Part("backend.jax.trainer:JAXEpochIterator._get_iterator", TRAINING, "self")
DISTRIBUTE_DATA = Part("backend.jax.trainer:_distribute_data", TRAINING, "data, layouts=None")
GET_DATA_ADAPTER = Part(
    "trainers.data_adapters:get_data_adapter",
    DATASETS,
    "x, y, sample_weight, batch_size, steps_per_epoch, shuffle, class_weight",
)
DATA_ADAPTER = Part("trainers.data_adapters.data_adapter:DataAdapter", DATASETS)
UNPACK = Part(
    "trainers.data_adapters.data_adapter_utils:unpack_x_y_sample_weight", DATASETS, "data"
)
CLASS_WEIGHTS = Part(
    "trainers.data_adapters.data_adapter_utils:class_weight_to_sample_weights",
    DATASETS,
    "y, class_weight",
)

# Callbacks.
SAVE_CHECKPOINT = Part(
    "callbacks.model_checkpoint:ModelCheckpoint._save_model",
    MODEL_CHECKPOINT,
    "self, epoch, batch, logs",
    is_transparent=True,
)
SET_BOARD_MODEL = Part(f"{_BOARD}set_model", TENSORBOARD, "self, model")
BOARD_WRITERS = Part(f"{_BOARD}_writers", TENSORBOARD)
BOARD_TRACE = Part(f"{_BOARD}_should_trace", TENSORBOARD)
CSV_BEGIN = Part(f"{_CSV}on_train_begin", CSV_LOGGER, "self, logs", is_transparent=True)
CSV_EPOCH = Part(f"{_CSV}on_epoch_end", CSV_LOGGER, "self, epoch, logs", is_transparent=True)
CSV_END = Part(f"{_CSV}on_train_end", CSV_LOGGER, "self, logs", is_transparent=True)

BACKUP_FIT = Part(f"{_TRAINER}fit", BACKUP, _FIT, is_transparent=True)
BACKUP_BUILD = Part(SYMBOLIC_BUILD.place, BACKUP, "self, iterator=None, data_batch=None")
BACKUP_BATCHES = Part(EPOCH_BATCHES.place, BACKUP, "self")
BACKUP_STEPS = Part(f"{_EPOCH}_enumerate_iterator", BACKUP, "self")
STEPS_SEEN = Part(f"{_EPOCH}_steps_seen", BACKUP)
INITIAL_EPOCH = Part("trainers.trainer:Trainer._initial_epoch", BACKUP)
BACKUP_BEGIN = Part(f"{_BACKUP}on_train_begin", BACKUP, "self, logs=None")
BACKUP_EPOCH_BEGIN = Part(f"{_BACKUP}on_epoch_begin", BACKUP, "self, epoch, logs=None")
BACKUP_BATCH_END = Part(f"{_BACKUP}on_train_batch_end", BACKUP, "self, batch, logs=None")
BACKUP_EPOCH_END = Part(f"{_BACKUP}on_epoch_end", BACKUP, "self, epoch, logs=None")
BACKUP_SAVE = Part(f"{_BACKUP}_save_model", BACKUP, "self")
BACKUP_END = Part(f"{_BACKUP}on_train_end", BACKUP, "self, logs=None")
CURRENT_EPOCH = Part(f"{_BACKUP}_current_epoch", BACKUP)

# Export.
INPUT_SIGNATURE = Part("export.export_utils:get_input_signature", SAVED_MODEL, "model")

CONTRACT = Contract(
    "Keras",
    "keras",
    "keras.src",
    "3.15",
    VARIABLES,
    [part for part in vars().values() if isinstance(part, Part)],
)

in_stateless_scope: Any = CONTRACT.get(IN_STATELESS_SCOPE, lambda: False)
DataAdapter: Any = CONTRACT.get(DATA_ADAPTER, object)
unpack_x_y_sample_weight: Any = CONTRACT.get(UNPACK)
class_weight_to_sample_weights: Any = CONTRACT.get(CLASS_WEIGHTS)
get_input_signature: Any = CONTRACT.get(INPUT_SIGNATURE)
