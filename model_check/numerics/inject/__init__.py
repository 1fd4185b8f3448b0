"""A folder for PYTHONPATH, not for importing: the interpreter loads sitecustomize.py from it at start."""
