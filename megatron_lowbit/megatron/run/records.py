"""Records of recipe and data in checkpoints, and the comparison of a run with what it loads.

They are saved with the run's arguments: ``recipe_record``, the text of the recipe; ``data_record``,
digests of the data sets by prefix, since a path does not tell that a file has changed; and
``blend_record``, their weights; ``tokenizer_record``, a digest of what turns conversations into
tokens. Arguments that choose the samples count as data.
"""

import hashlib
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lowbit.data.dataset import dataset_digest
from megatron_lowbit.data.tokenizer import files_read
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries
from megatron_lowbit.megatron.datasets import data_blends
from megatron_lowbit.megatron.run.common_state import saved_args
from megatron_lowbit.megatron.run.errors import raise_on_all_ranks, say_on_rank_0
from megatron_lowbit.megatron.run.load_source import LoadSource, check_starts_anew
from megatron_lowbit.recipes import record as recipe_records
from megatron_lowbit.storage.selection import load_directory

RECIPE, DATA, BLEND, TOKENIZER = "recipe_record", "data_record", "blend_record", "tokenizer_record"
"""Names of the records among a run's arguments."""
_OF_SAMPLES = {
    BLEND: "--data-path", "seed": "--seed", "split": "--split", "seq_length": "--seq-length",
    "pad_documents_to_multiple_of": "--pad-documents-to-multiple-of", "sft": "--sft",
    "dataloader_type": "--dataloader-type", "fim_data": "--fim-data", "fim_rate": "--fim-rate",
    "fim_spm_rate": "--fim-spm-rate", "fim_split_sample": "--fim-split-sample",
    "fim_fragment_rate": "--fim-fragment-rate", "fim_no_prefix": "--fim-no-prefix",
    TOKENIZER: "--tokenizer-model or --chat-template",
}  # fmt: skip
"""Arguments that decide which samples of the same data sets come next, by their attributes."""
_UNGIVEN = {
    "rope_type": "yarn", "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0, "yarn_correction_range_round_to_int": True,
}  # fmt: skip
"""Values that Megatron-LM puts in the place of None."""
OF_THE_MODEL = {
    "layernorm_epsilon": "--norm-epsilon", "add_bias_linear": "--disable-bias-linear",
    "dsa_indexer_scoring_relu": "--no-dsa-indexer-scoring-relu",
    "dsa_indexer_rotate_activation": "--no-dsa-indexer-rotate-activation",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
} | {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "swiglu", "geglu", "quick_geglu", "squared_relu", "glu_linear_offset",
        "activation_func_clamp_value", "position_embedding_type", "rotary_base", "rotary_percent",
        "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "rotary_scaling_factor",
        "rotary_seq_len_interpolation_factor", "window_size", "window_rotary_base",
        "rope_type", "mscale", "mscale_all_dim", "use_mup", "mup_embedding_mult", "mup_output_mult",
        "mup_attn_scale_power", "residual_multiplier", "moe_router_topk",
        "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
        "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
        "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_apply_probs_on_input",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq",
        "num_layers", "normalization", "sandwich_norm", "qk_layernorm", "qk_l2_norm",
        "add_qkv_bias", "attention_output_gate", "untie_embeddings_and_output_weights",
        "softmax_type", "no_rope_freq", "openai_gelu", "window_attn_skip_freq", "mtp_num_layers",
        "mtp_use_repeated_layer", "mup_base_hidden_size", "mup_width_mult", "linear_attention_freq",
        "experimental_attention_variant", "dsa_indexer_topk", "dsa_indexer_topk_freq",
        "dsa_indexer_skip_topk_offset", "dsa_indexer_rope_interleaved",
        "dsa_indexer_k_norm_epsilon", "multi_latent_attention", "moe_latent_size",
        "moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size",
        "mup_base_head_dim", "mrope_section", "yarn_original_max_position_embeddings",
        "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    )
}  # fmt: skip
"""Arguments that change what a model computes, by their attributes.

Another shape, or a tensor that the checkpoint lacks, ends in an error of Megatron-LM. A tensor that
only the checkpoint has does not, so the arguments that create one are here, too.
"""
_OF_THE_OPTIMIZER = {
    "optimizer": "--optimizer", "use_distributed_optimizer": "--use-distributed-optimizer",
}  # fmt: skip
"""Arguments by which Megatron-LM names and divides the optimizer's state."""
_OF_THE_LAYOUT = {
    f"{name}_parallel_size": f"--{name.replace('_', '-')}-parallel-size"
    for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
}
"""Arguments by which Megatron-LM divides the buffers of the distributed optimizer."""
_RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
_NEGATED = ("add_bias_linear", "dsa_indexer_scoring_relu", "dsa_indexer_rotate_activation")
"""Attributes that their flags set to False."""
_OTHER = {"recipe": "another recipe", "data": "other data", "model": "another model"}
_SHOWN = 12
"""Digits of a digest in messages."""
Digests = Mapping[str, str]


def record_recipe(args: Namespace) -> None:
    """Let the checkpoints of a run record its recipe, as the attribute ``recipe_record``.

    Raises UserError for a recipe that does not exist or is wrong.
    """
    words = (args.fp8, args.fp8 and args.fp8_recipe, args.fp4, args.fp4 and args.fp4_recipe)
    formats = " ".join(str(word) for word in words if word)
    upstream = formats and f"Megatron-LM's own {formats}"
    names = args.precision_recipe or []
    setattr(args, RECIPE, recipe_records.record_of(names, args.recipe_set, upstream))


def record_data(args: Namespace) -> None:
    """Let the checkpoints of a run record its data sets; all ranks together.

    The attribute ``data_record`` has the digest of each data set by its prefix, ``blend_record``
    their weights by digest, ``tokenizer_record`` a digest under ``--sft``; all are empty for mock
    data. A run that neither loads nor saves reads
    nothing.
    """
    if args.save is None and args.load is None:
        return
    record: list[Any] = [{}, "", ""]
    with raise_on_all_ranks("read the data"):
        if dist.get_rank() == 0 and not args.mock_data:
            blends = data_blends(args)
            digests = {prefix: dataset_digest(prefix) for names, _ in blends for prefix in names}
            known = {prefix: sha256 for prefix, sha256 in digests.items() if sha256 is not None}
            tokenizer = _digest_of_tokenizer(args)[:_SHOWN] if args.sft else ""
            record = [known, "; ".join(_text(*blend, known) for blend in blends), tokenizer]
    dist.broadcast_object_list(record, src=0)
    for name, value in zip((DATA, BLEND, TOKENIZER), record, strict=True):
        setattr(args, name, value)


def _digest_of_tokenizer(args: Namespace) -> str:
    """Return a SHA-256 of what turns conversations into tokens while the run trains."""
    texts = args.chat_template, args.sft_tokenizer_prompt_format
    files = files_read(args.tokenizer_model or "")
    digest = hashlib.sha256(repr(texts if files else (*texts, args.tokenizer_model)).encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _text(prefixes: Sequence[str], weights: Sequence[float] | None, digests: Digests) -> str:
    shares = [f"{weight:g} " for weight in weights] if weights else [""] * len(prefixes)
    names = (digests.get(prefix, prefix)[:_SHOWN] for prefix in prefixes)
    return " ".join(map(str.__add__, shares, names))


def check_loaded(args: Namespace) -> None:
    """Compare a run's model with the checkpoint that it loads, and recipe and data if it resumes.

    Differences that ``--resume-changed`` names are printed, and so is other data at a transition of
    ``--phase-transition-iterations``; others raise UserError, and so does a folder without a
    checkpoint. All ranks together. A run that does not train, or starts from iteration 0, may have
    any recipe and data.
    """
    directory = load_directory(args)
    if directory is None:
        return
    with raise_on_all_ranks("read the checkpoint in", directory):
        source = None
        if dist.get_rank() == 0:
            check_starts_anew(args)
            source = LoadSource.of(args)
        if source is not None:
            resumes = source.iteration > 0 and not args.skip_train
            begins_phase = resumes and source.iteration in (args.phase_transition_iterations or ())
            for name, text in _differences(args, source.path, resumes):
                if name not in args.resume_changed and not (name == "data" and begins_phase):
                    raise UserError(
                        f"{source.path}: saved by a run with {_OTHER[name]}: this one has {text}; "
                        f"--resume-changed {name} resumes with it"
                    )
                say_on_rank_0(f"resumed with {_OTHER[name]}: {text}")


def _differences(args: Namespace, checkpoint: Path, resumes: bool) -> Iterator[tuple[str, str]]:
    """Yield the kind of each difference, with the part of a line that says how."""
    saved = saved_args(checkpoint)
    if changed := changes(args, saved, OF_THE_MODEL):
        yield "model", changed
    if not resumes:
        return
    if not args.no_load_optim:
        _check_optimizer(args, checkpoint, saved)
    records = {name: getattr(saved, name, None) for name in (RECIPE, DATA)}
    if missing := [name.partition("_")[0] for name, record in records.items() if record is None]:
        say_on_rank_0(
            f"{checkpoint}: records no {' and '.join(missing)} to compare with this run's"
        )
    if (recipe := records[RECIPE]) is not None:
        recipe = recipe_records.checked(recipe, f"{checkpoint}: {RECIPE}")
        if text := recipe_records.difference(getattr(args, RECIPE), recipe):
            yield "recipe", text
    if (data := records[DATA]) is not None:
        entries = Entries(data, f"{checkpoint}: {DATA}")
        before = {prefix: entries.string(prefix) for prefix in entries}
        now: dict[str, Any] = getattr(args, DATA)
        if set(now.values()) != set(before.values()):
            yield "data", f"{_named(now, before)} instead of {_named(before, now)}"
        elif changed := changes(args, saved, _OF_SAMPLES):
            yield "data", changed


def _check_optimizer(args: Namespace, checkpoint: Path, saved: Any) -> None:
    """Raise UserError for another optimizer, or a layout in which its state does not load."""
    changed = changes(args, saved, _OF_THE_OPTIMIZER)
    require(
        not changed,
        f"{checkpoint}: has the state of another optimizer: this run has {changed}; "
        "--no-load-optim resumes with a new state",
    )
    if not args.use_distributed_optimizer or args.ckpt_format == "fsdp_dtensor":
        return
    if getattr(saved, _RESHARDABLE, False):
        return
    has_experts = args.num_experts is not None
    flags = {k: v for k, v in _OF_THE_LAYOUT.items() if has_experts or "expert" not in k}
    changed = changes(args, saved, flags)
    require(
        not changed,
        f"{checkpoint}: the state of its optimizer loads only in its own layout: this run has "
        f"{changed}; --dist-ckpt-optim-fully-reshardable saves a state for any layout, "
        "--no-load-optim resumes with a new one",
    )


def changes(args: Namespace, saved: Any, flags: Mapping[str, str]) -> str:
    """Describe the arguments, flags by attribute, of which a checkpoint has other values.

    None stands for an argument that is not given.
    """
    found, has_yarn = [], getattr(args, "position_embedding_type", None) == "yarn"
    for name, flag in flags.items():
        if name.startswith("yarn_") and not has_yarn:
            continue  # Megatron-LM does not read it.
        given = getattr(args, name, None), getattr(saved, name, None)
        pair = [_UNGIVEN.get(name) if value is None else value for value in given]
        if hasattr(saved, name) and (pair[0] or None) != (pair[1] or None):
            mine, its = (not value if name in _NEGATED else value for value in pair)
            found.append(f"{flag} {mine!s:.60} instead of {its!s:.60}")
    return ", ".join(found)


def _named(these: Digests, others: Digests) -> str:
    """Name the data sets that are not among the others."""
    shown = [
        f"{prefix} (SHA-256 {digest[:_SHOWN]})"
        for prefix, digest in these.items()
        if digest not in others.values()
    ]
    return ", ".join(shown) or ("nothing" if these else "mock data")
