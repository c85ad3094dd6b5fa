"""Parts of layers that a model excludes, as rows of ``compatibility.py``."""

from argparse import Namespace

from megatron_lowbit.arguments.rows import Rows, excluded


def positions(args: Namespace) -> Rows:
    """Return position embeddings, and settings of them, that a model does not have."""
    kind, is_latent = args.position_embedding_type, args.multi_latent_attention
    pattern = args.hybrid_layer_pattern
    ignored = _ignored_by_latent_attention(args) if is_latent else {}
    return ignored | {
        f"--multi-latent-attention: --hybrid-layer-pattern {pattern} has none; write + for *": (
            is_latent and pattern is not None and not {"+", "D"}.intersection(pattern)
        ),
        f"--position-embedding-type {kind}: Megatron-LM's models of text have no such positions; "
        "give rope": kind in ("relative", "mrope"),
        "--rotary-interleaved with --position-embedding-type yarn: YaRN rotates halves of heads": (
            kind == "yarn" and args.rotary_interleaved
        ),
        "--rotary-percent with --position-embedding-type yarn: YaRN rotates whole heads": (
            kind == "yarn" and args.rotary_percent != 1
        ),
        "--position-embedding-type yarn with --multi-latent-attention, which rotates a part of its "
        "own: give rope, and --rope-type yarn": kind == "yarn" and is_latent,
    }


def _ignored_by_latent_attention(args: Namespace) -> Rows:
    """Return arguments of positions and scales that latent attention does not read."""
    is_yarn, length = args.rope_type != "rope", args.yarn_original_max_position_embeddings
    flags = {
        "--yarn-original-max-position-embeddings": length not in (None, 4096),
        "--yarn-beta-fast": args.yarn_beta_fast not in (None, 32),
        "--yarn-beta-slow": args.yarn_beta_slow not in (None, 1),
        "--no-yarn-correction-range-round-to-int": args.yarn_correction_range_round_to_int is False,
        "--use-rope-scaling": args.use_rope_scaling,
        "--rotary-seq-len-interpolation-factor": args.rotary_seq_len_interpolation_factor,
        "--no-rope-freq": args.no_rope_freq,
        "--rotary-percent and --rope-type yarn": is_yarn and args.rotary_percent != 1,
        "--mup-base-head-dim": args.mup_base_head_dim,
    }
    is_scaled = args.use_mup and args.mup_attn_scale_power != 0.5
    return {
        f"{flag} with --multi-latent-attention: latent attention of Megatron-LM ignores it": given
        for flag, given in flags.items()
    } | {
        "--use-mup with --multi-latent-attention needs --mup-attn-scale-power 0.5: Megatron-LM "
        "scales latent attention by no other power": is_scaled,
    }


def experts(args: Namespace) -> Rows:
    """Return orders of the weights of gated experts that their layers do not have."""
    # Without a recipe, local experts are computed one by one.
    is_grouped = args.moe_grouped_gemm and (
        args.transformer_impl != "local" or args.precision_recipe is not None
    )
    return {
        f"{flag} needs {other}": size is not None and not given
        for flag, size, other, given in (
            ("--moe-mlp-glu-interleave-size", args.moe_mlp_glu_interleave_size,
             "--moe-grouped-gemm, and in local layers a recipe", is_grouped),
            ("--moe-shared-expert-glu-interleave-size", args.moe_shared_expert_glu_interleave_size,
             "--use-grouped-gemm-for-shared-expert", args.use_grouped_gemm_for_shared_expert),
        )
    }  # fmt: skip


def recomputation(args: Namespace) -> Rows:
    """Return recomputed modules whose backward pass does not end."""
    is_selective = args.recompute_granularity == "selective"
    recomputed = is_selective and "mlp" in (args.recompute_modules or ())
    by_megatron = not (args.fp8 or args.fp4)  # Transformer Engine's function takes biases.
    return {
        "--recompute-modules mlp needs --disable-bias-linear: the backward pass of a recomputed "
        "MLP with biases does not end": recomputed and by_megatron and args.add_bias_linear,
    }


def gemma_layers(args: Namespace) -> Rows:
    """Return models that exclude the parts of Gemma 3's and Granite's layers."""
    other = args.geglu and (args.swiglu or args.squared_relu or args.quick_geglu)
    is_scaled, base = args.residual_multiplier != 1, args.window_rotary_base
    rows: Rows = {
        "--geglu: the model has another activation already; give one of them": other,
        "--residual-multiplier does not go with --sandwich-norm": is_scaled and args.sandwich_norm,
    }
    if args.sandwich_norm or base or is_scaled:
        flags = "--sandwich-norm, --residual-multiplier, --window-rotary-base"
        rows[f"{flags} exclude --transformer-impl transformer_engine"] = (
            args.transformer_impl != "local"
        )
        rows |= excluded(args, f"{flags} exclude {{flag}}", {
            # Megatron-LM builds the blocks of multi-token prediction itself.
            "": "--mxnorm, --fused-allreduce-norm, --hybrid-layer-pattern, --mtp-num-layers",
        })  # fmt: skip
    is_rotary = args.position_embedding_type == "rope"
    return rows | {
        "--window-rotary-base does not go with --multi-latent-attention": (
            base and args.multi_latent_attention
        ),
        "--window-rotary-base needs --position-embedding-type rope": base and not is_rotary,
        "--window-rotary-base needs --window-size": base and not args.window_size,
    }
