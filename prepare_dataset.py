"""Tokenize and cache the data of a configuration, without training."""

from scripts.doors import enter

if __name__ == "__main__":
    enter("prepare")
