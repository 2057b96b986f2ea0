#!/usr/bin/env bash
# The prepared check for a machine with NVIDIA GPUs: the tests that need one, then a short benchmark. Installs nothing
# beyond ci/setup.sh. NOT RUN by the authors so far: no such machine was at hand.
#
#   bash ci/gpu.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

command -v nvidia-smi >/dev/null || { echo "gpu: no nvidia-smi: this needs an NVIDIA GPU" >&2; exit 2; }
nvidia-smi --query-gpu=name,memory.total,driver_version,compute_cap --format=csv
bash ci/setup.sh
.venv/bin/python - <<'PY'
import sys
import torch

if not torch.cuda.is_available():
    sys.exit("gpu: torch sees no CUDA device (driver too old for this build of torch?)")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
PY
.venv/bin/python -m pytest -q -m gpu "$@"

# One prompt under each contract on a tiny random model: time and peak bytes.
if [[ -f tools/bench_replay.py ]]; then .venv/bin/python tools/bench_replay.py; fi
