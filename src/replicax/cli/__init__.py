"""The command ``replicax``, also ``python -m replicax``; one module for each of its verbs.

Layer: the top. A verb is a module with ``add_arguments(parser)`` and ``run(options)``,
which returns the exit status; ``_main`` lists them.
"""
