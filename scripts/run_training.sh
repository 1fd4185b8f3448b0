#!/usr/bin/env bash
# Train on every GPU: the same as run.sh.
exec bash "$(dirname "${BASH_SOURCE[0]}")/../run.sh" "$@"
