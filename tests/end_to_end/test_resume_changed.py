"""Runs that resume with another recipe, other data or another learning rate."""

import dataclasses
import inspect
import re
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_run import ONE_MICROBATCH, ROOT, done, metrics, refused, start_from

from megatron_lowbit.arguments import front_parser
from megatron_lowbit.checkpoints.model_arguments import _YARN
from megatron_lowbit.command_line import CommandLine
from megatron_lowbit.data.dataset import dataset_digest
from megatron_lowbit.data.preprocess import preprocess
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run.common_state import read_common_state
from megatron_lowbit.megatron.run.records import (
    _NEGATED,
    _UNGIVEN,
    OF_THE_MODEL,
    _digest_of_tokenizer,
    changes,
    check_loaded,
)
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.record import recipe_from, record_of

# isort: split
from megatron.core.transformer import MLATransformerConfig
from megatron.training import argument_utils

from tests.marks import by_turns, others_slow

SAVED = 1
OTHER = {"recipe": "another recipe", "data": "other data", "model": "another model"}
SAMPLES = {
    "blend_record": ("--data-path", "0.5 a 0.5 b"),
    "seed": ("--seed", 99),
    "split": ("--split", "50,50,0"),
    "seq_length": ("--seq-length", 128),
    "pad_documents_to_multiple_of": ("--pad-documents-to-multiple-of", 4),
    "sft": ("--sft", True),
    "dataloader_type": ("--dataloader-type", "cyclic"),
    "fim_data": ("--fim-data", True),
    "fim_rate": ("--fim-rate", 0.25),
    "fim_spm_rate": ("--fim-spm-rate", 0.25),
    "fim_split_sample": ("--fim-split-sample", 7),
    "fim_fragment_rate": ("--fim-fragment-rate", 0.25),
    "fim_no_prefix": ("--fim-no-prefix", "secret"),
    "tokenizer_record": ("--tokenizer-model or --chat-template", "digest"),
}
"""Arguments that choose samples of the same data sets, and other values of them."""
RUN = ("--num-layers", 1, *ONE_MICROBATCH)
RECIPE = "mine.yaml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with the recipe of all runs."""
    folder = tmp_path_factory.mktemp("recipe")
    shutil.copy(ROOT / "recipes" / "nvfp4.yaml", folder / RECIPE)
    return folder


@pytest.fixture
def start(memory, pretrain_here, folder) -> Path:
    """Checkpoint of one iteration."""
    if "start" not in memory:
        memory["start"] = folder / "start"
        recipe = ("--precision-recipe", folder / RECIPE, "--recipe-set", "bf16_blocks=none")
        done(pretrain_here(*RUN, *recipe, "--train-iters", SAVED, "--save", memory["start"]))
    return memory["start"] / "iter_0000001"


@pytest.fixture
def resumed(start, corpus, folder, monkeypatch) -> Namespace:
    """Arguments of a run that resumes from it, with nothing changed."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda found, own: found.__setitem__(0, own)
    )
    saved = read_common_state(start)["args"]
    return Namespace(
        load=str(start.parent),
        ckpt_step=None,
        pretrained_checkpoint=None,
        non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None,
        finetune=False,
        skip_train=False,
        no_load_optim=False,
        optimizer="adam",
        use_distributed_optimizer=False,
        phase_transition_iterations=None,
        resume_changed=[],
        recipe_record=record_of([str(folder / RECIPE)], ["bf16_blocks=none"]),
        data_record={"elsewhere": dataset_digest(str(corpus / "data"))},
        **{name: getattr(saved, name) for name in (*SAMPLES, *OF_THE_MODEL)},
    )


def test_a_checkpoint_has_the_text_of_its_recipe_and_the_digest_of_its_data(start, corpus):
    args = read_common_state(start)["args"]
    expected = load_recipe("nvfp4", ["bf16_blocks=none"])
    assert recipe_from(args.recipe_record, "the checkpoint") == expected
    prefix = str(corpus / "data")
    assert args.data_record == {prefix: dataset_digest(prefix)}
    assert args.blend_record == dataset_digest(prefix)[:12]


def test_nothing_is_said_without_a_difference(resumed, start, capsys):
    check_loaded(resumed)
    assert capsys.readouterr().out == ""


CHANGES = {
    "recipe": (
        {"recipe_record": record_of(["nvfp4"], ["bf16_blocks=none", "grad.rounding=nearest"])},
        "recipe nvfp4 with configs.nvfp4.grad.rounding nearest instead of stochastic",
    ),
    "data": ({"data_record": {}}, "mock data instead of "),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_difference_is_refused_unless_it_is_asked_for(resumed, start, capsys, kind):
    change, text = CHANGES[kind]
    vars(resumed).update(change)
    message = f"^{start}: saved by a run with {OTHER[kind]}: this one has {text}.*; --resume-"
    with pytest.raises(UserError, match=f"{message}changed {kind} resumes with it$"):
        check_loaded(resumed)
    resumed.resume_changed = [kind]
    check_loaded(resumed)
    assert capsys.readouterr().out.startswith(f"resumed with {OTHER[kind]}: {text}")


@pytest.mark.parametrize("name", SAMPLES)
def test_other_samples_of_the_same_data_are_other_data(resumed, name):
    refused_but_for("data", resumed, name, *SAMPLES[name])


@pytest.mark.parametrize(
    ("name", "begins"),
    by_turns(
        [name for name in OF_THE_MODEL if not name.startswith("yarn_")],
        ["goes on", "finetune", "skip_train", "pretrained"],
    ),
)
def test_weights_of_a_model_that_computes_something_else_are_refused(resumed, name, begins):
    """The shapes of the tensors are the same."""
    setattr(resumed, begins, True)
    if begins == "pretrained":
        resumed.load, resumed.pretrained_checkpoint = None, resumed.load
    refused_but_for("model", resumed, name, OF_THE_MODEL[name], "other")


SHAPES = re.compile(
    "hidden_size|ffn_hidden_size|num_attention_heads|num_query_groups|kv_channels|.*_head_dim"
    "|.*_lora_rank|moe_ffn_hidden_size|linear_(conv|key|value|num)_.*|dsa_indexer_n_heads|mamba_.*"
    "|is_hybrid_model|mtp_hybrid_.*"
)
"""Fields of a configuration that tensors of another shape, or Megatron-LM's own check, tell."""
SAME_MODEL = re.compile(
    ".*(parallel|fusion|fused|recompute|offload|overlap|dispatch|hybridep|deepep|ncclep|grouped|kitchen"
    "|init|_loss|account_for_|dropout|bf16|fp16|backend|dtype|fp8|fp4|fp32|cuda_graph|comm_|padding|prefill).*"
    "|inference_.*|moe_paged.*|qk_clip.*|log_.*|.*_logging|flash_.*|use_.*|mtp_(standalone|detach_heads)"
    "|moe_router_(load_balancing_type|bias_update_rate|quantile_.*|force_.*)|moe_enable_routing_replay"
    "|moe_input_jitter_eps|moe_pad_.*|moe_expert_rank_.*|max_seqlen_.*|deterministic_mode|delay_wgrad.*"
    "|wgrad_deferral.*|defer_.*|microbatch_group_.*|barrier_.*|test_mode|apply_.*|distribute_.*"
    "|high_priority_.*|cp_comm_type|clone_scatter.*|config_logger_dir|batch_invariant_mode"
    "|symmetric_ar_type|mlp_chunks_.*|transformer_impl|cache_mla_latents|mamba_.*"
)
"""Fields that change the way to the same numbers, their rounding, the loss or the optimizer."""


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", "sgd"), ("use_distributed_optimizer", True)]
)
def test_the_state_of_another_optimizer_is_refused(resumed, name, value):
    changed = Namespace(**vars(resumed) | {name: value})
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(UserError, match=f"this run has {flag} {value} instead of .*no-load-optim"):
        check_loaded(changed)
    changed.no_load_optim = True
    check_loaded(changed)


def test_every_field_of_a_configuration_is_compared_or_known_to_change_no_model():
    arguments = {action.dest for action in front_parser()._actions}
    fields = {field.name for field in dataclasses.fields(MLATransformerConfig)} & arguments
    known = {name for name in fields if SHAPES.fullmatch(name) or SAME_MODEL.fullmatch(name)}
    assert len(fields) > 200 and fields - known - {*OF_THE_MODEL} == set()


OTHERWISE_KNOWN = {
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "seed", "profile",
    "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng", "no_persist_layer_norm",
    "group_query_attention", "num_experts", "hybrid_layer_pattern", "max_position_embeddings",
    "padded_vocab_size", "vocab_size", "make_vocab_size_divisible_by",
    "heterogeneous_layers_config_path", "te_precision_config_file", "spec", "yaml_cfg",
}  # fmt: skip
"""Arguments of the layout, of what is loaded, of shapes and names of tensors, and refused ones."""


def test_arguments_that_megatron_lm_reads_for_a_model_are_compared_or_known():
    """Also those that are no field of a configuration, such as YaRN's."""
    names = set(re.findall(r"\bargs\.(\w+)", inspect.getsource(argument_utils)))
    known = {name for name in names if SHAPES.fullmatch(name) or SAME_MODEL.fullmatch(name)}
    assert len(names) > 50 and names - known - {*OF_THE_MODEL} == OTHERWISE_KNOWN


def test_values_that_megatron_lm_puts_in_the_place_of_none_are_no_difference():
    yarn = {name: value for name, value in _YARN.items() if name.startswith("yarn_")}
    assert {"rope_type": "yarn", **yarn} == _UNGIVEN
    names = {name: OF_THE_MODEL[name] for name in _UNGIVEN}
    given, unset = (
        Namespace(position_embedding_type="yarn", **values)
        for values in (_UNGIVEN, dict.fromkeys(_UNGIVEN))
    )
    assert changes(given, unset, names) == changes(unset, given, names) == ""
    for name, value in (("yarn_beta_fast", 16.0), ("yarn_correction_range_round_to_int", False)):
        other = Namespace(**vars(given) | {name: value})
        change = f"{OF_THE_MODEL[name]} {value} instead of {_UNGIVEN[name]}"
        assert changes(other, unset, names) == change
        other.position_embedding_type = "rope"
        assert changes(other, unset, names) == ""


def test_errors_name_the_arguments_of_samples_and_models():
    line = CommandLine(front_parser(), [])
    flags = {name: flag for name, (flag, _) in SAMPLES.items() if "record" not in name}
    for name, flag in (flags | OF_THE_MODEL).items():
        assert line.destination(flag) == name


def refused_but_for(kind: str, args: Namespace, name: str, flag: str, value: object) -> None:
    """Check that a run is refused with another argument, except with ``--resume-changed``."""
    before = getattr(args, name)
    values = (value, _UNGIVEN.get(name, before) if before is None else before)
    shown = [not each for each in values] if name in _NEGATED else values
    change = re.escape("{} {} instead of {}".format(flag, *shown))
    setattr(args, name, value)
    error = f"{OTHER[kind]}: this one has {change}; --resume-changed {kind} resumes with it$"
    with pytest.raises(UserError, match=error):
        check_loaded(args)
    args.resume_changed = [kind]
    check_loaded(args)


def test_a_phase_begins_with_its_own_data(resumed):
    """The recipe is another matter, and so is any other iteration."""
    resumed.data_record, resumed.phase_transition_iterations = {}, [SAVED, 9]
    check_loaded(resumed)
    resumed.phase_transition_iterations = [9]
    with pytest.raises(UserError, match="other data"):
        check_loaded(resumed)


@pytest.mark.parametrize("name", ["finetune", "skip_train"])
def test_a_run_that_does_not_resume_training_may_differ(resumed, start, name):
    vars(resumed).update({name: True, "data_record": {}})
    check_loaded(resumed)


def test_an_older_checkpoint_is_loaded_and_said(resumed, start, capsys, monkeypatch):
    monkeypatch.setattr("megatron_lowbit.megatron.run.records.saved_args", lambda _: Namespace())
    check_loaded(resumed)
    expected = f"{start}: records no recipe and data to compare with this run's\n"
    assert capsys.readouterr().out == expected


def test_edited_data_and_recipes_are_noticed(start, pretrain_here, corpus, folder, tmp_path):
    """The data has the same path and size."""
    shutil.copytree(corpus, tmp_path / "data")
    text = tmp_path / "text.txt"
    text.write_text("other words " * 3000)
    run = partial(pretrain_here, *RUN, "--train-iters", 2, "--recipe-set", "bf16_blocks=none")
    same = ("--precision-recipe", folder / RECIPE)
    load = ("--load", start.parent)
    (tmp_path / RECIPE).write_text((folder / RECIPE).read_text().replace("stochastic", "nearest"))
    error = refused(run(*load, "--precision-recipe", tmp_path / RECIPE))
    assert "grad.rounding nearest instead of stochastic; --resume-changed recipe" in error
    preprocess([text], str(corpus / "tokenizer"), str(tmp_path / "data" / "data"))
    prefix = tmp_path / "data" / "data"
    error = refused(run(*load, *same, "--data-path", prefix))
    assert f"other data: this one has {prefix} (SHA-256 " in error
    twice = ("--data-path", 0.3, corpus / "data", 0.7, corpus / "data")
    assert "other data: this one has --data-path 0.3 " in refused(run(*load, *same, *twice))
    save = start_from(start.parent, SAVED, tmp_path / "save")
    changed = ("--data-path", prefix, "--resume-changed", "data")
    done(run("--load", save, "--save", save, *same, *changed))
    assert [step["iteration"] for step in metrics(save)] == [2]


def test_a_checkpoint_of_format_torch_is_compared_too(pretrain_here, tmp_path):
    run = partial(pretrain_here, *RUN, "--ckpt-format", "torch", "--save", tmp_path)
    done(run("--train-iters", 1))
    error = refused(run("--train-iters", 2, "--load", tmp_path, "--seed", 77))
    assert "other data: this one has --seed 77 instead of 1234; --resume-changed data" in error
    error = refused(run("--train-iters", 2, "--load", tmp_path, "--rotary-base", 500))
    assert "another model: this one has --rotary-base 500 instead of 10000;" in error


@pytest.mark.parametrize("change", ["tokenizer", "template", "format"])
def test_conversations_are_other_data_with_another_tokenizer_or_template(tmp_path, change):
    (tmp_path / "tokenizer.json").write_text("{}")
    args = Namespace(
        tokenizer_model=str(tmp_path), chat_template="a", sft_tokenizer_prompt_format="default"
    )
    before = _digest_of_tokenizer(args)
    assert _digest_of_tokenizer(args) == before
    if change == "tokenizer":
        (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    args.chat_template = "b" if change == "template" else "a"
    args.sft_tokenizer_prompt_format = "nemotron" if change == "format" else "default"
    assert _digest_of_tokenizer(args) != before


OPTIMIZERS = {
    "plain": (),
    "distributed": ("--use-distributed-optimizer",),
    "decoupled": ("--decoupled-lr", 4e-3),
}


@pytest.mark.parametrize("optimizer", others_slow(OPTIMIZERS, ("plain", "distributed")))
def test_a_run_goes_on_with_another_learning_rate(pretrain_here, tmp_path, optimizer):
    """The scheduler's formula gives the rates that are logged."""
    run = (*RUN, *OPTIMIZERS[optimizer], "--save", tmp_path, "--lr-decay-style", "linear")
    done(pretrain_here(*run, "--train-iters", SAVED))
    other = ("--lr", 2e-3, "--min-lr", 1e-3, "--lr-decay-iters", 10)
    if optimizer == "decoupled":
        other += ("--decoupled-lr", 3e-3, "--decoupled-min-lr", 1e-3)
    done(pretrain_here(*run, "--train-iters", 3, "--load", tmp_path, *other))
    rates = {step["iteration"]: step["learning_rate"] for step in metrics(tmp_path)}
    # The rate of an iteration is that after the iterations before it.
    assert [rates[2], rates[3]] == pytest.approx([1.8e-3, 1.7e-3])
