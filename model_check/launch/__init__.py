"""Launch: chooses GPUs, starts ranks, watches them, prints the job. May import config, rundir, observe."""
