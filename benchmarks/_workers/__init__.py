"""What a worker of each library does in ``benchmarks/workers.py``."""
