"""TensorFlow's functions with its signatures, on NumPy and JAX: `replicax.compat.tf`."""
