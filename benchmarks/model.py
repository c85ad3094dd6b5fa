"""A whole model, forward and backward: this project's stack against megatron-core's TE layers.

    python -m benchmarks model

Four layers of Llama-3-8B, vocabulary 32000, 4 sequences of 4096 random tokens; no optimizer. Each
step quantizes the weights again and adds gradients to FP32 main gradients: Transformer Engine's
layers inside their GEMMs, as Megatron-LM has them do, all others by a hook. Recipes quantize all
four layers. A process for each contender, one after another, so that memory is its own; they import
side by side. The bound counts FLOPs only: of the blocks' linear layers at the rates measured for
their operand formats, of attention and the output layer at BF16's.
"""

import argparse
import json
import subprocess
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from benchmarks import records, runner, timing
from benchmarks.linear import RECIPES, SQUARE_INPUT, gemm_kinds, middle_precision
from benchmarks.timing import Ceilings
from benchmarks.training_steps import cases_file

DECLARED = cases_file("model")
MODEL = DECLARED["model"].split()
VOCABULARY = 32000
SECONDS = 2.0  # of measured steps
PATIENCE_S = 240


class Contender(NamedTuple):
    """The recipe that a model computes like, for the bound, and the arguments that it adds."""

    like: str
    arguments: tuple[str, ...] = ()


LOCAL, IN_TE = (tuple(DECLARED[layers].split()) for layers in ("local", "te"))
OWN_RECIPES: dict[str, str] = DECLARED["recipes"]
"""Settings by the recipe's name, which settings of the bound may follow."""


def _of_recipe(like: str, settings: str, layers: Sequence[str]) -> Contender:
    words = f"--precision-recipe {like.split()[0]} {settings}".split()
    return Contender(like, (*words, *layers))


SQUARE, FP8 = f"--recipe-set {SQUARE_INPUT}", ("--fp8-format", "hybrid", "--fp8-recipe")
CONTENDERS = {
    "bf16": _of_recipe("bf16", "", LOCAL),
    "fp8-tile, square": _of_recipe(RECIPES["fp8-tile, square"], SQUARE, LOCAL),
    **{name: _of_recipe(name, settings, LOCAL) for name, settings in OWN_RECIPES.items()},
    **{f"{name} in TE": _of_recipe(name, words, IN_TE) for name, words in OWN_RECIPES.items()},
    "TE BF16": Contender("bf16", IN_TE),
    "TE blockwise": Contender("fp8-tile", (*FP8, "blockwise", *IN_TE)),
    "TE delayed": Contender("fp8-delayed", (*FP8, "delayed", *IN_TE)),
}


def build(args: Namespace) -> nn.Module:
    """Build the model that the arguments describe, by Megatron-LM's builders."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    from megatron.training.models.dist_utils import build_virtual_pipeline_stages

    from megatron_lowbit.megatron.recipe_hook import model_config_of

    config = model_config_of(args)
    config.finalize()
    builder = config.get_builder_cls()(config)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = build_virtual_pipeline_stages(builder.build_model, groups, None)
    for hook in config.pre_wrap_hooks:
        chunks = hook(chunks)
    (model,) = chunks
    model = model.to(timing.device())
    return Float16Module(config.transformer, model) if args.bf16 else model


def work(name: str) -> None:
    """Run one contender in this process: import, wait for a line, build, measure, print JSON."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed|transformer_engine")
    contender = CONTENDERS[name]
    if LOCAL[1] in contender.arguments:
        # Megatron-LM would use Transformer Engine's rope where it finds it.
        sys.modules["transformer_engine"] = None
    from megatron_lowbit.arguments import parse_arguments
    from megatron_lowbit.megatron.pretrain import teardown

    args = parse_arguments([*MODEL, *contender.arguments])
    sys.stdin.readline()
    with teardown():
        initialize(args)
        _measure(name, args)


def initialize(args: Namespace) -> None:
    """Set up a world of one process."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    dist.init_process_group(args.distributed_backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


def _measure(name: str, args: Namespace) -> None:
    step = _step(build(args), args)
    step(lambda: None)  # compilation and workspaces: not part of the memory that a run takes
    timing.synchronize()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    laps = timing.measure({name: step}, SECONDS, flush=0)[name]
    peak = torch.cuda.max_memory_allocated() if cuda else None
    row: dict = timing.phases(laps)
    row["tokens"] = args.micro_batch_size * args.seq_length
    row["peak_gb"] = round(peak / 1e9, 2) if cuda else None
    print(json.dumps(row | _flops(args)))


def _step(model: nn.Module, args: Namespace) -> timing.Step:
    from megatron_lowbit.megatron.layers.state import layer_states

    shape = (args.micro_batch_size, args.seq_length)
    device = timing.device()
    tokens, labels = torch.randint(VOCABULARY, (2, *shape), device=device).unbind()
    positions = torch.arange(args.seq_length, device=device).expand(shape)
    _add_to_main_grads(model)
    states = list(layer_states([model]))

    def step(mark: timing.Mark) -> None:
        for state in states:
            state.forget_weight()
        for module in model.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.is_first_microbatch = True
        loss = model(tokens, positions, attention_mask=None, labels=labels).mean()
        mark()
        loss.backward()

    return step


def _add_to_main_grads(model: nn.Module) -> None:
    """Give each parameter an FP32 main gradient; every backward pass is the first of a step."""

    def add(parameter: nn.Parameter) -> None:
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False

    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(add)
    for module in model.modules():
        # Megatron-LM's argument for it is for local layers, too, which need Apex.
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _flops(args: Namespace) -> dict[str, int]:
    """Count the FLOPs of a step: of all, and of them those outside the blocks' linear layers."""
    from megatron.training.training import num_floating_point_operations

    scores = args.num_layers * args.seq_length * args.num_attention_heads * args.kv_channels
    outside = 6 * (args.hidden_size * VOCABULARY + scores) * args.seq_length
    return {
        "flops": int(num_floating_point_operations(args, args.micro_batch_size)),
        "flops_outside": args.micro_batch_size * outside,
    }


def run(names: Sequence[str]) -> tuple[list[dict], Ceilings]:
    """Measure a row for each contender, and the ceilings before the first of them."""
    workers = {name: _start(name) for name in names}
    try:
        limits = timing.ceilings()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        rows = [_finish(name, worker, limits) for name, worker in workers.items()]
    finally:
        for worker in workers.values():
            worker.kill()
    runner.add_ratios(rows, "times_te_bf16", "TE BF16", "both")
    return rows, limits


def _start(name: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks", "model", "--worker", name]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _finish(name: str, worker: subprocess.Popen, limits: Ceilings) -> dict:
    """Let a worker go on, and make a row of what it says."""
    try:
        output, errors = worker.communicate("go\n", timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        return {"contender": name, "refused": f"no result within {PATIENCE_S} s"}
    if worker.returncode:
        # Destructors may go on printing after the exception that ended the process.
        named = [line for line in errors.splitlines() if "Error: " in line or "Exception: " in line]
        last = (named or errors.splitlines() or [f"exit status {worker.returncode}"])[-1]
        return {"contender": name, "refused": last.removeprefix("[rank0]: ").strip()[:200]}
    # Libraries may print as well.
    row = json.loads(next(line for line in output.splitlines() if line.startswith('{"forward"')))
    seconds = row["both"]["median_ms"] / 1e3
    row["tokens_per_s"] = round(row["tokens"] / seconds, 1)
    row["tflop_per_s"] = round(row["flops"] / seconds / 1e12, 3)
    row["of_bf16_gemm"] = round(row["flops"] / seconds / limits.gemms["bf16"], 3)
    least = _bound(CONTENDERS[name].like, row, limits)
    if least is not None:
        row["bound_ms"] = round(1e3 * least, 3)
        row["over_bound"] = round(seconds / least, 3)
    return {"contender": name} | row


def _bound(recipe: str, row: dict, limits: Ceilings) -> float | None:
    routes = gemm_kinds(middle_precision(recipe)).values()
    share = (row["flops"] - row["flops_outside"]) / 3
    seconds = [limits.seconds(share, route) for route in routes]
    if None in seconds:
        return None
    return sum(seconds) + row["flops_outside"] / limits.gemms["bf16"]


COLUMNS = {
    "ms": "both", "tokens/s": "tokens_per_s", "x TE BF16": "times_te_bf16", "peak GB": "peak_gb",
    "over bound": "over_bound",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON."""
    parser = records.parser(__doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=[*CONTENDERS])
    parser.add_argument("--worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    records.add_output(parser, "model")
    args = parser.parse_args(argv)
    if args.worker is not None:
        work(args.worker)
        return
    begin, console = time.monotonic(), Console(width=130)
    rows, limits = run(args.contenders)
    console.print(limits.as_json())
    console.print(runner.table(rows, "forward and backward", COLUMNS))
    runner.write(args.output, rows, begin, limits, arguments=MODEL)
