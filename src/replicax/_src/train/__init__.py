"""Checkpoints, saved models, preemption and progress."""
