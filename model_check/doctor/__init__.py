"""Doctor: is this machine ready to train? May import config, record, launch, supervise, data.

One module a stage; a check is a function that returns a frozen `Check`. What may hang or crash runs in a process of its
own (`probe`), and jobs run through the real commands (`jobs`). `Settings` holds everything a check compares with.
"""

from model_check.doctor.check import Check, Status
from model_check.doctor.settings import Limits, Places, Settings
from model_check.doctor.stages import STAGES, chosen_stages, examine

__all__ = ["STAGES", "Check", "Limits", "Places", "Settings", "Status", "chosen_stages", "examine"]
