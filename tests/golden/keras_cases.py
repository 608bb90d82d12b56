"""The Keras parts of TensorFlow's tutorials on distribution, for TensorFlow and for replicax.

Each program takes the library (``tf`` or ``rx``) and a strategy, and differs by nothing else.
Initial weights are given, and rows come in their order.
"""

import numpy as np

ROWS, BATCH, CLASSES = 100, 32, 10  # the last batch has 4 rows


def images():
    """Noisy copies of ten patterns of 8 x 8, and which one each is of."""
    rng = np.random.default_rng(0)
    patterns = rng.uniform(size=(CLASSES, 8, 8, 1))
    labels = rng.integers(0, CLASSES, ROWS)
    inputs = patterns[labels] + rng.normal(size=(ROWS, 8, 8, 1)) * 0.3
    return inputs.astype("float32"), labels.astype("int32")


def network(keras):
    """The network of the tutorials, smaller, with initial weights from NumPy."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(CLASSES),
        ]
    )
    rng = np.random.default_rng(1)
    model.set_weights([rng.normal(size=w.shape) * 0.2 for w in model.weights])
    return model


def fit(lib, strategy):
    """'Distributed training with Keras', and with several workers: compile and fit."""
    keras = lib.keras
    inputs, labels = images()
    dataset = lib.data.Dataset.from_tensor_slices((inputs, labels)).batch(BATCH)
    with strategy.scope():
        model = network(keras)
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.Adam(0.01),
            metrics=["accuracy"],
        )

    def decay(epoch):
        return 0.01 if epoch < 1 else 0.005

    history = model.fit(
        dataset,
        epochs=3,
        callbacks=[keras.callbacks.LearningRateScheduler(decay)],
        verbose=0,
    )
    evaluated = model.evaluate(dataset, verbose=0)
    return {**history.history, "evaluated": list(evaluated)}


def loop(lib, strategy):
    """'Custom training': the loop with a tape, a loss by examples, and metrics."""
    keras = lib.keras
    inputs, labels = images()
    dataset = lib.data.Dataset.from_tensor_slices((inputs, labels)).batch(BATCH)
    spread = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        test_loss = keras.metrics.Mean()
        model = network(keras)
        optimizer = keras.optimizers.Adam(learning_rate=0.01)
        optimizer.build(model.trainable_variables)  # TensorFlow cannot do so in a function

    def compute_loss(y, predictions, model_losses):
        loss = lib.nn.compute_average_loss(loss_object(y, predictions), global_batch_size=BATCH)
        return loss + lib.nn.scale_regularization_loss(sum(model_losses))

    def train_step(batch):
        x, y = batch
        with lib.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = compute_loss(y, predictions, model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    def test_step(batch):
        x, y = batch
        test_loss.update_state(loss_object(y, model(x, training=False)))

    @lib.function
    def distributed_train_step(batch):
        return strategy.reduce(
            lib.distribute.ReduceOp.SUM, strategy.run(train_step, args=(batch,)), axis=None
        )

    @lib.function
    def distributed_test_step(batch):
        return strategy.run(test_step, args=(batch,))

    result = {"losses": [], "accuracy": [], "test_loss": [], "steps": []}
    for _ in range(2):
        result["losses"] += [float(distributed_train_step(batch)) for batch in spread]
        for batch in spread:
            distributed_test_step(batch)
        result["accuracy"].append(float(accuracy.result()))
        result["test_loss"].append(float(test_loss.result()))
        result["steps"].append(int(optimizer.iterations.numpy()))
        accuracy.reset_state()
        test_loss.reset_state()
    return result


def loop_workers(lib, strategy):
    """'Multi-worker training with a custom training loop': each worker reads its own rows."""
    keras = lib.keras
    inputs, labels = images()

    def dataset_fn(context):
        rows = lib.data.Dataset.from_tensor_slices((inputs, labels))
        rows = rows.shard(context.num_input_pipelines, context.input_pipeline_id)
        return rows.repeat().batch(context.get_per_replica_batch_size(BATCH))

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        model = network(keras)
        optimizer = keras.optimizers.Adam(learning_rate=0.01)
        optimizer.build(model.trainable_variables)
        spread = strategy.distribute_datasets_from_function(dataset_fn)

    def step_fn(batch):
        x, y = batch
        with lib.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = lib.nn.compute_average_loss(loss_object(y, predictions), global_batch_size=BATCH)
            loss += lib.nn.scale_regularization_loss(sum(model.losses))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predictions)
        return loss

    @lib.function
    def train_step(iterator):
        per_replica = strategy.run(step_fn, args=(next(iterator),))
        return strategy.reduce(lib.distribute.ReduceOp.SUM, per_replica, axis=None)

    result = {"losses": [], "accuracy": [], "steps": []}
    iterator = iter(spread)
    for _ in range(2):
        result["losses"] += [float(train_step(iterator)) for _ in range(ROWS // BATCH)]
        result["accuracy"].append(float(accuracy.result()))
        result["steps"].append(int(optimizer.iterations.numpy()))
        accuracy.reset_state()
    return result
