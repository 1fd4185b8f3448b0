"""Train with DDP on every GPU of this machine."""

from doors import enter

if __name__ == "__main__":
    enter("train", "--set", "parallel.strategy=ddp")
