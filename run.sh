#!/usr/bin/env bash
# From an empty machine to a training run: bash run.sh [flags of `model-check train`], e.g. bash run.sh --debug
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
model_check_setup requirements.txt
exec .venv/bin/model-check train "$@"
