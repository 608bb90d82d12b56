"""Options that are attached to a dataset with `Dataset.with_options`."""

import copy
import enum
from typing import TYPE_CHECKING, Any, ClassVar

from replicax._src.base.tf_errors import StructureError


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is divided among workers.

    ``OFF`` gives every worker all elements; ``FILE`` shards by file; ``DATA`` shards by element;
    ``AUTO`` means ``FILE`` if the dataset reads files and ``DATA`` otherwise; ``HINT`` shards at
    the ``shard(SHARD_HINT, ...)`` in the pipeline.

    Example:
        >>> rx.data.experimental.AutoShardPolicy.DATA.value
        2
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class AutotuneAlgorithm(enum.Enum):
    """TensorFlow's autotuning algorithm; accepted for compatibility, without effect here.

    Example:
        >>> rx.data.experimental.AutotuneAlgorithm.HILL_CLIMB.value
        1
    """

    DEFAULT = 0
    HILL_CLIMB = 1
    GRADIENT_DESCENT = 2
    MAX_PARALLELISM = 3
    STAGE_BASED = 4


class ExternalStatePolicy(enum.Enum):
    """TensorFlow's policy for state that it cannot save; accepted, without effect here.

    Example:
        >>> rx.data.experimental.ExternalStatePolicy.FAIL.value
        2
    """

    WARN = 0
    IGNORE = 1
    FAIL = 2


class _Settings:
    """Typed attributes with defaults; setting an unknown one raises and lists the valid names.

    Each field is declared by its type and default. A default that is a class is instantiated for
    every object.
    """

    _fields: ClassVar[dict[str, tuple[type, Any]]]
    _aliases: ClassVar[dict[str, str]] = {}  # deprecated names of fields, and their current names
    changed: set[str]

    def __init__(self) -> None:
        for name, (_, value) in self._fields.items():
            object.__setattr__(self, name, value() if isinstance(value, type) else value)
        object.__setattr__(self, "changed", set())

    if not TYPE_CHECKING:  # hidden from checkers, so that they reject undeclared fields

        def __getattr__(self, name: str) -> Any:
            if name in self._aliases:
                return getattr(self, self._aliases[name])
            raise AttributeError(self._unknown(name))

        def __setattr__(self, name: str, value: Any) -> None:
            name = self._aliases.get(name, name)
            if name not in self._fields:
                raise AttributeError(self._unknown(name))
            kind = self._fields[name][0]
            if value is not None and not isinstance(value, kind):
                raise StructureError(
                    f"{type(self).__name__}.{name} = {value!r}: this option is of type"
                    f" {kind.__name__}, got {type(value).__name__}."
                )
            object.__setattr__(self, name, value)
            self.changed.add(name)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self._fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._fields)
        return f"{type(self).__name__}({values})"

    def overlay(self, other: "_Settings") -> None:
        """Copy the fields that were set on ``other``."""
        for name in self._fields:
            value = getattr(other, name)
            if isinstance(value, _Settings):
                getattr(self, name).overlay(value)
            elif name in other.changed:
                setattr(self, name, value)

    def _unknown(self, name: str) -> str:
        known = ", ".join(sorted({*self._fields, *self._aliases}))
        return f"{type(self).__name__} has no option {name!r}; it has {known}."


def _switches(*names: str) -> dict[str, tuple[type, Any]]:
    return dict.fromkeys(names, (bool, None))


class DistributeOptions(_Settings):
    """Options for distributing a dataset with a strategy.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy`.
        num_devices: The number of devices.

    Example:
        >>> options = rx.data.Options()
        >>> options.experimental_distribute.auto_shard = False
        >>> options.experimental_distribute.auto_shard_policy.name
        'OFF'
    """

    _fields: ClassVar = {
        "auto_shard_policy": (AutoShardPolicy, AutoShardPolicy.AUTO),
        "num_devices": (int, None),
    }

    auto_shard_policy: AutoShardPolicy
    num_devices: int | None

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "auto_shard":
                name, value = (
                    "auto_shard_policy",
                    AutoShardPolicy.AUTO if value else AutoShardPolicy.OFF,
                )
            elif name == "auto_shard_policy":
                value = AutoShardPolicy(value)
            super().__setattr__(name, value)

    @property
    def auto_shard(self) -> bool:
        """Whether the dataset is sharded across workers.

        Example:
            >>> rx.data.experimental.DistributeOptions().auto_shard
            True
        """
        return self.auto_shard_policy is not AutoShardPolicy.OFF


class ThreadingOptions(_Settings):
    """Threading options of a pipeline; accepted for compatibility, without effect here.

    Example:
        >>> rx.data.Options().threading.private_threadpool_size is None
        True
    """

    _fields: ClassVar = {
        "max_intra_op_parallelism": (int, None),
        "private_threadpool_size": (int, None),
    }

    max_intra_op_parallelism: int | None
    private_threadpool_size: int | None


class AutotuneOptions(_Settings):
    """TensorFlow's autotuning options; accepted for compatibility, without effect here.

    Example:
        >>> options = rx.data.Options()
        >>> options.autotune.enabled = False
        >>> options.autotune.enabled
        False
    """

    _fields: ClassVar = {
        "autotune_algorithm": (AutotuneAlgorithm, None),
        "cpu_budget": (int, None),
        "enabled": (bool, None),
        "initial_parallelism": (int, None),
        "min_parallelism": (int, None),
        "ram_budget": (int, None),
    }

    autotune_algorithm: AutotuneAlgorithm | None
    cpu_budget: int | None
    enabled: bool | None
    initial_parallelism: int | None
    min_parallelism: int | None
    ram_budget: int | None


class OptimizationOptions(_Settings):
    """TensorFlow's graph optimizations; accepted for compatibility, without effect here.

    Example:
        >>> options = rx.data.Options()
        >>> options.experimental_optimization.map_fusion = True
        >>> options.experimental_optimization.map_fusion
        True
    """

    _fields: ClassVar = _switches(
        "apply_default_optimizations",
        "filter_fusion",
        "filter_parallelization",
        "inject_prefetch",
        "map_and_batch_fusion",
        "map_and_filter_fusion",
        "map_fusion",
        "map_parallelization",
        "noop_elimination",
        "parallel_batch",
        "seq_interleave_prefetch",
        "shuffle_and_repeat_fusion",
    )

    apply_default_optimizations: bool | None
    filter_fusion: bool | None
    filter_parallelization: bool | None
    inject_prefetch: bool | None
    map_and_batch_fusion: bool | None
    map_and_filter_fusion: bool | None
    map_fusion: bool | None
    map_parallelization: bool | None
    noop_elimination: bool | None
    parallel_batch: bool | None
    seq_interleave_prefetch: bool | None
    shuffle_and_repeat_fusion: bool | None


class ServiceOptions(_Settings):
    """Options of TensorFlow's data service; accepted for compatibility, without effect here.

    Example:
        >>> rx.data.Options().experimental_service.pinned is None
        True
    """

    _fields: ClassVar = _switches("pinned")

    pinned: bool | None


class Options(_Settings):
    """Options of a dataset, attached by `Dataset.with_options`.

    All of TensorFlow's options are accepted; options that tune its engine have no effect here.

    Attributes:
        autotune: `AutotuneOptions`; without effect.
        dataset_name: A name; without effect.
        deterministic: Whether elements keep their order; they always do here.
            ``experimental_deterministic`` is an alias.
        experimental_distribute: `DistributeOptions`.
        experimental_external_state_policy: Without effect.
        experimental_optimization: `OptimizationOptions`; without effect.
        experimental_service: `ServiceOptions`; without effect.
        experimental_slack: Without effect.
        experimental_symbolic_checkpoint: Without effect.
        experimental_warm_start: Without effect.
        framework_type: Without effect.
        threading: `ThreadingOptions`; without effect. ``experimental_threading`` is an alias.

    Example:
        >>> options = rx.data.Options()
        >>> policy = rx.data.experimental.AutoShardPolicy.DATA
        >>> options.experimental_distribute.auto_shard_policy = policy
        >>> dataset = rx.data.Dataset.range(4).with_options(options)
        >>> dataset.options().experimental_distribute.auto_shard_policy.name
        'DATA'
    """

    _fields: ClassVar = {
        **_switches(
            "deterministic",
            "experimental_slack",
            "experimental_symbolic_checkpoint",
            "experimental_warm_start",
        ),
        "autotune": (AutotuneOptions, AutotuneOptions),
        "dataset_name": (str, None),
        "experimental_distribute": (DistributeOptions, DistributeOptions),
        "experimental_external_state_policy": (ExternalStatePolicy, None),
        "experimental_optimization": (OptimizationOptions, OptimizationOptions),
        "experimental_service": (ServiceOptions, ServiceOptions),
        "framework_type": (list, None),
        "threading": (ThreadingOptions, ThreadingOptions),
    }
    _aliases: ClassVar = {
        "experimental_deterministic": "deterministic",
        "experimental_threading": "threading",
    }

    autotune: AutotuneOptions
    dataset_name: str | None
    deterministic: bool | None
    experimental_deterministic: bool | None
    experimental_distribute: DistributeOptions
    experimental_external_state_policy: ExternalStatePolicy | None
    experimental_optimization: OptimizationOptions
    experimental_service: ServiceOptions
    experimental_slack: bool | None
    experimental_symbolic_checkpoint: bool | None
    experimental_threading: ThreadingOptions
    experimental_warm_start: bool | None
    framework_type: list[Any] | None
    threading: ThreadingOptions

    def merge(self, options: "Options") -> "Options":
        """Return these options, overridden by the fields that are set on ``options``.

        Args:
            options: Options that take precedence.

        Returns:
            New options.

        Example:
            >>> ours, theirs = rx.data.Options(), rx.data.Options()
            >>> theirs.deterministic = False
            >>> ours.merge(theirs).deterministic
            False
        """
        merged = copy.deepcopy(self)
        merged.overlay(options)
        return merged
