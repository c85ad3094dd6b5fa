#!/usr/bin/env bash
# Pretraining on all GPUs of this machine, from the folder of this repository:
#
#     examples/launch/torchrun.sh FOLDER pretrain_gpt.py ARGUMENTS
#
# FOLDER becomes --save and --load: the same command goes on after whatever ended it. Give
# --save-interval. PYTHON=... before it: another Python than PATH's.
set -euo pipefail

folder=$1
shift
# torchrun, but of this Python. auto: as many processes as GPUs; without any, as CPUs.
exec "${PYTHON:-python}" -m torch.distributed.run \
    --standalone --nproc-per-node=auto --max-restarts=3 \
    "$@" --save "$folder" --load "$folder" --exit-signal-handler
