#!/usr/bin/env bash
# From an empty machine to a training run: bash run.sh [flags of `model-check train`], e.g. bash run.sh --debug
# RUN_IMPORT_TEST=1 tries the imports one by one first, RUN_SINGLE_GPU_TEST=1 trains on one device first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
model_check_setup requirements.txt
first=""
[ "${RUN_IMPORT_TEST:-0}" = 1 ] && first=imports
[ "${RUN_SINGLE_GPU_TEST:-0}" = 1 ] && first="${first:+$first,}train"
[ -z "$first" ] || .venv/bin/model-check doctor --only "$first"
exec .venv/bin/model-check train "$@"
