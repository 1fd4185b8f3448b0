"""The four short measurements behind `model-check bench`: each returns frozen rows, and leaves nothing behind."""
