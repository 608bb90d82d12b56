"""Connect the layers: provide the interfaces that lower layers declare and higher layers implement.

A module imports only lower layers. Where a lower layer depends on a concept of a higher one, it
declares a protocol, and this module sets its implementation. It is the only place that does so.
"""

from replicax._src.context.current import set_default
from replicax._src.data.optional import set_iteration
from replicax._src.functions.boundary import RunningCode
from replicax._src.functions.iterator_inputs import FunctionIteration
from replicax._src.strategy.strategies import DefaultStrategy
from replicax._src.values.per_replica import set_execution


def connect_layers() -> None:
    """Set the implementations; called once, by ``import replicax``."""
    set_execution(RunningCode())
    set_iteration(FunctionIteration())
    set_default(DefaultStrategy())
