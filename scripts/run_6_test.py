"""Train a few steps and say where every rank is on the way there: alone, or under torchrun."""

from doors import enter

if __name__ == "__main__":
    enter("train", "--single", "--preset", "debug", "--verbose-init")
