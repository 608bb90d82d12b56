"""A pytest plugin for foreign test suites: import replicax, and use a strategy if asked to.

``FOREIGN_WAY=imported`` imports replicax before the first test module; ``FOREIGN_WAY=strategy``
also creates a strategy and runs one compiled step with it, which installs every hook that replicax
installs lazily.
"""

import os

import replicax as rx


def _use_a_strategy() -> None:
    strategy = rx.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variable = rx.Variable(1.0, aggregation=rx.VariableAggregation.MEAN)

    @rx.function
    def step() -> None:
        strategy.run(lambda: variable.assign_add(1.0))

    step()
    assert float(variable) == 2.0


if os.environ["FOREIGN_WAY"] == "strategy":
    _use_a_strategy()
