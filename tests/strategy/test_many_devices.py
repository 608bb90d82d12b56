from tests.fresh_process import run_fresh

SCRIPT = """
import jax, jax.numpy as jnp, replicax as rx
strategy = rx.distribute.MirroredStrategy()
traces = []
with strategy.scope():
    w = rx.Variable(jnp.zeros(8))
    seen = rx.Variable(0.0, synchronization=rx.VariableSynchronization.ON_READ,
                       aggregation=rx.VariableAggregation.SUM)

def step(x):
    traces.append(1)
    context = rx.distribute.get_replica_context()
    gradient = context.all_reduce("MEAN", w - x)
    w.assign_sub(0.5 * gradient)
    seen.assign_add(1.0)
    return context.all_reduce("SUM", context.replica_id_in_sync_group)

train = rx.function(lambda x: strategy.run(step, args=(x,)))
results = [train(jnp.ones(8)) for _ in range(30)]  # nothing waits in between
ids = [int(v) for v in results[-1].values]
rx.debug.check_in_sync()
print(strategy.num_replicas_in_sync, len(traces), float(w[0]) > 0.999, float(seen), set(ids))
"""


def test_64_virtual_devices_train_back_to_back_without_a_deadlock():
    result = run_fresh(SCRIPT, REPLICAX_CPU_DEVICES="64")

    assert result.stdout.split() == ["64", "1", "True", "1920.0", "{2016}"], result.stderr
