"""Plan: memory and speed model of a configuration on a machine. Imports no torch; may import config."""
