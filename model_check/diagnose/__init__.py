"""Diagnose: rules that turn a run directory into findings. Imports no torch; may import rundir."""
