"""A process that passes the gate for the tests: `RANK MODE`, the plan in its environment.

It says `inside` on standard output once it is past the gate, then waits for a line on standard input. MODE `forks`
leaves a child behind that lives as long as standard input is open.
"""

from __future__ import annotations

import os
import sys

from model_check.blackbox.gate import Gate, GatePlan


def main(rank: int, mode: str) -> None:
    plan = GatePlan.from_environment(os.environ)
    assert plan is not None
    gate = Gate(plan, rank)
    with gate.passing():
        if mode == "forks" and os.fork() == 0:
            sys.stdin.read()
            os._exit(0)
        print("inside", "with a slot" if gate.held else "without a slot", flush=True)
        sys.stdin.readline()
    print("outside", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
