"""Who takes part: cluster specs, and the resolvers that find them.

Purpose: answer "which workers are there, where, and which one am I?" from arguments, from
``TF_CONFIG``, or from the variables that Kubeflow, Slurm, Open MPI and Cloud TPU set. This is the
one layer, beside the launcher, that reads environment variables.

Layer: the lowest with code of its own. It imports nothing of replicax but the modules of its root,
such as ``replicax._errors``. The public names are listed in
``replicax.distribute.cluster_resolver`` and ``replicax.train``.
"""
