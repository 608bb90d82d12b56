"""Ahead-of-time compilation of a step for devices that this machine does not have.

Layer: above ``strategy``. ``_targets`` describes the devices, ``_trace`` traces the step for them,
``_compiler`` runs the compiler in a separate process, ``_hlo``, ``_costs`` and ``_fills`` analyze
the optimized program, and ``_report`` presents the result.
"""
