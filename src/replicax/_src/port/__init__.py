"""The rewriter behind ``replicax port``: TensorFlow programs to replicax programs."""
