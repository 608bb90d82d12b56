"""Metrics that accumulate over steps and replicas."""
