"""The command ``replicax``, also ``python -m replicax``, with one module per subcommand.

Layer: the top. The module of a subcommand has ``add_arguments(parser)`` and ``run(options)``, which
returns the exit status; ``main`` lists the subcommands.
"""
