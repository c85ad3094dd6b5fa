"""Combinations of arguments and recipes that are refused, in one table.

Each function returns the rows of one subject: the error that names a combination and a way out, and
whether the combination is given. Training, dry runs and plans read all of them by :func:`check`.
"""

from argparse import Namespace

from megatron_lowbit.arguments.graph_compatibility import cuda_graphs, graphs_of_experts
from megatron_lowbit.arguments.layer_compatibility import (
    experts,
    gemma_layers,
    positions,
    recomputation,
)
from megatron_lowbit.arguments.parse import on_described_machine
from megatron_lowbit.arguments.parser import LOSSES
from megatron_lowbit.arguments.recipe_compatibility import (
    OF_RECIPES,
    check_without_recipe,
    of_recipe,
)
from megatron_lowbit.arguments.rows import Rows, excluded, refuse
from megatron_lowbit.command_line import value_of
from megatron_lowbit.recipes import Recipe


def check(args: Namespace, recipe: Recipe | None) -> None:
    """Raise UserError for a combination that is refused.

    ``args`` are parsed by Megatron-LM, with the arguments of ``add_recipe_arguments``; a dry run is
    checked as the machine that it describes. ``recipe`` is None without ``--precision-recipe``.
    """
    args = on_described_machine(args)
    for table in (
        attention_mask, local_layers, fused_loss, graphs_of_experts, megatron_fsdp, schedules,
        gemma_layers, document_masks, layer_wise_optimizer, distillation, bad_iterations, positions,
        recomputation, experts, pipeline,
    ):  # fmt: skip
        refuse(table(args))
    if recipe is None:
        check_without_recipe({flag for flag in OF_RECIPES if value_of(args, flag)})
        return
    for rows in (*of_recipe(args, recipe), cuda_graphs(args, recipe)):
        refuse(rows)


def attention_mask(args: Namespace) -> Rows:
    """Return runs whose layers ignore the mask of ``--reset-attention-mask``."""
    if not args.reset_attention_mask:
        return {}
    idle = "--reset-attention-mask has no effect with"
    stages = args.pipeline_model_parallel_size > 2 or args.virtual_pipeline_model_parallel_size
    return {
        f"{idle} --transformer-impl {args.transformer_impl}: its causal layers make their own mask;"
        " give --transformer-impl local": args.transformer_impl != "local",
        f"{idle} --masked-softmax-fusion: the kernel makes its own mask; give "
        "--no-masked-softmax-fusion": args.masked_softmax_fusion,
        f"{idle} more than two pipeline stages: Megatron-LM gives the mask to the first and the "
        "last": stages,
    }


def local_layers(args: Namespace) -> Rows:
    """Return models that Megatron-LM's local layers do not train correctly."""
    if args.transformer_impl != "local":
        return {}
    local, pattern = "with --transformer-impl local:", args.hybrid_layer_pattern or ""
    latent = args.multi_latent_attention and args.tensor_model_parallel_size > 1
    biases = args.num_experts is not None and args.add_bias_linear
    virtual = args.virtual_pipeline_model_parallel_size is not None
    windows = args.window_size and args.reset_attention_mask
    return {
        f"--context-parallel-size {args.context_parallel_size} {local} its attention divides no "
        "sequences; it must be 1": args.context_parallel_size > 1,
        f"--multi-latent-attention {local} Megatron-LM's gradient of the shared rotary key is "
        "wrong; --tensor-model-parallel-size must be 1": latent,
        f"--hybrid-layer-pattern {pattern} {local} D and G would be empty; they need Transformer "
        "Engine": {"D", "G"}.intersection(pattern),
        f"--moe-grouped-gemm {local} grouped experts have no biases; give --disable-bias-linear, "
        "or omit it": biases and args.moe_grouped_gemm,
        "--window-size with --reset-attention-mask and --transformer-impl local: Megatron-LM's "
        "layers with a window ignore the mask; omit --reset-attention-mask": windows,
        f"--cuda-graph-impl local {local} Megatron-LM reuses memory that torch's norms need in "
        "backward; give --cuda-graph-impl transformer_engine": args.cuda_graph_impl == "local",
        f"--cuda-graph-impl transformer_engine {local} layers in virtual pipeline stages have "
        "other losses than without graphs; omit the stages": (
            args.cuda_graph_impl == "transformer_engine" and virtual
        ),
    }


def fused_loss(args: Namespace) -> Rows:
    """Return an implementation of the fused loss without the argument that fuses it."""
    name, fuses = args.cross_entropy_fusion_impl, args.cross_entropy_loss_fusion
    error = f"--cross-entropy-fusion-impl {name} needs --cross-entropy-loss-fusion"
    return {error: name in LOSSES and not fuses}


def layer_wise_optimizer(args: Namespace) -> Rows:
    """Return runs in FP32 of an optimizer that lacks a method which the training loop calls."""
    in_fp32 = args.use_layer_wise_distributed_optimizer and not args.bf16
    return {
        "--optimizer dist_muon, or muon with --use-distributed-optimizer, needs --bf16, which a "
        "CPU does not have: give --optimizer muon without that argument": in_fp32
    }


def document_masks(args: Namespace) -> Rows:
    """Return arguments that exclude ``--dataloader-inter-document-masking`` or its padding."""
    flag, multiple = "--dataloader-inter-document-masking", args.pad_documents_to_multiple_of
    padding = f"--pad-documents-to-multiple-of {multiple}"
    if not args.dataloader_inter_document_masking:
        return {f"{padding} needs {flag}": multiple != 1}
    parts = 2 * args.context_parallel_size
    is_captured = args.cuda_graph_impl != "none"
    exchanges_batches = args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1
    reasons = {
        "Transformer Engine layers, and so a GPU": args.transformer_impl != "transformer_engine",
        "a GPT: Mamba layers carry states over documents": args.hybrid_layer_pattern is not None,
        f"--pad-documents-to-multiple-of {parts}, or a multiple of that: each rank has two equal "
        "parts of every document": parts > 2 and multiple > 0 and multiple % parts != 0,
        "--micro-batch-size 1 in a pipeline: stages exchange one sequence": exchanges_batches,
        "--cuda-graph-impl none: documents differ in every micro batch": is_captured,
        "a data set of documents; omit --sft": args.sft,
        "samples of whole documents; omit --fim-data": args.fim_data,
        "no --reset-position-ids, whose effect it has; omit it": args.reset_position_ids,
    }
    lengths = f"{padding} must divide --seq-length {args.seq_length}"
    return {
        **{f"{flag} needs {reason}": given for reason, given in reasons.items()},
        lengths: multiple < 1 or args.seq_length % multiple != 0,
    }


def pipeline(args: Namespace) -> Rows:
    """Return layouts in which two chunks of a stage have the embedding."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if not layout:
        return {}
    chunks = PipelineParallelLayerLayout(layout, stages).layout[0]
    return {
        f"--pipeline-model-parallel-layout {layout}: m cannot follow E in another chunk of the "
        "first stage, as Megatron-LM does not add the gradients of their embeddings": any(
            LayerType.mtp in chunk for chunk in chunks[1:]
        )
    }


def distillation(args: Namespace) -> Rows:
    """Return arguments that exclude ``--distill-from``."""
    if args.distill_from is None:
        return {}
    return excluded(args, "{flag} with --distill-from: {reason}; omit one of them", {
        "the teacher is not divided into stages": "--pipeline-model-parallel-size above 1",
        "only the next token has a target": "--mtp-num-layers",
        "the teacher would have its norms": "--mxnorm",
        "the teacher would be quantized; name a recipe": "--fp8-format, --fp4-format",
        "the teacher is not captured": "--cuda-graph-impl",
        "the teacher is not divided": "--use-megatron-fsdp, --use-torch-fsdp2",
        "its schedule passes by the teacher": "--overlap-moe-expert-parallel-comm",
    })  # fmt: skip


def megatron_fsdp(args: Namespace) -> Rows:
    """Return arguments with which Megatron-FSDP ends the run."""
    if not args.use_megatron_fsdp:
        return {}
    saves = "--async-save --async-strategy mcore with --use-megatron-fsdp: the first save ends in "
    return {
        f"{saves}an error of Megatron-LM; omit --async-save": (
            args.async_save and args.async_strategy == "mcore"
        ),
    } | excluded(args, "{flag} with --use-megatron-fsdp: {reason}; omit one of them", {
        "its mesh of ranks has no pipeline stages": "--pipeline-model-parallel-size above 1",
        "its hooks and parameters cannot be captured": "--cuda-graph-impl",
    })  # fmt: skip


def schedules(args: Namespace) -> Rows:
    """Return models that ``--overlap-moe-expert-parallel-comm`` does not train."""
    flag = "--overlap-moe-expert-parallel-comm"
    if not args.overlap_moe_expert_parallel_comm:
        return {}
    splits = args.tensor_model_parallel_size > 1 and not args.sequence_parallel
    return {
        f"{flag} needs a GPT: Megatron-LM does not divide hybrids into communication and "
        "computation; omit it": args.hybrid_layer_pattern,
        # Megatron-LM refuses it in the forward pass that its schedule passes by.
        f"{flag} with --tensor-model-parallel-size above 1 needs --sequence-parallel": splits,
    }


def bad_iterations(args: Namespace) -> Rows:
    """Return arguments that allow no restart from a checkpoint (``--skip-bad-iterations``)."""
    if args.skip_bad_iterations is None:
        return {}
    option = f"--skip-bad-iterations {args.skip_bad_iterations}"
    return {
        f"{option}: must be positive": args.skip_bad_iterations <= 0,
        f"{option} needs --save and --load with the same folder": (
            args.save is None or args.save != args.load
        ),
        f"{option} needs loss and gradients checked": not args.check_for_nan_in_loss_and_grad,
        f"{option} needs --rerun-mode disabled: Megatron-LM's reruns would look for the same "
        "error": args.rerun_mode != "disabled",
    }
