"""replicax: the tf.distribute programming model on JAX.

Write a replica function once; one line decides whether it runs on one device, the devices of one
machine, many machines, or a TPU slice.
"""

from typing import TYPE_CHECKING

from replicax.topology._virtual import prepare_environment

prepare_environment()

from replicax import distribute  # noqa: E402
from replicax._basics import (  # noqa: E402
    Tensor,
    add,
    constant,
    enable_eager_execution,
    identity,
)
from replicax._lazy import on_demand  # noqa: E402
from replicax._types import (  # noqa: E402  # noqa: E402
    TensorSpec,
    TypeSpec,
    UnconnectedGradients,
    VariableAggregation,
    VariableSynchronization,
)
from replicax.functions._function import function  # noqa: E402
from replicax.functions._grad import grad, value_and_grad  # noqa: E402
from replicax.functions._tape import GradientTape  # noqa: E402
from replicax.integrations._hook import join_libraries  # noqa: E402
from replicax.state._creation import variable_creator_scope  # noqa: E402
from replicax.state._held import variables  # noqa: E402
from replicax.state._variable import Variable  # noqa: E402
from replicax.topology._devices import device, device_name  # noqa: E402
from replicax.values._reduce import IndexedSlices  # noqa: E402

if TYPE_CHECKING:
    from replicax import (
        compat,
        config,
        data,
        debug,
        errors,
        integrations,
        io,
        metrics,
        nest,
        nn,
        random,
        saved_model,
        summary,
        testing,
        tpu,
        train,
    )
    from replicax.ahead._preflight import preflight
    from replicax.functions._control import cond, scan, while_loop
    from replicax.integrations._rx_keras import keras

__all__ = [
    "GradientTape",
    "IndexedSlices",
    "Tensor",
    "TensorSpec",
    "TypeSpec",
    "UnconnectedGradients",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "add",
    "compat",
    "cond",
    "config",
    "constant",
    "data",
    "debug",
    "device",
    "device_name",
    "distribute",
    "enable_eager_execution",
    "errors",
    "function",
    "grad",
    "identity",
    "integrations",
    "io",
    "keras",
    "metrics",
    "nest",
    "nn",
    "preflight",
    "random",
    "saved_model",
    "scan",
    "summary",
    "testing",
    "tpu",
    "train",
    "value_and_grad",
    "variable_creator_scope",
    "variables",
    "while_loop",
]

__dir__ = __all__.copy
__version__ = "0.1.0.dev0"

_CONTROL = "replicax.functions._control"
_HOMES = {
    **{
        name: f"replicax.{name}"
        for name in (
            "compat",
            "config",
            "data",
            "debug",
            "errors",
            "integrations",
            "io",
            "metrics",
            "nest",
            "nn",
            "random",
            "saved_model",
            "summary",
            "testing",
            "tpu",
            "train",
        )
    },
    "cond": _CONTROL,
    "scan": _CONTROL,
    "while_loop": _CONTROL,
    "keras": "replicax.integrations._rx_keras",
    "preflight": "replicax.ahead._preflight",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, adviser="replicax.cli._port_rules")

join_libraries()
