"""Arguments that nothing reads in a run are printed; those that something reads are not."""

import re
import shlex
from argparse import ArgumentParser
from pathlib import Path

import pytest

import megatron_lowbit.megatron  # before megatron

# isort: split
import megatron.core
from megatron.training.arguments import add_megatron_arguments

from megatron_lowbit.arguments import front_parser
from megatron_lowbit.arguments.idle import idle_arguments
from megatron_lowbit.arguments.parse import _REFUSED
from megatron_lowbit.arguments.parser import read_command_line

PARSER = front_parser()
HYBRID = "--hybrid-layer-pattern M*-E"
EXPERTS = "--num-experts 4"

ROWS = [
    # Arguments, and others with which they have an effect.
    ("--rotary-base 500 --rotary-percent 0.5 --no-rope-freq 2", "--position-embedding-type rope"),
    ("--rotary-base 500", "--multi-latent-attention"),
    ("--use-rope-scaling", "--use-rotary-position-embeddings"),
    ("--rope-scaling-factor 2", "--use-rope-scaling --position-embedding-type rope"),
    ("--rotary-scaling-factor 4 --mscale 2", "--position-embedding-type yarn"),
    ("--mscale 2", "--multi-latent-attention"),
    ("--window-attn-skip-freq 2", "--window-size 8,0"),
    ("--num-query-groups 2", "--group-query-attention"),
    ("--kv-lora-rank 8 --v-head-dim 8", "--multi-latent-attention"),
    ("--qk-clip-threshold 5", "--qk-clip"),
    ("--mup-embedding-mult 2 --mup-output-mult 2", "--use-mup"),
    ("--mtp-loss-scaling-factor 1", "--mtp-num-layers 1"),
    ("--mtp-detach-heads", "--hybrid-layer-pattern *-/*-"),
    ("--mamba-state-dim 8", HYBRID),
    ("--linear-key-head-dim 8", "--experimental-attention-variant gated_delta_net"),
    ("--dsa-indexer-topk 8", "--experimental-attention-variant dsa"),
    ("--sgd-momentum 0.5", "--optimizer sgd"),
    ("--muon-momentum 0.5", "--optimizer muon"),
    ("--lion-beta1 0.5", "--optimizer lion"),
    ("--lion-beta1 0.5", "--optimizer muon --muon-scalar-optimizer lion"),
    ("--lr-wsd-decay-iters 5", "--lr-decay-style WSD"),
    ("--lr-warmup-init 0.1", "--lr-warmup-iters 5"),
    ("--decoupled-min-lr 0.1", "--decoupled-lr 0.2"),
    ("--fim-rate 0.1 --fim-eod-token x", "--fim-data"),
    ("--use-pytorch-profiler --profile-step-end 20", "--profile --tensorboard-dir board"),
    ("--pytorch-profiler-collect-shapes", "--profile --use-pytorch-profiler --tensorboard-dir b"),
    ("--moe-router-topk 1", EXPERTS),
    (f"{EXPERTS} --moe-shared-expert-gate", "--moe-shared-expert-intermediate-size 8"),
    (f"{EXPERTS} --moe-token-drop-policy position", "--moe-expert-capacity-factor 1"),
    (f"{EXPERTS} --moe-router-quantile-balancing-ema 0.5",
     "--moe-router-load-balancing-type quantile_balancing"),
    (f"{EXPERTS} --moe-router-num-groups 2", "--moe-router-group-topk 1"),
    (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss", "--moe-aux-loss-coeff 0.1"),
    (f"{EXPERTS} --moe-upcycling-granularity 2", "--moe-use-upcycling"),
]  # fmt: skip
ALWAYS = [
    ("--optimizer sgd", "--adam-beta1 0.5"),
    ("--multi-latent-attention", "--add-qkv-bias"),
    ("--swiglu", "--openai-gelu"),
    ("--squared-relu", "--openai-gelu"),
    (f"{EXPERTS} --moe-router-load-balancing-type none", "--moe-aux-loss-coeff 0.1"),
    (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "--moe-router-topk-scaling-factor 3"),
    (f"{EXPERTS} --moe-router-score-function sigmoid", "--moe-router-pre-softmax"),
    (f"{EXPERTS} {HYBRID}", "--moe-layer-freq 2"),
    ("--hybrid-layer-pattern M*-", EXPERTS),
    ("--skip-train", "--profile"),
    ("", "--mask-prob 0.5"),
    ("", "--rl-generation-lag 2"),
    ("", "--per-dataset-sequences-path counts.json"),
]

TRANSLATED = ("encoder_num_layers", "encoder_seq_length", "no_weight_decay_cond_type", "batch_size",
              "recompute_activations", "num_virtual_stages_per_pipeline_rank")  # fmt: skip
"""Attributes that Megatron-LM's validation refuses, or writes into others."""


def lines(line):
    return list(idle_arguments(*read_command_line(PARSER, shlex.split(line))))


@pytest.mark.parametrize(("idle", "enabled"), ROWS)
def test_an_argument_without_the_part_that_it_is_of(idle, enabled):
    flags = [word for word in idle.removeprefix(EXPERTS).split() if word.startswith("--")]
    (line,) = lines(idle)
    assert line.startswith(f"{', '.join(flags)}: without effect, "), line
    assert lines(f"{idle} {enabled}") == []


@pytest.mark.parametrize(("model", "idle"), ALWAYS)
def test_an_argument_that_a_part_does_not_have(model, idle):
    (line,) = lines(f"{model} {idle}")
    assert line.startswith(f"{idle.split()[0]}: without effect, "), line
    assert lines(model) == []


def test_arguments_that_no_code_of_megatron_lm_reads():
    """An attribute that only its parser names has a line, or is refused or turned into another."""
    elsewhere = "training/(arguments|yaml_arguments|inprocess_restart|config/.*)|core/(inference|"
    elsewhere += "export|models/(T5|bert|vision|multimodal|mimo)|datasets/retro)/.*"
    sources = Path(megatron.core.__file__).parents[1]
    files = [*sources.rglob("*.py"), *Path(megatron_lowbit.__file__).parent.rglob("*.py")]
    files = [file for file in files if not re.search(rf"({elsewhere})\.py$", str(file))]
    read = {word for file in files for word in re.findall(r"""[."'](\w+)""", file.read_text())}
    actions = add_megatron_arguments(ArgumentParser(allow_abbrev=False))._actions
    unread = [action for action in actions if action.dest not in read]
    for action in unread:
        flag = action.option_strings[0]
        if action.dest.endswith("_deprecated") or {action.dest, flag} & {*TRANSLATED, *_REFUSED}:
            continue
        value = [] if action.nargs == 0 else [str((action.choices or "1")[0])]
        (line,) = idle_arguments(*read_command_line(PARSER, [flag, *value]))
        assert line.startswith(f"{flag}: without effect, ")
    assert len(unread) > 100


def test_presets_have_no_idle_arguments():
    from megatron_lowbit.command_line import shipped_presets

    for name in shipped_presets():
        assert lines(f"@{name}") == [], name
