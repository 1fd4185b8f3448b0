"""Launch: chooses GPUs, starts ranks, watches them, prints the job. May import config, rundir, observe.

Importing it is light: torch comes with the first job, in the preload of the warm start.
"""

from model_check.launch.console import ConsoleOptions
from model_check.launch.context import RankContext, foreign_launcher
from model_check.launch.failures import RankExit
from model_check.launch.gpus import Gpu, GpuProcess, choose_gpus, list_gpus
from model_check.launch.hooks import EndJob, Graces, Hooks, JobView
from model_check.launch.job import JobResult, launch_job
from model_check.launch.loglines import step_line
from model_check.launch.placement import Hosts
from model_check.launch.programs import Command
from model_check.launch.warmstart import DEFAULT_PRELOAD

__all__ = [
    "DEFAULT_PRELOAD",
    "Command",
    "ConsoleOptions",
    "EndJob",
    "Gpu",
    "GpuProcess",
    "Graces",
    "Hooks",
    "Hosts",
    "JobResult",
    "JobView",
    "RankContext",
    "RankExit",
    "choose_gpus",
    "foreign_launcher",
    "launch_job",
    "list_gpus",
    "step_line",
]
