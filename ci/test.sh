#!/usr/bin/env bash
# Everything that guards the repository: lint, types, tests.
#
#   bash ci/test.sh                      without the tests marked slow (tests/README.md says what that leaves out)
#   bash ci/test.sh --slow               all of them
#   bash ci/test.sh -k segment -x        further arguments go to pytest
#   bash ci/test.sh -n 4                 more than two test modules at a time (each takes up to 2 GiB)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash ci/setup.sh

select=(-m "not slow")
if [[ ${1:-} == --slow ]]; then select=(); shift; fi
# Tests start several ranks on one machine: a thread pool per rank would only fight over the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONDONTWRITEBYTECODE=1
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10 ${select[@]+"${select[@]}"} "$@"
