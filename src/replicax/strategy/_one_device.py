"""OneDeviceStrategy, and the strategy that is there when no other is."""

import copy
from typing import Any, final

import jax

from replicax.context._current import set_default
from replicax.strategy._v2 import Strategy
from replicax.topology._mesh import Topology


@final
class OneDeviceStrategy(Strategy):
    """All variables and all computation on one device; for trying a program out.

    Args:
        device: Its name, such as ``"GPU:0"``.

    Example:
        >>> strategy = rx.distribute.OneDeviceStrategy("CPU:0")
        >>> float(strategy.run(lambda x: x * 2, args=(jnp.float32(3),)))
        6.0
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(Topology.local([device]))

    @property
    def wraps_single(self) -> bool:
        """Its one replica's values are plain."""
        return False

    def _configured(self, config_proto: Any) -> Any:
        return copy.deepcopy(config_proto)


@final
class DefaultStrategy(Strategy):
    """One replica, wherever JAX computes; what `get_strategy` gives outside of every scope."""

    def __init__(self) -> None:
        super().__init__(None)

    def _configured(self, config_proto: Any) -> Any:
        return copy.deepcopy(config_proto)

    def __repr__(self) -> str:
        return "<the default strategy>"


set_default(DefaultStrategy())
