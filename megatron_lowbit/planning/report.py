"""The plan in tables: the GPU's figures, one layout's memory and time, the layouts ranked."""

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence

from rich.table import Column, Table

from megatron_lowbit.planning.compute import Device
from megatron_lowbit.planning.estimate import Estimate, padded_vocabulary
from megatron_lowbit.planning.model import Part, parameters
from megatron_lowbit.recipes import Recipe
from megatron_lowbit.recipes.precision import side

GIB = 2**30
DAY = 86400


def gpu_table(device: Device) -> Table:
    """Tabulate every figure that the plan rests on, and its source."""
    gpu = device.gpu
    title = f"{gpu.name}, compute capability {'.'.join(map(str, gpu.capability))}"
    table = Table("figure", "value", "source", title=title)
    for key, figure in gpu.figures.items():
        table.add_row(key, f"{figure.value:g}", figure.source)
    return table


def gemm_table(parts: Counter[Part], recipe: Recipe, device: Device) -> Table:
    """Tabulate the tensor cores of each GEMM of the model's linear layers."""
    layers = "Transformer Engine's layers" if device.transformer_engine else "this project's layers"
    headings = ("GEMM", "left", "right", "multiplied as", "TFLOP/s", "linear layers")
    table = Table(*headings, title=f"recipe {recipe.name}, {layers}")
    counts: Counter[tuple] = Counter()
    for part, number in parts.items():
        for linear in part[1:]:
            for gemm, precision in linear.precision.gemms.items():
                name = device.gemm(linear.precision, gemm)
                counts[gemm, side(precision.lhs), side(precision.rhs), name] += number
    for (gemm, left, right, name), number in counts.items():
        rate = device.gpu[f"gemm.{name}"] * device.gpu["gemm_sustained"]
        table.add_row(gemm, left, right, name, f"{rate:.0f}", str(number))
    return table


def memory_table(found: Estimate, usable: float) -> Table:
    """Tabulate memory of the first and last pipeline stage, and of the one that needs most."""
    numbers = [memory.total for memory in found.memory]
    shown = sorted({0, len(numbers) - 1, max(range(len(numbers)), key=numbers.__getitem__)})
    stages = (Column(f"stage {stage}", justify="right") for stage in shown)
    table = Table("", *stages, title=f"GiB on a rank of a stage, of {usable / GIB:.1f}")
    memories = [found.memory[stage] for stage in shown]
    for name in dict.fromkeys(name for memory in memories for name in memory.parts):
        cells = [memory.parts.get(name, 0.0) / GIB for memory in memories]
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    table.add_section()
    table.add_row("peak", *(f"{memory.total / GIB:.2f}" for memory in memories))
    table.add_row("at", *(memory.moment for memory in memories))
    counted = [f"{found.parameters[stage].all:,}" for stage in shown]
    table.add_row("parameters on the rank", *counted)
    return table


def time_table(found: Estimate, device: Device, tokens: float | None = None) -> Table:
    """Tabulate a step of the slowest stage by cause, and what follows from it.

    ``tokens``: those of the whole run, if its days are to be shown.
    """
    figures = (Column(heading, justify="right") for heading in ("ms", "share"))
    table = Table("", *figures, title=f"a step of {found.tokens:,} tokens")
    for name, seconds in sorted(found.seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / found.step:.1%}")
    table.add_section()
    table.add_row("step", f"{1e3 * found.step:.1f}", "")
    for name, value in speeds(found, device).items():
        table.add_row(name, value, "")
    if tokens is not None:
        table.add_row(f"days for {_token_count(tokens)} tokens", days(found, tokens), "")
    return table


def days(found: Estimate, tokens: float) -> str:
    """Describe the days that so many tokens take, without evaluation, checkpoints and failures."""
    value = tokens / found.tokens_per_second / DAY
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _token_count(tokens: float) -> str:
    return f"{tokens / 1e9:,.0f} billion" if tokens >= 1e9 else f"{tokens / 1e6:.3g} million"


def speeds(found: Estimate, device: Device) -> dict[str, str]:
    """Describe tokens a second of a GPU and of all, a day's tokens, utilisation."""
    speed = found.tokens_per_second
    return {
        "tokens/s of a GPU": f"{speed / found.gpus:,.0f}",
        "tokens/s": f"{speed:,.0f}",
        "billion tokens a day": f"{speed * DAY / 1e9:,.2f}",
        "model FLOPs / BF16 peak": f"{found.utilisation(device):.1%}",
    }


def layout_table(found: Sequence[Estimate], device: Device, title: str, caption: str) -> Table:
    """Tabulate layouts in the order given."""
    headings = ("TP", "PP", "VP", "DP", "EP", "micro batch", "microbatches", "recomputed", "GiB",
                "tokens/s of a GPU", "MFU", "bubble")  # fmt: skip
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table(
        *columns, title=title, caption=caption, title_justify="left", caption_justify="left"
    )
    for one in found:
        layout = one.layout
        table.add_row(
            *map(str, layout[:7]), layout.recompute, f"{one.most_memory / GIB:.1f}",
            f"{one.tokens_per_second / one.gpus:,.0f}", f"{one.utilisation(device):.1%}",
            f"{one.seconds.get('pipeline bubble', 0.0) / one.step:.1%}",
        )  # fmt: skip
    return table


def recipe_table(
    rows: Sequence[tuple[str, Estimate, bool]], device: Device, title: str, tokens: float | None
) -> Table:
    """Tabulate recipes: each one's name, its layout, and whether the layout fits.

    ``tokens``: those of the whole run, if its days are to be shown.
    """
    if tokens is not None:
        title = f"{title}; days are for {_token_count(tokens)} tokens"
    headings = ("layout", "microbatches", "recomputed", "GiB", "tokens/s of a GPU", "of the first",
                "MFU", *([] if tokens is None else ["days"]))  # fmt: skip
    columns = (Column(heading, justify="right") for heading in headings)
    table = Table("recipe", *columns, title=title, title_justify="left")
    first = rows[0][1].tokens_per_second
    for name, one, fits in rows:
        layout = one.layout
        sizes = zip(("TP", "PP", "VP", "DP", "EP"), layout[:5], strict=True)
        ranks = " ".join(f"{kind}{size}" for kind, size in sizes if size > 1 or kind == "DP")
        speed = [
            f"{one.tokens_per_second / one.gpus:,.0f}", f"{one.tokens_per_second / first:.2f}",
            f"{one.utilisation(device):.1%}", *([] if tokens is None else [days(one, tokens)]),
        ] if fits else ["does not fit"]  # fmt: skip
        table.add_row(
            name, ranks, f"{layout.microbatches} of {layout.micro_batch}", layout.recompute,
            f"{one.most_memory / GIB:.1f}", *speed,
        )  # fmt: skip
    return table


def routing_notes(parts: Counter[Part], recipe: Recipe, device: Device) -> list[str]:
    """Describe in a sentence each format whose GEMMs run on tensor cores of another one."""
    gpu, routed = device.gpu, {}
    for part in parts:
        for linear in part[1:]:
            for gemm, sides in linear.precision.gemms.items():
                name = device.gemm(linear.precision, gemm)
                for quantizer in filter(None, (sides.lhs, sides.rhs)):
                    routed[quantizer.format.name.split("-")[0].upper(), name] = quantizer
    share = gpu["gemm_sustained"]
    fp8 = share * gpu["gemm.fp8 per tensor"]
    notes = []
    for (family, name), quantizer in sorted(routed.items()):
        rate, start = share * gpu[f"gemm.{name}"], f"recipe {recipe.name}: {family} runs as"
        if name == "bf16":
            notes.append(
                f"{start} BF16 on {gpu.name} ({rate:.0f} TFLOP/s): slower than BF16, for it is "
                f"quantized first, and than FP8 ({fp8:.0f} TFLOP/s)"
            )
        elif name == "fp32":
            notes.append(f"{start} FP32 on {gpu.name}: slower than BF16")
        elif quantizer.format.element.bits < 8 and name.startswith("fp8"):
            notes.append(f"{start} FP8 on {gpu.name}: no faster than FP8")
    return notes


def heading(
    args: Namespace, parts: Counter[Part], vocabulary: int, gpus: int, device: Device
) -> str:
    """Describe the model, its vocabulary as one process pads it, and the cluster in a line."""
    padded = padded_vocabulary(args, vocabulary, 1)
    size = parameters(args, parts, padded, tensor=1, expert=1, ends="first last").all
    kind = "hybrid" if args.hybrid_layer_pattern else "GPT"
    return (
        f"{kind} of {args.num_layers} layers, {size:,} parameters, vocabulary {padded:,}, "
        f"{args.seq_length} tokens a sequence; {gpus} x {device.gpu.name}"
    )
