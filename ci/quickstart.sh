#!/usr/bin/env bash
# Set up, fetch SmolLM2-135M-Instruct, train it on 2,000-token prompts on 2 ranks, show what it learned.
#
#   bash ci/quickstart.sh                      continues an interrupted run; a finished one is only reported
#   bash ci/quickstart.sh --fresh              trains anew
#   bash ci/quickstart.sh train.updates=40     settings, as for `megatron-lrl train`
#   bash ci/quickstart.sh examples/lora/config.toml      another config for the same model and prompts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

overrides=() run= config=examples/quickstart/config.toml
for argument in "$@"; do
  case $argument in
    --fresh) overrides+=(train.overwrite=true) ;;
    -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    train.output=*) run=${argument#*=}; overrides+=("$argument") ;;
    *=*) overrides+=("$argument") ;;
    *.toml) config=$argument ;;
    *) echo "quickstart: unknown argument $argument (see --help)" >&2; exit 2 ;;
  esac
done
[[ -f $config ]] || { echo "quickstart: $config: no such file" >&2; exit 2; }
run=${run:-$(sed -n 's/^output = "\(.*\)".*/\1/p' "$config")}

bash ci/setup.sh
started=$SECONDS
python=.venv/bin/python cache=.cache/quickstart ranks=2
cores=$("$python" -c 'import os; print(len(getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count()))(0)))')
# Two ranks cannot share a GPU: where there is only one, one rank does it all.
if [[ $("$python" -c 'import torch; print(torch.cuda.device_count())') == 1 ]]; then
  ranks=1 overrides=(parallel.cp=1 ${overrides[@]+"${overrides[@]}"})
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
# bf16 is the faster choice where the processor computes in it, and several times slower where it does not.
if [[ -r /proc/cpuinfo ]] && ! grep -qE 'amx_bf16|avx512_bf16|\bbf16\b' /proc/cpuinfo \
  && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  overrides=(model.dtype=float32 ${overrides[@]+"${overrides[@]}"})
fi

"$python" examples/quickstart/prepare.py --cache "$cache"
imported=$cache/checkpoint/megatron_lrl.json
if [[ ! -f $imported || $cache/hf.made_from.txt -nt $imported ]]; then
  rm -rf "$cache/checkpoint"
  "$python" -m megatron_lrl import "$cache/hf" "$cache/checkpoint"
fi
"$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
  -m megatron_lrl train "$config" ${overrides[@]+"${overrides[@]}"}
newest=
for checkpoint in "$run"/checkpoints/update-*/; do
  if [[ -f $checkpoint/complete.json ]]; then newest=${checkpoint%/}; fi
done
[[ $newest ]] || { echo "quickstart: $run/checkpoints holds no complete checkpoint" >&2; exit 1; }
rm -rf "$run/hf" "$run/adapter"
merge=()
if grep -q '"adapter":' "$newest/megatron_lrl.json"; then  # the adapter by itself, and the model to look at
  merge=(--merge)
  "$python" -m megatron_lrl export "$newest" "$run/adapter"
fi
"$python" -m megatron_lrl export "$newest" "$run/hf" ${merge[@]+"${merge[@]}"}
"$python" examples/quickstart/report.py --run "$run" --before "$cache/hf" --after "$run/hf" \
  --prompts "$cache/heldout.jsonl"
echo "quickstart: $((SECONDS - started)) s without set-up"
