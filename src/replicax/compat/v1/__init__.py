"""TensorFlow 1 names that distributed programs still use.

Example:
    >>> rx.compat.v1.ConfigProto(allow_soft_placement=True).allow_soft_placement
    True
"""

from typing import TYPE_CHECKING

from replicax._src.base.lazy import on_demand
from replicax._src.base.ops import enable_eager_execution
from replicax._src.strategy.v1 import ConfigProto, TensorInfo
from replicax.compat.v1 import distribute

if TYPE_CHECKING:
    from replicax._src.tf_ops.v1 import (
        div,
        enable_control_flow_v2,
        enable_resource_variables,
        enable_tensor_equality,
        enable_v2_behavior,
        enable_v2_tensorshape,
        random_normal,
        random_normal_initializer,
        random_uniform,
        random_uniform_initializer,
        to_bfloat16,
        to_float,
        to_int32,
        to_int64,
        truncated_normal_initializer,
    )
    from replicax.compat.v1 import logging, losses, train

__all__ = [
    "ConfigProto",
    "TensorInfo",
    "distribute",
    "div",
    "enable_control_flow_v2",
    "enable_eager_execution",
    "enable_resource_variables",
    "enable_tensor_equality",
    "enable_v2_behavior",
    "enable_v2_tensorshape",
    "logging",
    "losses",
    "random_normal",
    "random_normal_initializer",
    "random_uniform",
    "random_uniform_initializer",
    "to_bfloat16",
    "to_float",
    "to_int32",
    "to_int64",
    "train",
    "truncated_normal_initializer",
]

__dir__ = __all__.copy

_HOMES = {
    "logging": "replicax.compat.v1.logging",
    "losses": "replicax.compat.v1.losses",
    "train": "replicax.compat.v1.train",
    **dict.fromkeys(
        (
            "div",
            "enable_control_flow_v2",
            "enable_resource_variables",
            "enable_tensor_equality",
            "enable_v2_behavior",
            "enable_v2_tensorshape",
            "random_normal",
            "random_normal_initializer",
            "random_uniform",
            "random_uniform_initializer",
            "to_bfloat16",
            "to_float",
            "to_int32",
            "to_int64",
            "truncated_normal_initializer",
        ),
        "replicax._src.tf_ops.v1",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, adviser="replicax._src.port.rules")
