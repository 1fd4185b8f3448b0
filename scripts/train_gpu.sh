#!/usr/bin/env bash
# Train on one GPU, by the number nvidia-smi shows: scripts/train_gpu.sh [id] [flags]
gpu=0
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  gpu=$1
  shift
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --gpus "$gpu" "$@"
