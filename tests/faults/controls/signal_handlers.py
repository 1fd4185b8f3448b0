"""Installs its own handlers and excepthook, and uses alarms; none of it may be disturbed."""

import faulthandler
import signal
import sys

import torch
import torch.distributed as dist

ticks = []
signal.signal(signal.SIGUSR1, lambda *_: ticks.append("usr1"))
signal.signal(signal.SIGALRM, lambda *_: ticks.append("alarm"))
sys.excepthook = lambda kind, value, _: print("custom hook", kind.__name__, value)
faulthandler.enable()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    model = torch.nn.Linear(8, 8)
    for step in range(40):
        model(torch.randn(64, 8)).pow(2).mean().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        if step == 20:
            signal.raise_signal(signal.SIGUSR1)
    while len(ticks) < 2:
        signal.pause()
    print("RESULT", dist.get_rank(), sorted(ticks), sys.excepthook.__name__)
    dist.destroy_process_group()


main()
