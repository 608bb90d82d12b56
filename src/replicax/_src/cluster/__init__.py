"""Cluster specs, and the resolvers that find them.

The package determines which workers there are, where they are, and which of them this process is:
from arguments, from ``TF_CONFIG``, or from the variables that Kubeflow, Slurm, Open MPI, Cloud TPU
and other launchers set. Apart from the launcher, only this layer reads environment variables.

Layer: above ``files``. The public names are in ``replicax.distribute.cluster_resolver`` and
``replicax.train``.
"""
