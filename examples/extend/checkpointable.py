"""A checkpointable object: state other than arrays, saved and restored with the model.

python examples/extend/checkpointable.py
"""

import tempfile
from typing import Any

import replicax as rx


class EarlyStopping:
    """Stop when the loss has not improved for ``patience`` steps, also across restarts."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.waited = patience, float("inf"), 0

    def update(self, loss: float) -> bool:
        """Record a loss; return whether to stop."""
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        return self.waited >= self.patience

    def save_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: JSON-serializable values."""
        return {"best": self.best, "waited": self.waited}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Restore what `save_state` returned."""
        self.best, self.waited = state["best"], state["waited"]


stopping = EarlyStopping(patience=3)
stopping.update(0.5)
stopping.update(0.7)
saved: rx.extend.Checkpointable = stopping  # for type checkers: it has both methods
checkpoint = rx.train.Checkpoint(stopping=saved, step=rx.Variable(2))
path = checkpoint.save(f"{tempfile.mkdtemp()}/ckpt")

restarted = EarlyStopping(patience=3)
rx.train.Checkpoint(stopping=restarted, step=rx.Variable(0)).restore(path)
print(vars(restarted))
assert (restarted.best, restarted.waited) == (0.5, 1)
