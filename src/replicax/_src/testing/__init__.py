"""Run one function in several processes that form a cluster."""
