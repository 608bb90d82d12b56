"""Ahead of time: compile a step for devices that this machine does not have.

Layer: above ``strategy``. ``_targets`` knows the devices, ``_trace`` aims the step at them,
``_compiler`` runs the compiler in a process of its own, ``_hlo`` and ``_costs`` read what it made,
``_report`` says what that means.
"""
