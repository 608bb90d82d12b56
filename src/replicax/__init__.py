"""replicax: the tf.distribute programming model on JAX.

Write a replica function once; one line decides whether it runs on one device, the devices of one
machine, many machines, or a TPU slice.
"""

from typing import TYPE_CHECKING

from replicax._src.base.shadows import refuse_shadow

refuse_shadow("jax")

from replicax._src.topology.virtual_devices import prepare_environment  # noqa: E402

prepare_environment()

from replicax import distribute  # noqa: E402
from replicax._src.base.lazy import OTHER_LIBRARIES, on_demand  # noqa: E402
from replicax._src.base.logs import install as install_handler  # noqa: E402
from replicax._src.base.ops import (  # noqa: E402
    Tensor,
    add,
    constant,
    enable_eager_execution,
    identity,
)
from replicax._src.base.types import (  # noqa: E402  # noqa: E402
    TensorSpec,
    TypeSpec,
    UnconnectedGradients,
    VariableAggregation,
    VariableSynchronization,
)
from replicax._src.functions.function import function  # noqa: E402
from replicax._src.functions.gradients import grad, value_and_grad  # noqa: E402
from replicax._src.functions.tape import GradientTape  # noqa: E402
from replicax._src.integrations.registry import join_libraries  # noqa: E402
from replicax._src.state.hooks import variable_creator_scope  # noqa: E402
from replicax._src.state.variable import Variable  # noqa: E402
from replicax._src.state.variables import variables  # noqa: E402
from replicax._src.topology.devices import device, device_name  # noqa: E402
from replicax._src.values.reduce import IndexedSlices  # noqa: E402
from replicax._src.wiring import connect_layers  # noqa: E402

if TYPE_CHECKING:
    from replicax import (
        compat,
        config,
        data,
        debug,
        errors,
        extend,
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
    from replicax._src.functions.accumulation import accumulate
    from replicax._src.functions.control_flow import cond, scan, while_loop
    from replicax._src.integrations.rx_keras import keras
    from replicax._src.integrations.transforms import mixed_precision, remat
    from replicax._src.preflight.preflight import preflight
    from replicax._src.state.declaration import offload

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
    "accumulate",
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
    "extend",
    "function",
    "grad",
    "identity",
    "integrations",
    "io",
    "keras",
    "metrics",
    "mixed_precision",
    "nest",
    "nn",
    "offload",
    "preflight",
    "random",
    "remat",
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
__version__ = "0.1.0"

_CONTROL = "replicax._src.functions.control_flow"
_HOMES = {
    **{
        name: f"replicax.{name}"
        for name in (
            "compat",
            "config",
            "data",
            "debug",
            "errors",
            "extend",
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
    "accumulate": "replicax._src.functions.accumulation",
    "cond": _CONTROL,
    "scan": _CONTROL,
    "while_loop": _CONTROL,
    "keras": "replicax._src.integrations.rx_keras",
    "mixed_precision": "replicax._src.integrations.transforms",
    "offload": "replicax._src.state.declaration",
    "remat": "replicax._src.integrations.transforms",
    "preflight": "replicax._src.preflight.preflight",
}

if not TYPE_CHECKING:
    __getattr__ = on_demand(__name__, _HOMES, OTHER_LIBRARIES, adviser="replicax._src.port.rules")

connect_layers()
install_handler()
join_libraries()
