#!/usr/bin/env bash
# Make or mend .venv, with everything pinned by ci/constraints.txt.
#
#   bash ci/setup.sh                 the package, its tests and its quickstart
#   bash ci/setup.sh --extras te     also Transformer Engine (needs an NVIDIA GPU and the CUDA toolkit)
#
# Quick when nothing has changed, safe to interrupt (the stamp is written last; a damaged .venv is rebuilt), and
# two at once wait for each other. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=(dev quickstart)
while (($#)); do
  case $1 in
    --extras) [[ ${2:-} =~ ^(te|dev|quickstart)$ ]] || { echo "setup: --extras takes te, dev or quickstart" >&2; exit 2; }
      extras+=("$2"); shift 2 ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "setup: unknown argument $1 (see --help)" >&2; exit 2 ;;
  esac
done

# A candidate must run (a pyenv shim may be on PATH and not work) and be a version that the pins are for.
usable() {
  "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}
find_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    usable "$PYTHON" && { command -v "$PYTHON"; return; }
    echo "setup: PYTHON=$PYTHON is not a working Python 3.12 or 3.13 with venv" >&2; return 1
  fi
  for candidate in python3.12 python3.13 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python; do
    usable "$candidate" && { command -v "$candidate"; return; }
  done
  echo "setup: no Python 3.12 or 3.13 with venv found: looked at \$PYTHON, PATH and pyenv's versions." >&2
  echo "       Install one (for example: pyenv install 3.12, or apt install python3.12-venv) or set PYTHON." >&2
  return 1
}
python=$(find_python)

# The lock belongs to the open file 9 and goes when this script ends, however it ends.
mkdir -p .cache
exec 9>.cache/setup.lock
"$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'

venv_python=.venv/bin/python stamp=.venv/setup-stamp
fingerprint() {
  { cat pyproject.toml ci/constraints.txt; "$venv_python" -VV; pwd -P; } | "$python" -c \
    'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}
installed=()
if [[ -f $stamp ]] && usable "$venv_python"; then
  { read -r was; read -ra installed; } <"$stamp"
  if [[ $was == "$(fingerprint)" ]]; then
    missing=0
    for extra in "${extras[@]}"; do [[ " ${installed[*]} " == *" $extra "* ]] || missing=1; done
    ((missing)) || { echo "setup: .venv is up to date"; exit 0; }
  fi
fi

if [[ " ${extras[*]} " == *" te "* ]] && ! { command -v nvidia-smi && nvidia-smi -L; } >/dev/null 2>&1; then
  echo "setup: --extras te needs an NVIDIA GPU: where Transformer Engine is installed without one," \
    "Megatron-Core picks its modules and cannot run them" >&2
  exit 2
fi
if [[ -e .venv ]] && ! { usable "$venv_python" && "$venv_python" ci/verify_env.py && "$venv_python" -m pip --version; } >/dev/null; then
  echo "setup: .venv is damaged; building it anew"
  rm -rf .venv
  installed=()
fi
rm -f "$stamp"
[[ -e .venv ]] || { echo "setup: creating .venv with $("$python" -V)"; "$python" -m venv .venv; }

read -ra all <<<"$(printf '%s\n' "${extras[@]}" ${installed[@]+"${installed[@]}"} | sort -u | tr '\n' ' ')"
plain=$(printf '%s\n' "${all[@]}" | grep -vx te | paste -sd, -)
echo "setup: installing [$plain] (minutes the first time)"
"$venv_python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt -e ".[$plain]"
if [[ " ${all[*]} " == *" te "* ]]; then
  # Its PyTorch part compiles against the torch that is installed, so it cannot be built in isolation.
  echo "setup: building Transformer Engine (half an hour on a small machine)"
  "$venv_python" -m pip install --quiet --disable-pip-version-check -c ci/constraints.txt wheel ninja
  NVTE_FRAMEWORK=pytorch "$venv_python" -m pip install --quiet --disable-pip-version-check \
    --no-build-isolation -c ci/constraints.txt -e ".[te]"
fi
{ fingerprint; echo "${all[*]}"; } >"$stamp.partial"
mv "$stamp.partial" "$stamp"
echo "setup: done"
