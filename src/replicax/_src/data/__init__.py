"""The tf.data programming model over a NumPy engine."""
