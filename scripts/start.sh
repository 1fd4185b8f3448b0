#!/usr/bin/env bash
# Train a preset (32b unless named otherwise) on every GPU: scripts/start.sh [14b|32b|…] [flags]
preset=32b
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
  preset=$1
  shift
fi
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" --preset "$preset" "$@"
