"""Observe: what a rank leaves behind while it works: events, metrics, spans, black box. May import rundir."""
