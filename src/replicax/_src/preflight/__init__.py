"""Ahead-of-time compilation of a step for devices that this machine does not have.

Layer: above ``strategy``. ``targets`` describes the devices, ``trace`` traces the step for them,
``compiler`` runs the compiler in a separate process, ``hlo``, ``costs`` and ``memory`` analyze
the optimized program, and ``report`` presents the result.
"""
