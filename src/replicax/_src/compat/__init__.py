"""Every private part of JAX and jaxlib that replicax relies on, each guarded and tested."""
