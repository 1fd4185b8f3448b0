#!/usr/bin/env bash
# bash test.sh          everything that is quick        bash test.sh --all   every test that needs no GPU
# bash test.sh --gpu    the tests that need a GPU       anything else is passed on to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. scripts/setup.sh
model_check_setup requirements-dev.txt
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
bin=.venv/bin
select="not slow and not gpu"
case "${1:-}" in
  --all) select="not gpu"; shift ;;
  --gpu) shift; exec $bin/python -m pytest -m gpu tests/gpu tests/faults "$@" ;;
esac
$bin/ruff check .
$bin/ruff format --check .
$bin/mypy
if [ $# -gt 0 ]; then
  status=0
  $bin/python -m pytest -m "$select" "$@" || status=$?
  [ "$status" -ne 4 ] || echo "test.sh: pytest cannot take: $*; use --all, --gpu, or a file or flag that pytest knows" >&2
  exit "$status"
fi
# What is promised in seconds is tested alone, one test after the other; all the rest two at a time. The scripts of
# tests/faults keep what they promise in company too, mostly: which does not is measured once more, alone.
timed=(tests/launch tests/blackbox/test_comms.py)
status=0
$bin/python -m pytest -m "$select" -n 2 --dist loadfile --ignore=tests/faults "${timed[@]/#/--ignore=}" || status=$?
in_company=0
$bin/python -m pytest -m "$select" -n 2 --dist worksteal tests/faults || in_company=$?
if [ "$in_company" -eq 1 ]; then
  $bin/python -m pytest -m "$select" --last-failed tests/faults || status=$?
elif [ "$in_company" -ne 0 ]; then
  status=$in_company
fi
$bin/python -m pytest -m "$select" "${timed[@]}" || status=$?
exit "$status"
