"""Arguments without an effect on a model or a run, of which a line is printed.

Megatron-LM does not read them in these scripts, or only together with other arguments. What looks
as if it had changed the model is refused instead, in ``layer_compatibility.py``.
"""

import re
from argparse import Namespace
from collections.abc import Iterator

from megatron_lowbit.arguments.values import hybrid_pattern
from megatron_lowbit.command_line import CommandLine

_ROTARY = ("rope", "yarn", "mrope")
_NEVER_READ = {
    reason: re.compile("--(" + re.sub(r"\s+", "|", flags.strip()) + ")")
    for reason, flags in {
        "only Megatron-LM's inference reads it": r"""
            inference-(?!rng-tracker$).* mamba-inference-.* decode-only-cuda-graphs
            enable-chunked-prefill max-tokens-to-oom mlp-chunks-for-prefill
            nccl-all-reduce-for-prefill output-bert-embeddings use-legacy-static-engine
            use-same-sampling-seed-across-dp-ranks
        """,
        "reinforcement learning is not in Megatron-LM's package": """
            rl-.* grpo-.* langrl-env-config
        """,
        "training does not read a teacher's logits": "logits-load-.*",
        "the index of each dataset has the sequences": "per-dataset-sequences-path",
        "training does not restart within its process": "inprocess-.*",
        "these scripts train no model that has it": """
            biencoder-.* ict-.* bert-.* retriever-.* indexer-.* dino-.* vision-.* mask-.*
            relative-attention-.* titles-data-path evidence-data-path block-data-path embedding-path
            query-in-block-prob use-one-sent-docs num-classes img-[hw] num-channels patch-dim
            classes-fraction data-per-class-fraction head-lr-mult swin-backbone-type iter-per-epoch
            short-seq-prob vocab-extra-ids decoder-seq-length decoder-num-layers
        """,
        "no code of Megatron-LM reads it": """
            exit-signal-handler-for-dataloader use-flash-attn onnx-safe use-mcore-models
            dist-ckpt-save-pre-mcore-014 enable-full-sharding-in-hsdp
        """,
    }.items()
}
"""Patterns of arguments that these scripts do not read, by the reason."""


def idle_arguments(args: Namespace, words: CommandLine) -> Iterator[str]:
    """Yield lines about arguments that are given and that nothing reads.

    ``args`` are the arguments of the command line, before Megatron-LM's validation.
    """
    for reason, never_read in _NEVER_READ.items():
        if given := [flag for flag in words.flags() if never_read.fullmatch(flag)]:
            yield f"{', '.join(given)}: without effect, {reason}"
    has_experts = args.num_experts is not None and "E" in (hybrid_pattern(args) or "E")
    table = _of_models(args) | _of_runs(args) | (_of_experts(args) if has_experts else {})
    for reason, (is_idle, flags) in table.items():
        given = [flag for flag in flags.split() if flag in words] if is_idle else []
        if given:
            yield f"{', '.join(given)}: without effect, {reason}"
    of_experts = re.compile("moe_|num_experts$")
    given = [flag for flag in words.flags() if of_experts.match(words.destination(flag))]
    if given and not has_experts:
        yield f"{', '.join(given)}: without effect, the model has no experts"


def _of_models(args: Namespace) -> dict[str, tuple[object, str]]:
    """Return the arguments of parts of models that this one lacks, by the reason."""
    pattern, latent = hybrid_pattern(args) or "", args.multi_latent_attention
    positions, variant = args.position_embedding_type, args.experimental_attention_variant
    is_rotary = positions in _ROTARY or args.use_rotary_position_embeddings or latent
    predicts = args.mtp_num_layers or args.mtp_hybrid_override_pattern or "/" in pattern
    return {
        "positions are not rotary": (not is_rotary, """
            --rotary-base --rotary-percent --rotary-interleaved --use-rope-scaling --no-rope-freq
            --rotary-seq-len-interpolation-factor
        """),
        "it needs --use-rope-scaling": (not args.use_rope_scaling, "--rope-scaling-factor"),
        "positions are not YaRN's": (positions != "yarn" and not latent, """
            --rotary-scaling-factor --mscale --mscale-all-dim --yarn-beta-fast --yarn-beta-slow
            --yarn-original-max-position-embeddings --no-yarn-correction-range-round-to-int
        """),
        "the activation is not GELU": (args.swiglu or args.squared_relu, "--openai-gelu"),
        "it needs --window-size": (args.window_size is None, "--window-attn-skip-freq"),
        "it needs --group-query-attention": (
            not args.group_query_attention, "--num-query-groups"
        ),
        "attention is not latent": (not latent, """
            --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
            --cache-mla-latents --mla-down-proj-fusion
        """),
        "latent attention has no such biases": (latent, "--add-qkv-bias"),
        "it needs --qk-clip": (not args.qk_clip, "--qk-clip-alpha --qk-clip-threshold"),
        "it needs --use-mup": (not args.use_mup, """
            --mup-base-hidden-size --mup-embedding-mult --mup-output-mult --mup-base-head-dim
            --mup-attn-scale-power
        """),
        "the model predicts one token": (not predicts, """
            --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads --mtp-standalone
        """),
        "the model has no Mamba layers": ("M" not in pattern, """
            --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
            --disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype
        """),
        "the model has no linear attention": (
            variant != "gated_delta_net" and "G" not in pattern, """
            --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim
            --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
        """),
        "the model has no sparse attention": (variant != "dsa" and "D" not in pattern, """
            --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk
            --dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss
        """),
    }  # fmt: skip


def _of_runs(args: Namespace) -> dict[str, tuple[object, str]]:
    """Return the arguments of optimizers, schedules and data that this run lacks."""
    optimizer, scalars = args.optimizer, args.muon_scalar_optimizer
    is_muon, style = "muon" in optimizer, args.lr_decay_style
    warms_up = args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction
    return {
        f"--optimizer {optimizer} has no such momentum": (optimizer != "sgd", "--sgd-momentum"),
        f"--optimizer {optimizer} is not Muon": (not is_muon, """
            --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode --muon-tp-mode
            --muon-fp32-matmul-prec --muon-coefficient-type --muon-num-ns-steps
            --muon-extra-scale-factor --muon-scalar-optimizer
        """),
        "Lion optimizes nothing": (
            optimizer != "lion" and not (is_muon and scalars == "lion"),
            "--lion-beta1 --lion-beta2",
        ),
        "--optimizer sgd has none": (
            optimizer == "sgd", "--adam-beta1 --adam-beta2 --adam-eps"
        ),
        "it needs --lr-decay-style WSD": (style != "WSD", """
            --lr-wsd-decay-style --lr-wsd-decay-iters --lr-wsd-decay-samples
        """),
        "the learning rate has no warmup": (not warms_up, "--lr-warmup-init"),
        "it needs --decoupled-lr": (args.decoupled_lr is None, "--decoupled-min-lr"),
        "it needs --fim-data": (not args.fim_data, """
            --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
            --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
        """),
        "it needs --profile": (not args.profile, """
            --use-pytorch-profiler --profile-step-start --profile-step-end --nvtx-ranges
        """),
        "--skip-train runs no training iteration": (args.skip_train, "--profile"),
        "it needs --use-pytorch-profiler": (not args.use_pytorch_profiler, """
            --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack
            --pytorch-profiler-collect-chakra
        """),
    }  # fmt: skip


def _of_experts(args: Namespace) -> dict[str, tuple[object, str]]:
    """Return the arguments that this model's router and experts do not read, by the reason."""
    balancing = args.moe_router_load_balancing_type
    kinds = [balancing] if isinstance(balancing, str) else list(balancing)
    sinkhorn, losses = "sinkhorn" in kinds, [kind for kind in kinds if kind.endswith("aux_loss")]
    return {
        "no expert has a bias": (
            not args.moe_router_enable_expert_bias, "--moe-router-bias-update-rate"
        ),
        "it needs --moe-shared-expert-intermediate-size": (
            args.moe_shared_expert_intermediate_size is None,
            "--moe-shared-expert-gate --moe-shared-expert-overlap",
        ),
        "it needs --moe-expert-capacity-factor": (
            args.moe_expert_capacity_factor is None, "--moe-token-drop-policy"
        ),
        "it needs --moe-use-upcycling": (
            not args.moe_use_upcycling, "--moe-upcycling-granularity"
        ),
        "experts are not balanced by quantiles": (
            "quantile_balancing" not in kinds, "--moe-router-quantile-balancing-ema"
        ),
        "it needs --moe-router-group-topk": (
            args.moe_router_group_topk is None, "--moe-router-num-groups"
        ),
        "the pattern tells which layers have experts": (
            args.hybrid_layer_pattern is not None, "--moe-layer-freq"
        ),
        "--moe-aux-loss-coeff is 0": (
            len(losses) == len(kinds) and not args.moe_aux_loss_coeff,
            "--moe-router-load-balancing-type",
        ),
        "no loss balances the experts": (not losses, "--moe-aux-loss-coeff"),
        "Sinkhorn's method has none": (sinkhorn, """
            --moe-router-topk-scaling-factor --moe-router-pre-softmax --moe-router-num-groups
            --moe-router-group-topk
        """),
        "the router's scores are no softmax": (
            args.moe_router_score_function != "softmax", "--moe-router-pre-softmax"
        ),
    }  # fmt: skip
