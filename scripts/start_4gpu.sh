#!/usr/bin/env bash
# The 32b preset on four GPUs.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --preset 32b --nproc 4 "$@"
