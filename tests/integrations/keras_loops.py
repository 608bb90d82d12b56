"""A custom training loop with Keras objects, under a strategy and by Keras's own stateless way."""

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

keras = rx.keras

BATCH = 8
SIZES = (8, 8, 5)  # the last one is short: 3 and 2 rows, or 2, 2, 1 and 0


def batches(shape=(4,), kind="float32", sizes=SIZES):
    """Batches of inputs and targets; inputs of an integer kind are words of a vocabulary of 10."""
    rng = np.random.default_rng(0)
    rows = sum(sizes)
    if kind == "int32":
        x = rng.integers(0, 10, size=(rows, *shape)).astype(kind)
    else:
        x = rng.normal(size=(rows, *shape)).astype(kind)
    y = rng.normal(size=(rows, 1)).astype("float32")
    ends = np.cumsum(sizes)
    return [(x[e - n : e], y[e - n : e]) for e, n in zip(ends, sizes, strict=True)]


def initializers(seed=0):
    """Initial weights that are the same whenever a model is made."""
    while True:
        seed += 1
        yield keras.initializers.GlorotUniform(seed)


def replicated(strategy, make, data, *, eager=False):
    """Losses, weights and the number of steps after a loop over ``data`` under ``strategy``."""
    with strategy.scope():
        model, optimizer = make()
        metric = keras.metrics.MeanSquaredError()

    def step(x, y):
        if not model.built:
            model(x)

        def loss_fn():
            predictions = model(x, training=True)
            errors = keras.ops.square(keras.ops.cast(predictions, "float32") - y).sum(axis=-1)
            loss = rx.nn.compute_average_loss(errors, global_batch_size=BATCH)
            if model.losses:
                loss += rx.nn.scale_regularization_loss(sum(model.losses))
            return optimizer.scale_loss(loss), (loss, predictions)

        (_, (loss, predictions)), grads = rx.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        metric.update_state(y, predictions)
        return loss

    def train(batch):
        return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

    run = train if eager else rx.function(train)
    rows = rx.data.Dataset.from_generator(
        lambda: iter(data),
        output_signature=jax.tree.map(
            lambda a: rx.TensorSpec((None, *a.shape[1:]), a.dtype), data[0]
        ),
    )
    losses = [float(run(batch)) for batch in strategy.experimental_distribute_dataset(rows)]
    return losses, weights(model), int(optimizer.iterations), float(metric.result())


def alone(make, data):
    """The same by ``stateless_call`` and ``stateless_apply``, on one device, without replicax."""
    model, optimizer = make()
    model(data[0][0])
    optimizer.build(model.trainable_variables)
    metric = keras.metrics.MeanSquaredError()

    @jax.jit
    def step(trainable, fixed, slots, x, y):
        def loss_fn(trainable):
            predictions, new, losses = model.stateless_call(
                trainable, fixed, x, training=True, return_losses=True
            )
            errors = jnp.square(predictions.astype("float32") - y).sum(axis=-1)
            loss = errors.sum() / BATCH + sum(losses)
            with keras.StatelessScope(list(zip(optimizer.variables, slots, strict=True))):
                scaled = optimizer.scale_loss(loss)
            return scaled, (loss, new, predictions)

        grads, (loss, new, predictions) = jax.grad(loss_fn, has_aux=True)(trainable)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return trainable, new, slots, loss, predictions

    state = [
        [v.value for v in group]
        for group in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    ]
    losses = []
    for x, y in data:
        *state, loss, predictions = step(*state, x, y)
        losses.append(float(loss))
        metric.update_state(y, predictions)
    for group, values in zip(
        (model.trainable_variables, model.non_trainable_variables, optimizer.variables),
        state,
        strict=True,
    ):
        for v, value in zip(group, values, strict=True):
            v.assign(value)
    return losses, weights(model), int(optimizer.iterations), float(metric.result())


def weights(model):
    """The floating-point variables as NumPy arrays."""
    return [np.asarray(v) for v in model.variables if "float" in v.dtype]
