"""Launch: chooses GPUs, starts and stops ranks, prints the job. May import record, blackbox, supervise.

Importing it is light: torch comes with the first job, in the preload of the warm start.
"""

from model_check.launch.console import ConsoleOptions
from model_check.launch.gpus import Gpu, GpuProcess, choose_gpus, list_gpus
from model_check.launch.job import JobResult, launch_job
from model_check.launch.placement import Hosts
from model_check.launch.programs import Command
from model_check.launch.warmstart import DEFAULT_PRELOAD

__all__ = [
    "DEFAULT_PRELOAD",
    "Command",
    "ConsoleOptions",
    "Gpu",
    "GpuProcess",
    "Hosts",
    "JobResult",
    "choose_gpus",
    "launch_job",
    "list_gpus",
]
