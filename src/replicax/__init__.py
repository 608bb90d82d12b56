"""replicax: the tf.distribute programming model on JAX."""
