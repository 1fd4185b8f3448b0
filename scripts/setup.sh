# Sourced by run.sh and test.sh: makes .venv with the pinned requirements of the file named in $1, once.
# A second call costs a checksum: nothing is installed while the pins stay the same.

model_check_setup() {
  local requirements=$1 venv=.venv python="" candidate stamp wanted
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      python=$candidate
      break
    fi
  done
  if [ -z "$python" ] && [ ! -x "$venv/bin/python" ]; then
    echo "model-check: no Python 3.10 to 3.13 found; install one, or name it: PYTHON=/path/to/python3 bash $0" >&2
    return 2
  fi
  stamp="$venv/.installed-$(basename "$requirements")"
  wanted=$(cat requirements*.txt pyproject.toml | cksum)
  [ -x "$venv/bin/model-check" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0
  # Two set-ups at once: the second waits for the first and then finds everything there.
  exec 9>.setup.lock
  flock 9 2>/dev/null || true
  if [ ! -x "$venv/bin/model-check" ] || [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "model-check: installing the packages of $requirements into $venv (once)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
      echo "model-check: $python cannot make a virtual environment; install its venv package (Debian: python3-venv)" >&2
      return 2
    }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements" || {
      echo "model-check: the packages could not be installed; pip's message above says why" >&2
      return 2
    }
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -e . || return 2
    echo "$wanted" >"$stamp"
    # The development pins include the others.
    [ "$requirements" = requirements-dev.txt ] && echo "$wanted" >"$venv/.installed-requirements.txt"
  fi
  exec 9>&-
}
