"""Launch: chooses GPUs, starts ranks, watches them, prints the job. May import config, rundir, observe.

What is exported here is light; `model_check.launch.job` brings torch and is imported by those who start ranks.
"""

from model_check.launch.context import RankContext, foreign_launcher
from model_check.launch.gpus import Gpu, GpuProcess, choose_gpus, list_gpus
from model_check.launch.loglines import step_line

__all__ = [
    "Gpu",
    "GpuProcess",
    "RankContext",
    "choose_gpus",
    "foreign_launcher",
    "list_gpus",
    "step_line",
]
