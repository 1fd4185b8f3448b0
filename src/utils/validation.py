"""The module from which the earlier guides import the configuration check."""

from model_check import validate_config

__all__ = ["validate_config"]
