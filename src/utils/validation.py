"""Where the earlier guides import the check of a configuration from."""

from model_check import validate_config

__all__ = ["validate_config"]
