"""Engine: the train step and the loop around it. May import data, models, checkpoint, observe, plan, config, rundir."""
