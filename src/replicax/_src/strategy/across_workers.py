"""Methods of strategies on several workers: react to a resize, and leave the run."""

import sys
from collections.abc import Callable
from typing import Self

from replicax._src.strategy.base import StrategyBase
from replicax._src.workers import group as _group


class AcrossWorkers(StrategyBase):
    """A strategy whose replicas may be on several workers."""

    def on_resize(self, fn: Callable[[Self], object]) -> Callable[[Self], object]:
        """Call ``fn(strategy)`` whenever the number of workers of an elastic run has changed.

        It is called between two steps, when variables, datasets and `num_replicas_in_sync` are
        those of the new workers: for example to change a learning rate, or to log. Without
        ``replicax launch --elastic`` it is never called.

        Args:
            fn: Takes the strategy; its result is ignored.

        Returns:
            ``fn``, so that the method can be a decorator.

        Example:
            >>> strategy = rx.distribute.MultiWorkerMirroredStrategy()
            >>> @strategy.on_resize
            ... def log(strategy):
            ...     print("replicas:", strategy.num_replicas_in_sync)
        """
        vars(self).setdefault("resize_callbacks", []).append(fn)
        return fn

    def leave(self, error: BaseException | None = None) -> None:
        """Notify the other workers that this one leaves the run.

        A worker that exits does this automatically. Call it if an error is caught and the process
        keeps running, as in a Ray actor or a notebook: otherwise the others wait for a minute until
        they declare this worker lost. Variables can still be read afterwards, but every collective
        of this process raises an error. With a single worker it does nothing.

        Args:
            error: Why this worker cannot go on; by default the exception that is being handled.
                The others raise a `WorkerLostError` with its text.

        Example:
            >>> strategy = rx.distribute.MultiWorkerMirroredStrategy()
            >>> try:
            ...     total = strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None)
            ... finally:
            ...     strategy.leave()
        """
        topology, group = self.topology, _group.current()
        if group is not None and topology is not None and not topology.is_fully_addressable:
            group.depart(error or sys.exc_info()[1])
