"""ConfigProto: the session configuration that v1 strategies adjust."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field


@dataclass
class _Experimental:
    collective_group_leader: str = ""


@dataclass
class ConfigProto:
    """The fields of TensorFlow's session configuration that strategies look at.

    There are no sessions here; it is carried for programs that pass it around.

    Example:
        >>> strategy = rx.compat.v1.distribute.MirroredStrategy(["CPU:0"])
        >>> strategy.update_config_proto(rx.compat.v1.ConfigProto()).isolate_session_state
        True
    """

    allow_soft_placement: bool = False
    isolate_session_state: bool = False
    device_filters: list[str] = field(default_factory=list)
    experimental: _Experimental = field(default_factory=_Experimental)

    def copy(self) -> ConfigProto:
        """An equal configuration that can be changed."""
        return copy.deepcopy(self)
