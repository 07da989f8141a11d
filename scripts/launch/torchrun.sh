#!/usr/bin/env bash
# One node, all its devices: one rank a GPU, or NPROC ranks.
#
#   scripts/launch/torchrun.sh +strategy=selective model=llama3_8b seq_len=65536 dtype=bf16 parallel.shard=-1
#   NPROC=2 scripts/launch/torchrun.sh device=cpu model.init=random steps=10      # two CPU ranks
#
# If a rank fails, torchrun ends the others within half a minute; the failing rank's traceback stands first. Ctrl-C and
# SIGTERM reach every rank: the step is finished, its train state saved, and the run can go on with resume=runs/NAME.
# That may take SHUTDOWN_SECONDS (600); then ranks are killed, as they are when this script is.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}

if [[ -z ${NPROC:-} ]]; then
    NPROC=$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)')
fi
# Two ranks on one machine share its cores. torchrun would set 1 and say so in four lines.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m recipes.launch --standalone --nproc-per-node "$NPROC" \
    --shutdown-timeout "${SHUTDOWN_SECONDS:-600}" "$root/train.py" "$@"
