"""What the components of a per-replica value look like."""

from typing import Any

import numpy as np

from replicax._tensor_spec import TensorSpec, TypeSpec
from replicax.values._per_replica import DistributedValues, Stacked
from replicax.values._placement import is_array


class PerReplicaSpec(TypeSpec):
    """The specs of a per-replica value's components, as `input_signature` takes them.

    Example:
        >>> spec = rx.distribute.PerReplicaSpec(rx.TensorSpec([None]), rx.TensorSpec([None]))
        >>> len(spec.value_specs)
        2
    """

    def __init__(self, *value_specs: Any) -> None:
        self.value_specs = value_specs

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        """Whether a per-replica value, or the spec of one, has components that fit these."""
        if isinstance(spec_or_value, PerReplicaSpec):
            parts = spec_or_value.value_specs
        elif isinstance(spec_or_value, DistributedValues):
            parts = spec_or_value.values
        else:
            return False
        return len(parts) == len(self.value_specs) and all(
            mine.is_compatible_with(part)
            for mine, part in zip(self.value_specs, parts, strict=True)
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.value_specs == other.value_specs

    def __hash__(self) -> int:
        return hash(self.value_specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec{self.value_specs!r}"


def component_specs(value: DistributedValues) -> tuple[Any, ...]:
    """The spec of each component; arrays that differ in shape give specs that differ."""
    form = value.form
    if isinstance(form, Stacked):
        spec = TensorSpec(form.array.shape[1:], form.array.dtype)
        return (spec,) * len(form.topology.own)
    return tuple(
        TensorSpec(v.shape, v.dtype) if is_array(v) or isinstance(v, np.ndarray) else v
        for v in value.values
    )
