"""Basic torch and CUDA, and the limits of this host: `model-check doctor --only basic`."""

from doors import enter

if __name__ == "__main__":
    enter("doctor", "--only", "basic")
