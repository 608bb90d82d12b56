"""The only package that reads and rewrites jaxprs, JAX's representation of a traced function.

`lift` traces a Python function with variables to a jaxpr and rewrites it; `replica_variance`
determines which outputs of a replica function differ between replicas; `on_shards` rewrites the
function to compute on shards of sharded variables; `cpu_kernels` replaces operations that XLA runs
slowly on CPUs. The assumptions about JAX are listed in ``tests/functions/test_jaxpr.py``.
"""
