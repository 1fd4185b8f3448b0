"""Train on one GPU (system.device_id or GPU_RANK), or as one rank of a job that torchrun or srun has started."""

from scripts.doors import enter

if __name__ == "__main__":
    enter("train", "--single")
