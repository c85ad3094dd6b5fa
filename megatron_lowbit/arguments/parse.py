"""Parsing of a command line: checks, translation for this machine, Megatron-LM's validation."""

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

from megatron_lowbit.arguments.cpu import adapt_to_cpu
from megatron_lowbit.arguments.from_checkpoint import check_loads
from megatron_lowbit.arguments.idle import idle_arguments
from megatron_lowbit.arguments.parser import front_parser, read_command_line
from megatron_lowbit.arguments.precision import (
    BF16_BLOCKS,
    Machine,
    check_layers,
    translate_precision,
)
from megatron_lowbit.arguments.rows import refuse
from megatron_lowbit.arguments.upstream import environment, parse_upstream, redirect_upstream
from megatron_lowbit.arguments.values import HYBRID_PATTERNS, check_folders, check_values
from megatron_lowbit.command_line import CommandLine, print_help, value_of
from megatron_lowbit.errors import require, say

_REFUSED = {
    "--adlr-autoresume": "its module userlib is not public; omit it",
    "--checkpoint-activations": "Megatron-LM has removed it; give --recompute-activations",
    "--hybrid-context-parallel": "sequences of several lengths are not supported, omit it",
    "--inprocess-restart": "training does not restart within its process; let torchrun restart it",
    "--perform-rl-step": "its module megatron.rl is not in Megatron-LM's package; omit it",
    "--vision-pretraining": "these scripts train language models; omit it",
    # With these Megatron-LM 0.19.2 ends every run in an error of Python.
    "--config-logger-dir": "Megatron-LM cannot write the process groups of its models; omit it",
    "--init-method-xavier-uniform": "Megatron-LM builds no model with it; give --init-method-std",
    "--lazy-mpu-init": "Megatron-LM leaves its process groups to another program; omit it",
    "--logits-load-dir": "training does not read a teacher's logits; give --distill-from",
    "--rl-profile": "its profiler is not in Megatron-LM's package; omit it",
    "--apply-residual-connection-post-layernorm": "no layer of Megatron-LM reads it; omit it",
    "--freeze-all-layers": "Megatron-LM trains all layers nevertheless; omit it",
    "--mup-width-mult": "Megatron-LM computes it from --mup-base-hidden-size; omit it",
    "--rampup-batch-size": "Megatron-LM ignores it; give --step-batch-size-schedule",
    "--trust-remote-code": "no code of a tokenizer's folder is run; omit it",
}
"""Arguments that no run supports, and why."""
_NEEDED = {
    "--world-size": "--dry-run", "--gpu": "--dry-run",
    "--full-validation": "--multiple-validation-sets",
    "--multiple-validation-sets": "--full-validation",
    # Megatron-LM checks the other arguments by it alone, and builds equal layers.
    "--heterogeneous-layers-config-encoded-json": "--heterogeneous-layers-config-path",
    "--load-latest-valid": "--load", "--save-keep-last": "--save", "--short-log": "--save",
    "--num-layers-at-start-in-bf16": "--first-last-layers-bf16",
    "--num-layers-at-end-in-bf16": "--first-last-layers-bf16",
}  # fmt: skip
"""Arguments that mean nothing without another one."""
_NOT_WITH_SFT = (
    "--mock-data", "--fim-data", "--reset-position-ids", "--reset-attention-mask",
    "--dataloader-fast-cache-load",
)  # fmt: skip
"""Arguments that Megatron-LM's dataset of conversations does not support."""
_NO_MASK = "--no-create-attention-mask-in-dataloader"
_OF_QUANTIZED_LAYERS = (
    "--eval-precision", "--quantization-engine", "--log-quantization-error-interval", *BF16_BLOCKS,
)  # fmt: skip
OF_GPUS = (
    "cuda_graph_impl", "cuda_graph_modules", "transformer_impl", "masked_softmax_fusion",
    "bias_swiglu_fusion", "cross_entropy_loss_fusion", "cross_entropy_fusion_impl",
    "moe_token_dispatcher_type", "context_parallel_size",
)  # fmt: skip
"""Attributes that a CPU or a dry run changes and that decide what a run on GPUs supports."""
_LISTING = re.compile(r"^-+ arguments -+$.*^-+ end of arguments -+\n", re.MULTILINE | re.DOTALL)
"""Megatron-LM's list of all arguments, hundreds of lines."""
_NEVER = 10**9
"""Interval that is longer than any run, in iterations."""


def parse_arguments(argv: Sequence[str] | None = None, hybrid: bool | None = None) -> Namespace:
    """Parse and validate a command line, and set Megatron-LM's global variables.

    ``--help`` and ``--print-completion`` exit. Raises UserError for an argument that is unknown,
    has an invalid value, or contradicts another one.

    Args:
        argv: arguments without the program's name; None for the process's own.
        hybrid: True for a program that trains hybrids, False for GPTs, None for both.

    Returns:
        Megatron-LM's validated arguments together with this project's; ``upstream_command_line``:
        the tokens that Megatron-LM parsed; ``given``: the command line; ``upstream_lines``: what
        Megatron-LM printed meanwhile under ``--short-log`` or in a dry run;
        ``cuda_graph_impl_on_gpus`` and the others of ``OF_GPUS``: their values on a machine with
        GPUs, where this one has none.
    """
    parser = front_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    if not {"-h", "--help"}.isdisjoint(given):
        print_help(parser)
    args, words = read_command_line(parser, given)
    check_values(parser, args, words)
    check_given(args, words, hybrid)
    if not args.dry_run:
        check_folders(args)
    machine = Machine.current()
    lines = _translate(args, words, machine)
    if os.environ.get("RANK", "0") == "0":
        say(*lines)
    if machine.capability is None:
        # Megatron-LM's validation demands it of some layouts; nothing on a CPU reads it.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    tokens = words.tokens()
    ranks = args.dry_run_world_size
    printed: list[str] = []
    is_short = args.short_log or args.dry_run
    redirected = redirect_upstream(printed.append) if is_short else nullcontext()
    with environment("WORLD_SIZE", None if ranks is None else str(ranks)), redirected:
        parsed = parse_upstream(tokens, args.mtp_num_layers)
    parsed.upstream_lines = "".join(printed)
    if args.dry_run and not args.short_log:
        say(*_LISTING.sub("", parsed.upstream_lines).splitlines())
    parsed.upstream_command_line = tokens
    parsed.given = given
    on_gpus = args if machine.capability is None else parsed
    for name in OF_GPUS:
        setattr(parsed, f"{name}_on_gpus", getattr(on_gpus, name))
    return parsed


def check_given(args: Namespace, words: CommandLine, hybrid: bool | None) -> None:
    """Check this project's arguments, and restrictions that Megatron-LM does not check."""
    if hybrid is True and not args.use_checkpoint_args:
        is_given = any(flag in words for flag in HYBRID_PATTERNS)
        require(is_given, "--hybrid-layer-pattern is missing; for models without one, use "
                "pretrain_gpt.py")  # fmt: skip
    for flag in (*HYBRID_PATTERNS, "--is-hybrid-model") if hybrid is False else ():
        require(flag not in words, f"{flag} is for hybrids: use pretrain_hybrid.py")
    for flag, reason in _REFUSED.items():
        require(flag not in words, f"{flag}: {reason}")
    for flag, other in _NEEDED.items():
        require(flag not in words or other in words, f"{flag} needs {other}")
    for flag in _NOT_WITH_SFT if args.sft else ():
        require(flag not in words, f"{flag} is not for conversations: omit --sft or it")
    check_loads(args)
    _check_data(args)
    normed = args.mxnorm or args.normalization == "MXNorm"
    # Megatron-LM ignores how the input is stored unless SwiGLU is fused.
    fused = args.swiglu and args.bias_swiglu_fusion and not args.use_te_activation_func
    loads, either = args.load or args.pretrained_checkpoint, "--load or --pretrained-checkpoint"
    refuse({
        "--mxnorm-p needs --mxnorm": "--mxnorm-p" in words and not normed,
        "--mxnorm-post-round needs --mxnorm": args.mxnorm_post_round and not normed,
        "--mxnorm-post-round needs --mxnorm-p 1": args.mxnorm_post_round and args.mxnorm_p != 1,
        "--activation-func-fp8-input-store needs --swiglu, without --no-bias-swiglu-fusion or "
        "--use-te-activation-func": args.activation_func_fp8_input_store and not fused,
        "--dataloader-type external: only a script of your own has such loaders":
            args.dataloader_type == "external",
        f"--tokenizer-type {args.tokenizer_type}: the models are of text":
            "Multimodal" in (args.tokenizer_type or ""),
        "--no-pad-vocab-size: Megatron-LM trains without a size; give "
        "--make-vocab-size-divisible-by 1":
            not args.pad_vocab_size and args.padded_vocab_size is None,
        f"--resume-changed needs {either}": args.resume_changed and not loads,
        f"--no-initialization needs {either}: weights would have the values that memory happens to "
        "hold": not args.perform_initialization and not loads,
    })  # fmt: skip


def _check_data(args: Namespace) -> None:
    """Raise UserError for two sources of data, of which Megatron-LM would read one."""
    parts = ("--train-data-path", "--valid-data-path", "--test-data-path")
    single = ("--mock-data", "--data-path", "--data-args-path", "--per-split-data-args-path")
    given = [flag for flag in (*single, *parts) if value_of(args, flag)]
    require(
        len(given) < 2 or {*given} <= {*parts},
        f"{' and '.join(given[:2])}: the data have one source; omit one of them",
    )
    require(
        not args.split or not given or given[0] not in (*parts, single[-1]),
        f"--split is for one data set of all parts; omit it with {' and '.join(given)}",
    )


def _translate(args: Namespace, words: CommandLine, machine: Machine) -> list[str]:
    """Change the arguments to ones that Megatron-LM supports here; return lines that explain it."""
    words.remove("--world-size")
    if args.dry_run:
        # Megatron-LM opens its writers while it parses the arguments.
        for flag in ("--tensorboard-dir", "--wandb-project"):
            words.remove(flag)
    check_layers(args, machine)
    lines = translate_precision(args, words, machine)
    if "--precision-recipe" not in words:
        idle = () if args.fp8 or args.fp4 else filter(words.__contains__, _OF_QUANTIZED_LAYERS)
        lines += [f"{words.text(flag)}: without effect, nothing is quantized" for flag in idle]
    if not args.use_checkpoint_args:  # a checkpoint may have another model
        lines += idle_arguments(args, words)
    if "--eval-interval" not in words:
        words.add("--eval-interval", str(_NEVER))
        lines.append("--eval-interval is not given and has no default: evaluating at the end only")
    if args.phase_transition_iterations and args.train_iters:
        lines.append(_count_samples(args, words))
    lines += _reset_documents(args, words)
    lines += _change_activation(args, words)
    if args.sft and _NO_MASK not in words:
        words.add(_NO_MASK)
        lines.append(f"--sft: added {_NO_MASK}, for its dataset has no masks")
    if machine.capability is None:
        lines += adapt_to_cpu(args, words)
    return lines


def _reset_documents(args: Namespace, words: CommandLine) -> Iterator[str]:
    """Let the arguments that separate documents take effect; yield lines about it."""
    if args.reset_attention_mask:
        if _NO_MASK in words:
            words.remove(_NO_MASK)
            yield f"--reset-attention-mask: ignored {_NO_MASK}, for documents need masks"
        if "M" in (args.hybrid_layer_pattern or ""):
            yield "--reset-attention-mask: for attention; Mamba-2 keeps its state across documents"
    if args.reset_position_ids and args.position_embedding_type != "learned_absolute":
        yield (
            "--reset-position-ids: without effect, --position-embedding-type "
            f"{args.position_embedding_type} takes no positions from the data"
        )


def _change_activation(args: Namespace, words: CommandLine) -> Iterator[str]:
    """Let the arguments that change a gated activation take effect; yield lines about it."""
    clamp, offset, unfused = (
        "--activation-func-clamp-value", "--glu-linear-offset", "--no-bias-swiglu-fusion",
    )  # fmt: skip
    for flag in filter(words.__contains__, (clamp, offset)):
        require(not args.use_te_activation_func, f"{flag}: Transformer Engine's activations have "
                "none; omit --use-te-activation-func")  # fmt: skip
        if not (args.swiglu or args.geglu or args.quick_geglu):
            yield f"{words.text(flag)}: without effect, the activation has no gate"
        elif args.swiglu and unfused not in words:
            require(not args.activation_func_fp8_input_store, f"{flag}: the fused activation of "
                    "--activation-func-fp8-input-store has none; omit one of them")  # fmt: skip
            words.add(unfused)
            args.bias_swiglu_fusion = False
            yield f"{flag}: added {unfused}, for Megatron-LM's kernel lacks it"


def _count_samples(args: Namespace, words: CommandLine) -> str:
    """Convert the schedule to samples, the only unit of Megatron-LM's phases; return a line."""
    batch = args.global_batch_size
    require(
        batch is not None and args.step_batch_size_schedule is None,
        "--phase-transition-iterations needs a constant --global-batch-size",
    )
    changed = []
    for part in ("train", "lr-decay", "lr-warmup", "lr-wsd-decay"):
        flag = f"--{part}-iters"
        if flag in words:
            samples = getattr(args, f"{part.replace('-', '_')}_iters") * batch
            words.remove(flag)
            words.add(f"--{part}-samples", str(samples))
            changed.append(f"{flag} as --{part}-samples {samples}")
    return f"--phase-transition-iterations: given to Megatron-LM: {', '.join(changed)}"


def on_described_machine(args: Namespace) -> Namespace:
    """Return the arguments as the machine that a dry run describes has them."""
    if not getattr(args, "dry_run", False):
        return args
    return Namespace(**vars(args) | {name: getattr(args, f"{name}_on_gpus") for name in OF_GPUS})
