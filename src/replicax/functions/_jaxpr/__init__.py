"""All that reads and rewrites jaxprs, JAX's form of a traced function, is in this package.

`_lift` makes a jaxpr of a Python function with variables, and rewrites it; `_replicas` says what of
a replica function differs between replicas, and rewrites it to work on parts. What these two take
for granted of JAX is listed in ``tests/functions/test_jaxpr.py``.
"""
