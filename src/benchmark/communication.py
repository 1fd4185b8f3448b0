"""Where the earlier guides import the profiler from."""

from model_check import CommunicationProfiler

__all__ = ["CommunicationProfiler"]
