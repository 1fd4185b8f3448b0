"""Engine: the train step and the loop around it. May import config, record, plan, data, models, checkpoint,
blackbox, numerics.
"""
