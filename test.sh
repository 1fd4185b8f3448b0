#!/usr/bin/env bash
# bash test.sh          all quick tests: up to 6 minutes on two cores, with one fault of every family and three controls
# bash test.sh --all    the same and the tests marked slow: up to 50 minutes, with one fault of every code; CI runs this
# bash test.sh --long   the rest that needs no GPU: variants of faults, more kills, long controls
# bash test.sh --gpu    the tests that need a GPU
# Anything else is passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
model_check_setup requirements-dev.txt
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
bin=.venv/bin
select="not slow and not long and not gpu"
case "${1:-}" in
  --all) select="not long and not gpu"; shift ;;
  --long) shift; exec $bin/python -m pytest -m "long and not gpu" --durations=0 "$@" ;;
  --gpu) shift; exec $bin/python -m pytest -m gpu tests/gpu tests/faults "$@" ;;
esac
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
if [ $# -gt 0 ]; then
  status=0
  $bin/python -m pytest -m "$select" "$@" || status=$?
  [ "$status" -ne 4 ] || echo "test.sh: pytest does not accept: $*; use --all, --long, --gpu, or a file or flag that pytest knows" >&2
  exit "$status"
fi
# Tests that promise seconds run one after the other: a neighbour on the same cores would stretch what they measure.
alone=(tests/faults tests/launch tests/blackbox/test_comms.py tests/blackbox/test_injection.py tests/cli/test_cli_run_end.py)
status=0
$bin/python -m pytest -m "$select" -n 2 --dist loadfile "${alone[@]/#/--ignore=}" || status=$?
$bin/python -m pytest -m "$select" "${alone[@]}" || status=$?
exit "$status"
