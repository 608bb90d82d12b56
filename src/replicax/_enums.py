"""The enumerations that variables and reductions share."""

import enum
from typing import Any


class VariableSynchronization(enum.Enum):
    """When the copies of a distributed variable are made equal.

    ``AUTO`` is ``ON_WRITE``; ``ON_READ`` keeps one copy for each replica and combines them when
    the variable is read outside of them; ``NONE`` is refused by strategies.

    Example:
        >>> rx.VariableSynchronization.ON_READ.name
        'ON_READ'
    """

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values of several replicas become one.

    Example:
        >>> rx.VariableAggregation.SUM.name
        'SUM'
    """

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class UnconnectedGradients(enum.Enum):
    """What `GradientTape.gradient` returns for a source that the target does not depend on.

    Example:
        >>> rx.UnconnectedGradients("zero").name
        'ZERO'
    """

    NONE = "none"
    ZERO = "zero"

    @staticmethod
    def parse(value: Any) -> "UnconnectedGradients":
        """``value`` as the enumeration.

        Raises:
            ValueError: If it names none.
        """
        try:
            return UnconnectedGradients(value)
        except ValueError:
            raise ValueError(f"Unknown value for unconnected_gradients: {value!r}") from None


class ReduceOp(enum.Enum):
    """How `Strategy.reduce` and `ReplicaContext.all_reduce` combine values.

    Example:
        >>> rx.distribute.ReduceOp("SUM").name
        'SUM'
    """

    SUM = "SUM"
    MEAN = "MEAN"

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> "ReduceOp":
        """The op that a variable's aggregation stands for.

        Raises:
            ValueError: For an aggregation that is not a reduction.
        """
        ops = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}
        if aggregation not in ops:
            raise ValueError(
                f"{aggregation} is not a reduction; only VariableAggregation.SUM and"
                " VariableAggregation.MEAN have a ReduceOp."
            )
        return ops[aggregation]

    @staticmethod
    def parse(op: Any) -> "ReduceOp":
        """``op`` as the enumeration; its name in any case is fine.

        Raises:
            ValueError: If it names no op.
        """
        if isinstance(op, ReduceOp):
            return op
        if isinstance(op, str) and op.upper() in ReduceOp.__members__:
            return ReduceOp[op.upper()]
        raise ValueError(
            f"There is no reduce op {op!r}; use rx.distribute.ReduceOp.SUM or MEAN,"
            ' or the text "SUM" or "MEAN".'
        )
