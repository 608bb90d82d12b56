"""Options that travel with a dataset."""

import copy
import enum
from typing import Any


class AutoShardPolicy(enum.IntEnum):
    """How a dataset is divided among workers.

    ``OFF`` gives every worker everything; ``FILE`` gives each its own files; ``DATA`` gives each
    its own elements; ``AUTO`` is ``FILE`` where the dataset reads files and ``DATA`` otherwise;
    ``HINT`` divides where ``shard(SHARD_HINT, ...)`` stands.

    Example:
        >>> rx.data.experimental.AutoShardPolicy.DATA.value
        2
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class _Settings:
    """Attributes with defaults; setting an unknown one is an error that lists the known."""

    _defaults: dict[str, Any]
    changed: set[str]

    def __init__(self) -> None:
        for name, value in self._defaults.items():
            object.__setattr__(self, name, copy.copy(value))
        object.__setattr__(self, "changed", set())

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._defaults:
            known = ", ".join(sorted(self._defaults))
            raise AttributeError(f"{type(self).__name__} has no option {name!r}; it has {known}.")
        object.__setattr__(self, name, value)
        self.changed.add(name)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self._defaults)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._defaults)
        return f"{type(self).__name__}({values})"

    def overlay(self, other: "_Settings") -> None:
        """Take over what ``other`` sets."""
        for name in self._defaults:
            value = getattr(other, name)
            if isinstance(value, _Settings):
                getattr(self, name).overlay(value)
            elif name in other.changed:
                setattr(self, name, value)


class DistributeOptions(_Settings):
    """How a distribution strategy treats a dataset.

    Attributes:
        auto_shard_policy: An `AutoShardPolicy`.
        num_devices: The number of devices, if a pipeline wants to say so.

    Example:
        >>> options = rx.data.Options()
        >>> options.experimental_distribute.auto_shard = False
        >>> options.experimental_distribute.auto_shard_policy.name
        'OFF'
    """

    _defaults = {"auto_shard_policy": AutoShardPolicy.AUTO, "num_devices": None}  # noqa: RUF012

    auto_shard_policy: AutoShardPolicy
    num_devices: int | None

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
        """Whether the dataset is divided among workers at all.

        Example:
            >>> rx.data.experimental.DistributeOptions().auto_shard
            True
        """
        return self.auto_shard_policy is not AutoShardPolicy.OFF


class ThreadingOptions(_Settings):
    """Threads of a pipeline; accepted for programs that set them, and without effect here.

    Example:
        >>> rx.data.Options().threading.private_threadpool_size is None
        True
    """

    _defaults = {  # noqa: RUF012
        "max_intra_op_parallelism": None,
        "private_threadpool_size": None,
    }

    max_intra_op_parallelism: int | None
    private_threadpool_size: int | None


class Options(_Settings):
    """Options of a dataset, attached by `Dataset.with_options`.

    Attributes:
        deterministic: Elements keep their order; they always do here.
        experimental_deterministic: The older name of the same.
        experimental_distribute: `DistributeOptions`.
        experimental_slack: Accepted, without effect.
        threading: `ThreadingOptions`.

    Example:
        >>> options = rx.data.Options()
        >>> policy = rx.data.experimental.AutoShardPolicy.DATA
        >>> options.experimental_distribute.auto_shard_policy = policy
        >>> dataset = rx.data.Dataset.range(4).with_options(options)
        >>> dataset.options().experimental_distribute.auto_shard_policy.name
        'DATA'
    """

    _defaults = {  # noqa: RUF012
        "deterministic": None,
        "experimental_deterministic": None,
        "experimental_distribute": None,
        "experimental_slack": None,
        "threading": None,
    }

    deterministic: bool | None
    experimental_deterministic: bool | None
    experimental_distribute: DistributeOptions
    experimental_slack: bool | None
    threading: ThreadingOptions

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "experimental_distribute", DistributeOptions())
        object.__setattr__(self, "threading", ThreadingOptions())

    def merge(self, other: "Options") -> "Options":
        """These options, overlaid with what ``other`` sets.

        Args:
            other: Options that win where both are set.

        Returns:
            New options.

        Example:
            >>> ours, theirs = rx.data.Options(), rx.data.Options()
            >>> theirs.deterministic = False
            >>> ours.merge(theirs).deterministic
            False
        """
        merged = copy.deepcopy(self)
        merged.overlay(other)
        return merged
