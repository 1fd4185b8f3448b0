"""`python -m model_check`: the command where the folder of the installed script is not on the path."""

from __future__ import annotations

from model_check.cli.main import main

if __name__ == "__main__":
    main()
