"""Arguments of Megatron-LM's example scripts, with a tiny model."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 500"
LLAMA = f"""
    --use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 16
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
    --swiglu --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
    --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
    --global-batch-size 8 --train-samples 1953 --lr-decay-samples 1949 --lr-warmup-samples 39
    --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
    --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1
    --sequence-parallel --tiktoken-pattern v2 --split 99,1,0 --no-mmap-bin-files --num-workers 1
    --no-create-attention-mask-in-dataloader --log-interval 1 --eval-iters 32
    --eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4
    --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 {MOCK}
"""
GPT3 = f"""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --attention-backend auto --micro-batch-size 1
    --global-batch-size 16 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
    --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5
    --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --split 949,50,1
    --save-interval 10000 --eval-interval 1000 --eval-iters 10 {MOCK}
"""
MAMBA = f"""
    --tensor-model-parallel-size 1 --sequence-parallel --pipeline-model-parallel-size 1
    --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce
    --untie-embeddings-and-output-weights --init-method-std 0.02 --position-embedding-type none
    --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --mamba-state-dim 16 --mamba-head-dim 8 --mamba-num-groups 4
    --hybrid-layer-pattern M-M*-M-M --seq-length 32 --max-position-embeddings 32
    --train-samples 7324 --lr-warmup-samples 50 --lr-decay-samples 7319 --split 99,1,0
    --distributed-backend nccl --micro-batch-size 4 --global-batch-size 8 --lr 2.5e-4
    --min-lr 2.5e-5 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --disable-bias-linear --normalization RMSNorm
    --adam-beta1 0.9 --adam-beta2 0.95 --save-interval 2000 --eval-interval 2000
    --eval-iters 32 --bf16 --use-mcore-models --no-create-attention-mask-in-dataloader
    --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec {MOCK}
"""
MIXTRAL = f"""
    --use-mcore-models --disable-bias-linear --seq-length 32 --max-position-embeddings 64
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 2
    --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 --normalization RMSNorm
    --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights
    --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion
    --no-position-embedding --rotary-base 1000000 --num-experts 2 --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
    --split 99990,8,2 --micro-batch-size 1 --global-batch-size 4 --lr 1e-4 --train-iters 7
    --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1 --expert-model-parallel-size 2
    --use-distributed-optimizer --sequence-parallel --eval-iters 10 --no-load-optim
    --no-load-rng --save-interval 1000 {MOCK}
"""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["", "--fp4-recipe nvfp4"], ids=["vanilla", "nvfp4"])
@pytest.mark.parametrize(
    ("script", "processes", "arguments"),
    [
        ("pretrain_gpt.py", 1, LLAMA),
        ("pretrain_gpt.py", 2, GPT3),
        ("pretrain_hybrid.py", 1, MAMBA),
        ("pretrain_gpt.py", 2, MIXTRAL),
    ],
    ids=["llama3", "gpt3", "mamba", "mixtral"],
)
def test_they_train_two_iterations(script, processes, arguments, recipe, tmp_path):
    if recipe:
        arguments = arguments.replace("--fp16", "--bf16")  # recipes refuse FP16
    folders = f"--save {tmp_path} --load {tmp_path} --tensorboard-dir {tmp_path / 'board'}"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(processes), str(ROOT / script),
        *shlex.split(f"{arguments} {folders} {recipe} --exit-interval 2 --log-interval 1"),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"iteration +\d+/.*lm loss: ([\d.E+-]+)", done.stdout)
    assert len(losses) == 2 and all(5 < float(loss) < 8 for loss in losses), losses
