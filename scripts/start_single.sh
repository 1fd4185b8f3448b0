#!/usr/bin/env bash
# The 14b preset on one GPU, the first step of debugging a larger job.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --preset 14b --nproc 1 "$@"
