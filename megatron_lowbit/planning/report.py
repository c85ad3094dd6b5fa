"""The printed plan: tables of GEMMs, layouts, memory and time, and the command that starts it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch
from rich.table import Column, Table

from megatron_lowbit.command_line import shell_line
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics.precision import GemmPrecision, side
from megatron_lowbit.planning.device import BLACKWELL, EXACT, FOLDED, GIB, Device
from megatron_lowbit.planning.estimate import BUBBLE, Estimate, padded_vocabulary
from megatron_lowbit.planning.hardware import gpu, gpu_names
from megatron_lowbit.planning.layouts import MOST_LAYERS
from megatron_lowbit.planning.model import parameters
from megatron_lowbit.planning.search import MOST_GPUS, Plan, changes, enough_gpus, plan_run
from megatron_lowbit.planning.training_arguments import TrainingArguments, needs_one_connection
from megatron_lowbit.recipes import Layer

_DAY = 86400
_DATA = (
    "data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data",
)  # fmt: skip
"""Arguments of which training needs one; mock data lets a run without data start."""


def report(runs: Sequence[Plan], top: int, figures: bool) -> Iterator[str | Table]:
    """Yield the plan of a run under one recipe, or the fastest layout under each of several.

    ``top``: number of layouts to show. ``figures``: show the GPU's figures and their sources.
    Raises UserError where no layout fits, under any of the recipes.
    """
    if not any(run.ranked for run in runs):
        raise UserError(_too_large(runs))
    first = runs[0]
    if figures:
        yield gpu_table(first.device)
    yield heading(first)
    if len(runs) == 1:
        yield gemm_table(first)
        if not first.as_given:
            yield layout_table(first, top)
        yield from _details(first)
    else:
        yield recipe_table(runs)
    for run in runs:
        yield from routing_notes(run)


def advice(runs: Sequence[Plan]) -> Iterator[str]:
    """Yield arguments that would change a plan, and the command that starts the fastest."""
    fitting = [run for run in runs if run.ranked]
    for run in fitting:
        start = f"recipe {run.recipe.name}: " if len(runs) > 1 else ""
        yield from (start + line for line in changes(run))
    yield from _command(max(fitting, key=lambda run: run.best.tokens_per_second))


def describe_plan(
    training: Sequence[str], gpus: int, gpu_name: str, why: str
) -> Iterator[str | Table]:
    """Yield tables of the memory and time of a run, or the reason why there are none.

    ``training``: arguments as given. ``gpu_name`` and ``why``: as :func:`planned_gpu` returns them.
    """
    try:
        run = plan_run(training, gpu_name, gpus, as_given=True)
    except UserError as error:
        yield f"memory and time are not planned: {error}"
        return
    layers = "Transformer Engine layers" if run.device.transformer_engine else "local layers"
    yield f"planned for {gpus} x {run.device.gpu.name} ({why}), {layers}, BF16"
    yield from _details(run)
    yield from routing_notes(run)


def planned_gpu(name: str | None) -> tuple[str, str]:
    """Return the kind of GPU to plan for, and why: it is given, this machine's, or assumed.

    Raises UserError for a kind without figures.
    """
    if name is not None:
        gpu(name)
        return name, "from --gpu"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    here = next((known for known in gpu_names() if known.upper() in device), None)
    return (here, "this machine's") if here else ("h200", "assumed; --gpu selects another")


def heading(run: Plan) -> str:
    """Describe the model, its vocabulary as one process pads it, and the cluster in a line."""
    args, padded = run.args, padded_vocabulary(run.args, run.vocabulary, 1)
    size = parameters(args, run.parts, padded).all
    model = "hybrid" if args.hybrid_layer_pattern else "GPT"
    return (
        f"{model} of {args.num_layers} layers, {size:,} parameters, vocabulary {padded:,}, "
        f"{args.seq_length} tokens per sequence; {run.gpus} x {run.device.gpu.name}"
    )


def gpu_table(device: Device) -> Table:
    """Tabulate every figure that the plan rests on, and its source."""
    capability = ".".join(map(str, device.gpu.capability))
    title = f"{device.gpu.name}, compute capability {capability}"
    table = Table("figure", "value", "source", title=title)
    for key, figure in device.gpu.figures.items():
        table.add_row(key, f"{figure.value:g}", figure.source)
    return table


def gemm_table(run: Plan) -> Table:
    """Tabulate the tensor cores of each GEMM of the model's linear layers."""
    native = run.device.transformer_engine
    layers = "Transformer Engine layers" if native else "local layers"
    headings = ("GEMM", "left", "right", "multiplied as", "TFLOP/s", "linear layers")
    table = Table(*headings, title=f"recipe {run.recipe.name}, {layers}")
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for gemm, precision, name, number in _gemms(run):
        counts[gemm, side(precision.lhs), side(precision.rhs), name] += number
    for (gemm, left, right, name), number in counts.items():
        rate = f"{run.device.flops(name) / 1e12:.0f}"
        table.add_row(gemm, left, right, name, rate, str(number))
    return table


def _gemms(run: Plan) -> Iterator[tuple[str, GemmPrecision, str, int]]:
    """Yield GEMMs of linear layers, what multiplies them, and the number of these layers."""
    for part, number in run.parts.items():
        for linear in part.linears:
            for gemm, precision in linear.precision.gemms.items():
                yield gemm, precision, run.device.gemm(linear.precision, gemm), number
    head = run.recipe.precision_for(Layer.output(run.args.num_layers))
    for gemm, precision in head.gemms.items() if head.quantized else ():
        yield gemm, precision, run.device.of_head.gemm(head, gemm), 1


def layout_table(run: Plan, top: int) -> Table:
    """Tabulate the fastest layouts that fit."""
    ranked, usable = run.ranked, run.device.usable_bytes / GIB
    tried = len(run.estimates)
    table = Table(
        *_right("TP", "PP", "VP", "DP", "EP", "micro batch", "microbatches", "recomputed", "GiB",
                "tokens/s per GPU", "MFU", "bubble"),
        title="layouts, fastest first", title_justify="left", caption_justify="left",
        caption=f"{tried} layouts planned, {tried - len(ranked)} omitted because they do not fit "
        f"in {usable:.0f} GiB; {run.refused} more refused by the checks of training",
    )  # fmt: skip
    for each in ranked[:top]:
        bubble = each.seconds.get(BUBBLE, 0.0) / each.step
        table.add_row(
            *map(str, each.layout[:7]), *_memory(each), *_speed(run, each), f"{bubble:.1%}"
        )
    return table


def recipe_table(runs: Sequence[Plan]) -> Table:
    """Tabulate the fastest layout under each recipe, or the layout as given."""
    first, tokens = runs[0], runs[0].tokens
    title = "the layout as given" if first.as_given else "fastest layout of each recipe"
    headings = ["layout", "micro batch x number", "recomputed", "GiB", "tokens/s per GPU",
                f"x {first.recipe.name}", "MFU"]  # fmt: skip
    if tokens is not None:
        title += f"; days are for {_token_count(tokens)} tokens"
        headings.append("days")
    table = Table("recipe", *_right(*headings), title=title, title_justify="left")
    for run in runs:
        best, layout = run.best, run.best.layout
        sizes = zip(
            ("TP", "CP", "PP", "VP", "DP", "EP"),
            (layout.tensor, run.args.context_parallel_size, *layout[1:5]), strict=True,
        )  # fmt: skip
        ranks = " ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "DP")
        speed = ["does not fit"]
        if run.ranked:
            rate, utilisation = _speed(run, best)
            ratio = best.tokens_per_second / first.best.tokens_per_second
            speed = [rate, f"{ratio:.2f}", utilisation]
            speed += [] if tokens is None else [_days(best, tokens)]
        table.add_row(
            run.recipe.name, ranks, f"{layout.micro_batch} x {layout.microbatches}",
            *_memory(best), *speed,
        )  # fmt: skip
    return table


def _details(run: Plan) -> Iterator[Table]:
    """Yield tables of memory and time of the fastest layout."""
    yield memory_table(run.best, run.device.usable_bytes)
    yield time_table(run)


def memory_table(estimate: Estimate, usable: float) -> Table:
    """Tabulate memory of the first and last pipeline stage, and of the one that needs most."""
    totals = [memory.total for memory in estimate.memory]
    shown = sorted({0, len(totals) - 1, totals.index(max(totals))})
    memories = [estimate.memory[stage] for stage in shown]
    title = f"GiB per rank, {usable / GIB:.1f} usable"
    table = Table("", *_right(*(f"stage {stage}" for stage in shown)), title=title)
    for name in dict.fromkeys(name for memory in memories for name in memory.parts):
        table.add_row(name, *(f"{memory.parts.get(name, 0.0) / GIB:.2f}" for memory in memories))
    table.add_section()
    table.add_row("peak", *(f"{memory.total / GIB:.2f}" for memory in memories))
    table.add_row("at", *(memory.moment for memory in memories))
    counts = [f"{estimate.parameters[stage].all:,}" for stage in shown]
    table.add_row("parameters per rank", *counts)
    return table


def time_table(run: Plan) -> Table:
    """Tabulate a step of the fastest layout by cause, and what follows from it."""
    best, tokens = run.best, run.tokens
    speed = best.tokens_per_second
    table = Table("", *_right("ms", "share"), title=f"a step of {best.tokens:,} tokens")
    for name, seconds in sorted(best.seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / best.step:.1%}")
    table.add_section()
    rate, utilisation = _speed(run, best)
    table.add_row("step", f"{1e3 * best.step:.1f}", "")
    table.add_row("tokens/s per GPU", rate, "")
    table.add_row("tokens/s", f"{speed:,.0f}", "")
    table.add_row("billion tokens per day", f"{speed * _DAY / 1e9:,.2f}", "")
    table.add_row("model FLOPs / BF16 peak", utilisation, "")
    if tokens is not None:
        table.add_row(f"days for {_token_count(tokens)} tokens", _days(best, tokens), "")
    return table


def _right(*headings: str) -> list[Column]:
    return [Column(heading, justify="right") for heading in headings]


def _memory(estimate: Estimate) -> tuple[str, str]:
    """Describe what is recomputed, and the memory in GiB."""
    return estimate.layout.recompute, f"{estimate.most_memory / GIB:.1f}"


def _speed(run: Plan, estimate: Estimate) -> tuple[str, str]:
    """Describe tokens/s per GPU and utilisation."""
    rate = f"{estimate.tokens_per_second / estimate.gpus:,.0f}"
    return rate, f"{estimate.utilisation(run.device):.1%}"


def _days(estimate: Estimate, tokens: float) -> str:
    """Describe the days that so many tokens take, without evaluation, checkpoints and failures."""
    value = tokens / estimate.tokens_per_second / _DAY
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _token_count(tokens: float) -> str:
    return f"{tokens / 1e9:,.0f} billion" if tokens >= 1e9 else f"{tokens / 1e6:.3g} million"


def routing_notes(run: Plan) -> Iterator[str]:
    """Describe in a sentence each format whose GEMMs run on tensor cores of another one."""
    name_of_gpu = run.device.gpu.name
    routed = {
        (quantizer.format.name.split("-")[0].upper(), name): quantizer.format.element.bits
        for _, precision, name, _ in _gemms(run)
        for quantizer in filter(None, precision.sides)
    }
    fp8 = run.device.flops(FOLDED) / 1e12
    for (family, name), bits in sorted(routed.items()):
        start = f"recipe {run.recipe.name}: {family} runs as"
        if name.startswith(EXACT):
            rate = run.device.flops(name) / 1e12
            yield (
                f"{start} BF16 on {name_of_gpu} ({rate:.0f} TFLOP/s, FP8: {fp8:.0f}): slower than "
                "BF16, because quantization takes time"
            )
        elif name == "fp32":
            yield f"{start} FP32 on {name_of_gpu}: slower than BF16"
        elif bits < 8 and name.startswith("fp8"):
            yield f"{start} FP8 on {name_of_gpu}: no faster than FP8"


def _too_large(runs: Sequence[Plan]) -> str:
    """Describe a run that has no layout, and the number of GPUs on which it has one."""
    first = runs[0]
    is_searched = first.args.num_layers <= MOST_LAYERS
    enough = [gpus for run in runs if is_searched and (gpus := enough_gpus(run)) is not None]
    advice = f"use --gpus {min(enough)}" if enough else f"{MOST_GPUS:,} GPUs are not enough"
    if not is_searched:
        advice = f"layouts of more than {MOST_LAYERS} layers are not searched"
    if first.as_given and enough:
        advice += ", without --as-given"
    why = "no layout is possible; --global-batch-size is no multiple of any layout's ranks"
    if sizes := [run.best.most_memory / GIB for run in runs if run.estimates]:
        start = "the layout as given" if first.as_given else "no layout fits: the smallest"
        usable = first.device.usable_bytes / GIB
        why = f"{start} needs {min(sizes):.0f} GiB per GPU of {usable:.0f} usable"
    return f"--gpus {first.gpus}: {why}; {advice}"


def _command(run: Plan) -> Iterator[str]:
    """Yield lines about ignored and added arguments, and the command that starts the run."""
    training, gpus = run.training, run.gpus
    if training.flags.fused_allreduce_norm and not run.as_given:
        yield (
            "--fused-allreduce-norm: ignored without --as-given, because the layouts with tensor "
            "parallelism have --sequence-parallel"
        )
    added, flags = list(training.added), training.flags
    added += [] if any(getattr(flags, name) for name in _DATA) else ["--mock-data"]
    kind, none = flags.tokenizer_type, "NullTokenizer"
    has_tokenizer = kind == none or (kind and (flags.tokenizer_model or flags.vocab_file))
    added += [] if has_tokenizer else ["--tokenizer-type", none]
    if added:
        yield f"added because the run needs them: {' '.join(added)}"
    more = [*run.arguments(run.best), *added]
    words = [*training.given.tokens(), *more]
    args = TrainingArguments(words).parse(gpus)
    # A later argument replaces one in a file, but cannot switch off a flag.
    with_files = [*training.words, *more]
    with suppress(UserError):
        words = with_files if TrainingArguments(with_files).parse(gpus) == args else words
    start = []
    if needs_one_connection(args) and run.device.gpu.capability < BLACKWELL:
        start.append("CUDA_DEVICE_MAX_CONNECTIONS=1")
    if gpus > 1:
        largest = min(run.device.gpus_per_node, gpus)
        processes = next(n for n in range(largest, 0, -1) if gpus % n == 0)
        start.append("torchrun")
        if gpus > processes:
            rendezvous = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"
            start.append(f"--nnodes {gpus // processes} {rendezvous}")
        start.append(f"--nproc-per-node {processes} --no-python")
    yield " ".join([*start, "lowbit-pretrain", shell_line(words)])
