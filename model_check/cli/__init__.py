"""Cli: the verbs; prints and exits. May import any room."""
