"""Train with FSDP on every GPU of this machine: parameters, gradients and optimizer state in shards."""

from doors import enter

if __name__ == "__main__":
    enter("train", "--set", "parallel.strategy=fsdp")
