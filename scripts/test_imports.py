"""Library imports one by one, with seconds and memory of each: `model-check doctor --only imports`."""

from doors import enter

if __name__ == "__main__":
    enter("doctor", "--only", "imports")
