#!/usr/bin/env bash
# Train on the GPU with the least load and the most free memory.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --gpus auto "$@"
