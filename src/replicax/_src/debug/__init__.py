"""Placement of variables and timelines of training steps."""
