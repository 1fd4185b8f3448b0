"""Print the resolved configuration. In code, use `from model_check import load_config, validate_config`."""

from scripts.doors import enter

if __name__ == "__main__":
    enter("train", "--dry-run")
