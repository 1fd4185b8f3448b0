"""Training on a single GPU, or on the CPU where there is none: `model-check doctor --only train`."""

from doors import enter

if __name__ == "__main__":
    enter("doctor", "--only", "train")
