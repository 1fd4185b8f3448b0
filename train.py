"""Train on every GPU of this machine: the same as `model-check train`."""

from scripts.doors import enter

if __name__ == "__main__":
    enter("train")
