"""Losses averaged over the global batch."""
