"""Preflight: compile a step for a TPU slice that this machine does not have.

Layer: above ``strategy``. ``_trace`` aims the step at the slice, ``_compiler`` runs the TPU
compiler in a process of its own, ``_hlo`` reads what it made, ``_report`` says what that means.
"""
