"""Command line of the pretraining programs and its translation to Megatron-LM's arguments."""

import argparse
import ast
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from megatron_lowbit import arguments, command_line
from megatron_lowbit.arguments.cpu import _ADDED, _UNSUPPORTED, adapt_to_cpu
from megatron_lowbit.arguments.parse import _NEVER, _translate
from megatron_lowbit.arguments.parser import read_command_line
from megatron_lowbit.arguments.precision import Machine
from megatron_lowbit.arguments.upstream import in_one_line
from megatron_lowbit.command_line import CommandLine, expand_files
from megatron_lowbit.errors import UserError
from tests import processes

# isort: split
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training import argument_utils
from megatron.training.arguments import add_megatron_arguments, parse_and_validate_args
from megatron.training.global_vars import get_args, unset_global_variables

TINY = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 96
"""
CLAMPED = "--swiglu --no-bias-gelu-fusion --activation-func-clamp-value 7"
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Leave no global variable of Megatron-LM and no environment variable behind."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    yield
    unset_global_variables()


@pytest.fixture(scope="module")
def parser():
    return arguments.front_parser()


def parse(line: str, **named):
    return arguments.parse_arguments(shlex.split(TINY + line), **named)


def refusal(line: str, **named) -> str:
    with pytest.raises(UserError) as refused:
        parse(line, **named)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- a whole command line --------------------------------------------------------------------------


@on_a_cpu
def test_the_plain_command_works_on_a_cpu(capsys):
    before = list(sys.argv)
    args = parse("--bf16 --fp4-recipe nvfp4 --recipe-set bf16_blocks=none")
    assert sys.argv == before and get_args() is args
    assert args.precision_recipe == ["nvfp4"] and args.recipe_set == ["bf16_blocks=none"]
    formats = (args.fp8, args.fp4, args.fp8_recipe, args.fp4_recipe)
    assert formats == (None, None, "delayed", "nvfp4")
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert not args.bf16 and args.params_dtype == torch.float32
    assert not args.dry_run and args.world_size == 1
    out = capsys.readouterr().out
    assert "precision: recipe nvfp4 of megatron-lowbit with bf16_blocks=none" in out
    assert "on a CPU: ignored --bf16" in out and "on a CPU: added --distributed-backend" in out


@on_a_cpu
def test_no_default_of_megatron_changes():
    args = vars(parse("--fp4-recipe nvfp4"))
    unset_global_variables()
    added = " ".join(word for argument in _ADDED for word in argument)
    added += f" --eval-interval {_NEVER}"  # without one Megatron-LM ends in a TypeError
    argv, sys.argv = sys.argv, ["program", *shlex.split(TINY + added)]
    try:
        plain = vars(parse_and_validate_args())
    finally:
        sys.argv = argv
    assert {name: args[name] for name in plain} == plain


def test_lines_are_printed_only_on_rank_0(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    parse("--fp4-recipe nvfp4")
    assert "precision:" not in capsys.readouterr().out


def test_any_script_can_add_the_arguments_of_recipes(monkeypatch):
    line = TINY + "--precision-recipe fp8-tile nvfp4 --log-quantization-error-interval"
    line += " --cross-entropy-loss-fusion --cross-entropy-fusion-impl lowbit"
    monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(line)])
    args = parse_and_validate_args(extra_args_provider=arguments.add_recipe_arguments)
    assert args.precision_recipe == ["fp8-tile", "nvfp4"]
    assert (args.recipe_set, args.mxnorm, args.mxnorm_p) == ([], False, 2.0)
    assert args.log_quantization_error_interval == 1000 and args.save_keep_last is None
    assert args.cross_entropy_fusion_impl == "lowbit"


def test_mxnorm_is_a_normalization():
    args = parse("--normalization MXNorm --mxnorm-p 3 --fp4-recipe nvfp4")
    assert (args.normalization, args.mxnorm, args.mxnorm_p) == ("RMSNorm", True, 3.0)


@on_a_cpu
def test_a_dry_run_is_for_any_number_of_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "1")
    line = "--dry-run --world-size 8 --tensor-model-parallel-size 2 --tensorboard-dir "
    args = parse(line + str(tmp_path / "events"))
    assert args.dry_run and (args.world_size, args.data_parallel_size) == (8, 4)
    assert os.environ["WORLD_SIZE"] == "1" and not (tmp_path / "events").exists()
    # Megatron-LM demands it for tensor parallelism, but a CPU does not read it.
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@on_a_cpu
@pytest.mark.parametrize("sharding", ["--use-megatron-fsdp", "--use-torch-fsdp2"])
@pytest.mark.parametrize("splits", ["--tensor-model-parallel-size", "--context-parallel-size"])
def test_a_cpu_divides_tensors_where_a_gpu_shards_parameters(sharding, splits, monkeypatch):
    """Megatron-LM demands one connection of the former, several of the latter."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    line = f"{sharding} {splits} 2 --dry-run --world-size 2"
    line += " --ckpt-format fsdp_dtensor" * (sharding == "--use-megatron-fsdp")
    assert parse(line).world_size == 2


# -- refusals --------------------------------------------------------------------------------------


def test_all_unknown_arguments_are_named_at_once():
    message = refusal("--nm-layers 3 --fp4-recpie=nvfp4 --zzzz -1 --lr 0.1 stray")
    assert message.startswith("unknown arguments --nm-layers (did you mean --num-layers")
    assert "--fp4-recpie (did you mean --fp4-recipe" in message
    assert ", --zzzz, 'stray'; --help lists all" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--num-layers two", "--num-layers"),
        ("--attention-backend fast", "invalid value: 'fast'; use one of flash,fused,unfused"),
        ("--moe-layer-freq x", "--moe-layer-freq"),
        ("--hidden-size 65", "--hidden-size % --num-attention-heads == 0"),
        ("--min-lr 1", "Megatron-LM requires --min-lr <= --lr"),
        ("--tokenizer-type HuggingFaceTokenizer", "--tokenizer-type HuggingFaceTokenizer without"),
        ("--pipeline-model-parallel-size 2", "world size (1) is not divisible"),
        ("--no-position-embedding", "--no-position-embedding is deprecated"),
        ("--checkpoint-activations", "has removed it; give --recompute-activations"),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model /no/such/folder", "/no/such"),
        ("--world-size 2", "--world-size needs --dry-run"),
        ("--mxnorm-p 0", "--mxnorm-p 0.0: must be positive"),
        ("--load-latest-valid", "needs --load"),
        ("--save-keep-last 2", "needs --save"),
        ("--config-logger-dir configs", "process groups of its models; omit it"),
        ("--init-method-xavier-uniform", "give --init-method-std"),
        ("--lazy-mpu-init", "process groups"),
        ("--rampup-batch-size 1 1 8", "give --step-batch-size-schedule"),
        ("--rl-profile", "profiler"),
        (
            "--heterogeneous-layers-config-encoded-json {}",
            "needs --heterogeneous-layers-config-path",
        ),
        ("--freeze-all-layers", "trains all layers nevertheless; omit it"),
        ("--mup-width-mult 2", "computes it from --mup-base-hidden-size; omit it"),
        ("--trust-remote-code", "no code of a tokenizer's folder is run; omit it"),
        ("--apply-residual-connection-post-layernorm", "no layer of Megatron-LM reads it"),
        ("--logits-load-dir logits", "give --distill-from"),
        ("--no-pad-vocab-size", "give --make-vocab-size-divisible-by 1"),
        ("--no-initialization", "needs --load"),
        ("--dataloader-type external", "a script of your own"),
        ("--tokenizer-type NullMultimodalTokenizer", "of text"),
        ("--full-validation", "--full-validation needs --multiple-validation-sets"),
        ("--multiple-validation-sets", "--multiple-validation-sets needs --full-validation"),
        ("--precision-recipe mxfp8 --mxnorm-p 1", "--mxnorm-p needs --mxnorm"),
        ("--gpu h200", "--gpu needs --dry-run"),
        ("--lr 0.1 -- --num-layers 3", "--: omit it"),
        ("--lr-warmup-iters 2", "--lr-warmup-iters 2 must be less than --train-iters 2"),
        ("--train-iters 9 --lr-decay-iters 4 --lr-warmup-iters 5",
         "--lr-warmup-iters 5 must be less than --lr-decay-iters 4"),
        (f"{CLAMPED} --use-te-activation-func", "omit --use-te-activation-func"),
        (f"{CLAMPED} --activation-func-fp8-input-store", "--activation-func-fp8-input-store has"),
    ],
)  # fmt: skip
def test_refusals_are_one_line(line, message):
    assert message in refusal(line)


@pytest.mark.parametrize("module", ["arguments", "global_vars"])
def test_arguments_at_which_megatron_exits_are_refused(module):
    """``if args.NAME:`` before ``exit()`` would end the process with code 0."""
    source = Path(add_megatron_arguments.__code__.co_filename).with_name(f"{module}.py")
    branches = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.If)]
    tests = [ast.unparse(branch.test) for branch in branches if "exit()" in ast.unparse(branch)]
    names = [test.removeprefix("args.") for test in tests]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    assert flags and all(refusal(flag).startswith(f"{flag}: ") for flag in flags)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--num-layers 2 --hidden-size 64 --mock-data", "--micro-batch-size is missing"),
        (TINY.replace("--tokenizer-type NullTokenizer", "--tokenizer-model folder"),
         "give --tokenizer-type, such as HuggingFaceTokenizer"),
    ],
)  # fmt: skip
def test_a_missing_argument_is_named(given, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        arguments.parse_arguments(shlex.split(given))


def test_scripts_for_hybrids_and_for_gpts():
    pattern = "--hybrid-layer-pattern M-*-"
    assert "pretrain_gpt.py" in refusal("", hybrid=True)
    assert "pretrain_hybrid.py" in refusal(pattern, hybrid=False)
    assert "pretrain_hybrid.py" in refusal("--hybrid-override-pattern M-*-", hybrid=False)
    assert parse(pattern, hybrid=True).num_layers == 4
    for empty in ("", "/*-", "|"):
        given = f"--hybrid-layer-pattern '{empty}'"
        assert refusal(given, hybrid=True).startswith(f"--hybrid-layer-pattern '{empty}': has no")


HYBRID = "--position-embedding-type none --hybrid-layer-pattern M-*-"


@pytest.mark.parametrize(
    ("pattern", "given", "predictions"),
    [("", 1, 0), ("/*-", 2, 1), ("/*-/*-", 1, 2), ("/*-", 0, 1)],
)
def test_a_hybrid_without_the_given_multi_token_prediction_is_refused(pattern, given, predictions):
    """Megatron-LM warns, and trains as the pattern says."""
    error = refusal(f"{HYBRID}{pattern} --mtp-num-layers {given}", hybrid=True)
    assert f"--mtp-num-layers {given}" in error and f" has {predictions} " in error


@pytest.mark.parametrize(
    "more",
    ["/*-", "/*- --mtp-num-layers 1", " --mtp-num-layers 1 --mtp-hybrid-override-pattern *-"],
)
def test_a_hybrid_has_the_multi_token_prediction_of_its_patterns(more):
    assert parse(f"{HYBRID}{more}", hybrid=True).mtp_num_layers == 1


@pytest.mark.slow
def test_a_refusal_leaves_with_exit_code_2(start_script, tmp_path):
    script, output = tmp_path / "script.py", tmp_path / "output.txt"
    script.write_text(
        "from megatron_lowbit.errors import exit_on_user_error as end\n"
        "import megatron_lowbit.arguments as a; end(a.parse_arguments)"
    )
    process = start_script(script, "--nm-layers", "3", output=output)
    assert processes.finish([process], timeout=60) == [2]
    last = output.read_text().splitlines()[-1]
    assert last.startswith("error: unknown argument --nm-layers")


# -- files of arguments ----------------------------------------------------------------------------


def test_files_of_arguments_are_split_like_a_shell_command(tmp_path):
    inner, outer = tmp_path / "inner.args", tmp_path / "outer.args"
    inner.write_text("--split '99, 1, 0' # shares\n")
    outer.write_text(f"# a comment\n--lr 1e-3 \\\n  --bf16\n@{inner}\n")
    expected = ["--seed", "3", "--lr", "1e-3", "--bf16", "--split", "99, 1, 0"]
    assert expand_files(["--seed", "3", f"@{outer}"]) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("@{path}", "includes itself"),
        ("--split '9", "No closing quotation"),
    ],
)
def test_a_file_of_arguments_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "some.args"
    if text is not None:
        path.write_text(text.format(path=path))
    assert message in refusal(f"@{path}")


def test_presets_need_no_checkout(tmp_path, monkeypatch):
    """A file of the same name goes first; what is nearly a preset's name gets a hint."""
    monkeypatch.chdir(tmp_path)
    assert "--num-layers" in expand_files(["@examples/gpt-7m-cpu.args"])
    with pytest.raises(UserError, match=r"no such file; did you mean @examples/gpt-7m-cpu.args\?"):
        expand_files(["@examples/gpt-7m-gpu.args"])
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "gpt-7m-cpu.args").write_text("--bf16")
    assert expand_files(["@examples/gpt-7m-cpu.args"]) == ["--bf16"]


def test_given_arguments_can_be_replaced(parser):
    words = CommandLine(parser, ["--lr=-1", "--disable-bias-linear", "--data-path", "a", "b"])
    assert "--lr" in words and "--min-lr" not in words
    assert words.text("--data-path") == "--data-path a b"
    words.remove("--disable-bias-linear")
    words.add("--min-lr", "0")
    assert words.tokens() == ["--lr=-1", "--data-path", "a", "b", "--min-lr", "0"]


# -- a CPU -----------------------------------------------------------------------------------------


def adapted(parser, line: str) -> tuple[CommandLine, list[str]]:
    argv = shlex.split(line)
    words = CommandLine(parser, argv)
    return words, adapt_to_cpu(parser.parse_args(argv), words)


def test_tables_name_arguments_and_values_that_megatron_has(parser):
    for row in _UNSUPPORTED:
        choices = parser._option_string_actions[row.flag].choices
        names = [getattr(choice, "name", choice) for choice in choices or ()]
        assert not choices or set(row.values) <= set(names), row.flag
        parser.parse_args(list(row.instead))
    for argument in _ADDED:
        parser.parse_args(list(argument))


def test_what_a_cpu_cannot_do_is_replaced_or_left_out(parser):
    words, lines = adapted(parser, """
        --transformer-impl transformer_engine --distributed-backend nccl --attention-backend flash
        --cuda-graph-impl local --tp-comm-overlap --moe-permute-fusion --async-strategy nvrx
        --use-megatron-fsdp --ckpt-format fsdp_dtensor --fp16 --lr 1
        --async-save --use-persistent-ckpt-worker --grad-reduce-in-bf16
        --cross-entropy-loss-fusion --cross-entropy-fusion-impl liger
    """)  # fmt: skip
    args = parser.parse_args(words.tokens())
    assert (args.transformer_impl, args.distributed_backend) == ("local", "gloo")
    assert args.attention_backend == AttnBackend.auto and args.cuda_graph_impl == "none"
    assert (args.async_strategy, args.ckpt_format) == ("mcore", "torch_dist")
    assert args.use_distributed_optimizer and not args.use_megatron_fsdp
    assert not (args.tp_comm_overlap or args.moe_permute_fusion or args.fp16) and args.lr == 1
    replaced = "on a CPU: --transformer-impl local instead of transformer_engine: "
    assert any(line.startswith(replaced) for line in lines)
    # The writer of asynchronous saves would end, and the run wait for it forever.
    assert not (args.async_save or args.use_persistent_ckpt_worker)
    gradients = "on a CPU: ignored --grad-reduce-in-bf16: gradients are FP32 there"
    assert any(line.startswith(gradients) for line in lines) and not args.grad_reduce_in_bf16
    loss = "on a CPU: ignored --cross-entropy-fusion-impl liger: its fused kernel needs a GPU"
    assert loss in lines and not args.cross_entropy_loss_fusion
    assert args.cross_entropy_fusion_impl == "native"
    assert len(lines) == 16


def test_a_cpu_is_profiled_by_torch_only(parser):
    words, lines = adapted(parser, "--profile")
    assert "--profile" not in words and "Nsight Systems needs a GPU" in lines[0]
    assert "--profile" in adapted(parser, "--profile --use-pytorch-profiler")[0]


def test_what_a_cpu_can_do_stays(parser):
    line = "--attention-backend unfused --ckpt-format torch --moe-token-dispatcher-type alltoall"
    words, lines = adapted(parser, line)
    assert words.tokens()[: len(line.split())] == line.split()
    assert len(lines) == 1 and lines[0].startswith("on a CPU: added ")
    again = CommandLine(parser, words.tokens())
    assert adapt_to_cpu(parser.parse_args(words.tokens()), again) == []


def test_every_change_of_a_cpu_is_printed(parser):
    """A line names each argument of the tables, whatever value it has."""
    for row in _UNSUPPORTED:
        action = parser._option_string_actions[row.flag]
        if action.nargs == 0:
            given = []
        else:
            default = "1" if action.type in (int, float) else action.default or "attn"
            names = [getattr(choice, "name", choice) for choice in action.choices or [default]]
            (value, *_) = row.values or names
            given = value if isinstance(value, list) else [str(value)]
        _, lines = adapted(parser, shlex.join([row.flag, *given]))
        assert any(row.flag in line for line in lines if "added" not in line), row.flag
    _, lines = adapted(parser, "--lr 1")
    assert set(lines[-1].split()) > {flag for flag, *_ in _ADDED}


def test_every_argument_of_a_preset_is_read_by_megatron(parser):
    """By code other than its parsers, which hand on whatever they are given."""
    package = Path(argument_utils.__file__).parents[1]
    parsers = {"arguments.py", "yaml_arguments.py"}
    files = (file for file in package.rglob("*.py") if file.name not in parsers)
    read = set(re.findall(r"\.(\w+)\b", "\n".join(file.read_text() for file in files)))
    assert "openai_gelu" in {a.dest for a in parser._actions}
    for preset in command_line.shipped_presets():
        words = CommandLine(parser, expand_files([f"@{preset}"]))
        assert words.destinations() <= read, preset


@on_a_cpu
def test_a_cpu_has_one_method_of_scanning(capsys):
    args = parse("--disable-mamba-mem-eff-path --mamba-training-ssm-states-dtype bf16")
    assert args.use_mamba_mem_eff_path and args.mamba_training_ssm_states_dtype is None
    assert capsys.readouterr().out.count("torch's scan has one method, and states in FP32") == 2


# -- documents -------------------------------------------------------------------------------------


@on_a_cpu
def test_documents_get_masks_in_spite_of_a_preset_without_them(capsys):
    without = "--no-create-attention-mask-in-dataloader"
    assert not parse(without).create_attention_mask_in_dataloader
    unset_global_variables()
    assert parse(f"{without} --reset-attention-mask").create_attention_mask_in_dataloader
    out = capsys.readouterr().out
    assert f"--reset-attention-mask: ignored {without}, for documents need masks" in out


@on_a_cpu
@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--position-embedding-type rope --reset-position-ids", "--reset-position-ids: without"),
        ("--position-embedding-type learned_absolute --reset-position-ids", None),
        ("--eval-precision recipe", "--eval-precision recipe: without effect, nothing is"),
        ("--eval-precision recipe --precision-recipe bf16", None),
        ("--quantization-engine reference", "--quantization-engine reference: without effect"),
        ("--first-last-layers-bf16", "--first-last-layers-bf16: without effect"),
        ("--moe-router-topk 4", "--moe-router-topk: without effect, the model has no experts"),
        ("--activation-func-clamp-value 7", "--activation-func-clamp-value 7: without effect, the"),
        ("--squared-relu --glu-linear-offset 1", "--glu-linear-offset 1: without effect, the acti"),
        ("--quick-geglu --glu-linear-offset 1 --no-bias-gelu-fusion", None),
    ],
)
def test_arguments_without_effect_are_printed(line, shown, capsys):
    parse(line)
    out = capsys.readouterr().out
    assert ("without effect" in out) == (shown is not None) and (shown or "") in out


@pytest.mark.parametrize("flag", ["--activation-func-clamp-value", "--glu-linear-offset"])
def test_changes_of_swiglu_take_effect_on_a_gpu(flag, parser, capsys):
    """Megatron-LM's fused SwiGLU has no clamp, and it refuses an offset there."""
    unfused = "--no-bias-swiglu-fusion"
    args, words = read_command_line(parser, shlex.split(f"{TINY} --swiglu {flag} 1"))
    lines = _translate(args, words, Machine((9, 0), transformer_engine=True))
    assert words.tokens()[-1] == unfused and not args.bias_swiglu_fusion
    assert f"{flag}: added {unfused}, for Megatron-LM's kernel lacks it" in lines
    given = f"--swiglu {flag} 1 --dry-run"
    assert not parse(given).bias_swiglu_fusion_on_gpus
    assert f"added {unfused}, for" in capsys.readouterr().out


# -- help ------------------------------------------------------------------------------------------


def test_help_lists_all_arguments(parser, capsys):
    with pytest.raises(SystemExit) as ended:
        command_line.print_help(parser)
    shown = capsys.readouterr().out
    assert not ended.value.code
    flags = ("--dry-run", "--precision-recipe", "--print-completion", "--num-layers N  ")
    places = [shown.index(flag) for flag in flags]
    assert places == sorted(places)
    upstream = add_megatron_arguments(command_line.CommandParser())
    hidden = argparse.SUPPRESS
    for action in upstream._actions:
        assert action.help == hidden or action.option_strings[0] in shown
    assert f"usage: {os.path.basename(sys.argv[0])} [@FILE" in shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts(shell, capsys):
    with pytest.raises(SystemExit):
        arguments.parse_arguments(["--print-completion", shell])
    shown = capsys.readouterr().out
    assert "precision-recipe" in shown and "num-layers" in shown


def test_a_second_parser_reads_no_source_code(monkeypatch):
    """Megatron-LM reads the help of its arguments from source code."""
    help_text = arguments.front_parser().format_help()
    assert "Number of transformer layers in a transformer block." in " ".join(help_text.split())
    monkeypatch.setattr(argument_utils.inspect, "getsource", None)
    assert arguments.front_parser().format_help() == help_text


def test_what_the_rotary_fusion_lacks_names_its_argument():
    """The error occurs for local layers on a GPU without Transformer Engine."""
    fields = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    with pytest.raises(ValueError) as refused:
        TransformerConfig(**fields, apply_rope_fusion=True)
    assert in_one_line(refused.value).endswith(
        "Please install TE >= 1.4. Or give --no-rope-fusion."
    )


def test_a_check_of_several_lines_without_a_message_is_named():
    """Its first line, or another one, says nothing."""
    args = argparse.Namespace(lr=None, min_lr=None)
    with pytest.raises(AssertionError) as refused:
        _check_in_several_lines(args)
    refused.value.args = ()  # which pytest has rewritten
    assert in_one_line(refused.value) == "Megatron-LM requires --lr is None and --min-lr"


def _check_in_several_lines(args):
    # fmt: off
    assert (
        args.lr is None
        and args.min_lr is
        not None
    )
    # fmt: on
