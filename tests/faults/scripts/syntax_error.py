"""A module that only rank 1 needs does not parse: the line to name is in it, not the import."""

import pathlib
import sys
import tempfile

import torch.distributed as dist

import faultclock

BROKEN = """\
def loss(x):
    return x +
"""


def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        folder = pathlib.Path(tempfile.mkdtemp())
        (folder / "losses.py").write_text(BROKEN)
        sys.path.insert(0, str(folder))
        faultclock.fired()
        import losses  # noqa: F401
    dist.barrier()


if __name__ == "__main__":
    main()
