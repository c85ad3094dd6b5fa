"""Tiny random models of transformers': there and back identical, the same logits between."""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import EPS, LLAMA3, MODELS, SIZES, TOKENS, llama_model, save, weights

from megatron_lowbit.checkpoints.model_arguments import model_of
from megatron_lowbit.checkpoints.reader import CheckpointReader
from megatron_lowbit.conversion.convert import COMPANIONS, to_hugging_face, to_megatron
from megatron_lowbit.conversion.families import FAMILIES, family_of
from megatron_lowbit.errors import UserError
from tests.short_runs import fork_results_queue

CASES = [
    ("llama", 2, 1, 1), ("llama", 1, 2, 1), ("llama", 2, 2, 1),
    ("tied llama", 1, 1, 1), ("tied llama", 1, 2, 1), ("mixtral", 2, 1, 1),
    ("gpt-2", 1, 1, 1), ("gpt-2", 2, 1, 1), ("gpt-2", 1, 2, 1),
    ("nemotron-h", 1, 1, 1), ("nemotron-h", 2, 1, 1), ("nemotron-h", 1, 2, 1),
    ("qwen3", 2, 1, 1), ("qwen3-moe", 1, 2, 1), ("qwen3-moe", 2, 1, 1),
    ("uniform qwen3-moe", 2, 1, 1),
    ("deepseek-v3", 1, 1, 1), ("deepseek-v3", 1, 2, 1), ("uniform deepseek-v3", 1, 2, 1),
    ("mixtral", 1, 1, 2), ("uniform qwen3-moe", 1, 1, 4), ("deepseek-v3", 1, 1, 2),
    ("gpt-oss", 1, 1, 1), ("gpt-oss", 2, 1, 1), ("gpt-oss", 1, 2, 1), ("gpt-oss", 1, 1, 2),
    ("gemma-3", 1, 1, 1), ("gemma-3", 2, 1, 1), ("gemma-3", 1, 2, 1),
]  # fmt: skip
"""Models over numbers of tensor-, pipeline- and expert-parallel ranks."""
# Those of four ranks, which combine or double what two have, are not in make test.
EACH = [
    pytest.param(*case, marks=[pytest.mark.slow] * (math.prod(case[1:]) == 4)) for case in CASES
]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Folders that transformers saved, in several files."""
    folders = {}
    for name in MODELS:
        folder = folders[name] = tmp_path_factory.mktemp("source")
        save(name, folder, max_shard_size="20KB")
        (folder / "tokenizer.json").write_text("{}")
    return folders


@pytest.fixture(scope="module")
def logits(sources, run_ranks, tmp_path_factory) -> Callable[[int], Path]:
    """Function that returns a folder with this project's logits of a number of ranks' cases."""
    folder = tmp_path_factory.mktemp("logits")
    for name, source in sources.items():
        to_megatron(source, folder / name)

    @cache
    def run(ranks: int) -> Path:
        run_ranks(__file__, ranks, folder, timeout=200)
        return folder

    return run


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A Llama alone, in one file."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    llama_model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(name, sources, tmp_path):
    """Tensors, tokenizer, and the entries of config.json that the model says nothing of."""
    source, there, back = sources[name], tmp_path / "there", tmp_path / "back"
    to_megatron(source, there)
    to_hugging_face(there, back, shard_bytes=20_000)
    before, after = weights(source), weights(back)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert len(list(back.glob("*.safetensors"))) > 1
    assert (back / "tokenizer.json").read_text() == "{}"
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    assert {key: now.get(key) for key in SIZES} == {key: was.get(key) for key in SIZES}
    assert now["initializer_range"] == 0.3
    family = FAMILIES[now["architectures"][0]]
    assert family.from_config(now)._replace(config=was) == family.from_config(was)


@pytest.mark.parametrize(("name", "tensor", "pipeline", "expert"), EACH)
def test_the_same_logits(name, tensor, pipeline, expert, sources, logits):
    """Return the logits of transformers and of this project's model, in FP32."""
    expected = torch.load(sources[name] / "logits.pt")
    folder = logits(tensor * pipeline * expert)
    seen = torch.load(folder / f"{name} {tensor} {pipeline} {expert}.pt")
    assert (seen - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline", "expert"), [case for case in EACH if case.values[-1] > 1]
)
def test_experts_of_several_ranks_are_saved_as_of_one(name, tensor, pipeline, expert, logits):
    folder = logits(expert)
    saved = CheckpointReader(folder / f"{name} {expert} saved")
    converted = CheckpointReader(folder / name / "iter_0000000")
    experts = [key for key in saved.model if ".experts." in key]
    assert len(experts) >= 2
    for key, entry in saved.model.items():
        parts = (reader.read_part(key, [0] * len(entry.size), entry.size)
                 for reader in (saved, converted))  # fmt: skip
        assert torch.equal(*parts), key


def test_what_does_not_fit_is_refused(llama, tmp_path):
    """Each in one line, and nothing is left."""
    config = json.loads((llama / "config.json").read_text())
    broken = tmp_path / "broken"
    for change, named in (
        (
            {"architectures": ["NoSuch"]},
            "architecture NoSuch is not one of NemotronHForCausalLM, DeepseekV3",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "needs the entry 'n_embd'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
        ({"num_hidden_layers": 5}, r"no tensor model\.layers\.4"),
        ({"num_hidden_layers": 3}, r"tensor model\.layers\.3.* has no place"),
        ({"intermediate_size": 40}, "48 rows; config.json says 40"),
        ({"quantization_config": {}}, "quant_method None is not one of"),
    ):
        broken.mkdir()
        save_file(weights(llama), broken / "model.safetensors")
        (broken / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UserError, match=named):
            to_megatron(broken, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["broken"]
        for file in broken.iterdir():
            file.unlink()
        broken.rmdir()


def test_experts_under_both_kinds_of_layers(sources, tmp_path):
    """Transformer Engine's layers have another name for the norm, and states of their norms."""
    to_megatron(sources["mixtral"], tmp_path / "there")
    tensors = CheckpointReader(tmp_path / "there" / "iter_0000000")
    local, theirs = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    rules = FAMILIES["MixtralForCausalLM"].rules(model_of(tensors.args, 100))
    target = next(rule.target for rule in rules if rule.target.key.endswith(local))
    first = tensors.read(target)
    del tensors.model[target.key]
    tensors.check(rule.target for rule in rules)
    assert torch.equal(tensors.read(target), first)
    assert f"decoder.layers.{theirs}" in tensors.model
    for state in ("final_layernorm._extra_state/shard_0_1",
                  "layers.pre_mlp_layernorm._extra_state/shard_3_4",
                  "layers.mlp.experts.experts.linear_fc2._extra_state/shard_3.1_4.4"):  # fmt: skip
        assert f"decoder.{state}" in tensors.objects


def test_old_names_of_gpt2(sources, tmp_path):
    """Without their first part, and beside them the masks of attention."""
    new, old = sources["gpt-2"], tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((new / "config.json").read_text())
    tensors = {name.removeprefix("transformer."): part for name, part in weights(new).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, old / "model.safetensors")
    to_megatron(old, tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert all(torch.equal(back[f"transformer.{name}"], part) for name, part in tensors.items())


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("gpt-2", {"activation_function": "relu"}, "activation_function 'relu'.*'gelu_new'"),
        ("gpt-2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("nemotron-h", {"layers_block_type": ["moe"]}, "'moe'.*linear_attention, full_attention"),
        ("nemotron-h", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06.*1e-05"),
        ("nemotron-h", {"mlp_bias": True}, "mlp_bias True"),
        ("nemotron-h", {"conv_kernel": 3}, "conv_kernel 3.*4"),
    ],
)
def test_a_config_that_does_not_fit(name, change, named, sources):
    config = json.loads((sources[name] / "config.json").read_text())
    with pytest.raises(UserError, match=named):
        FAMILIES[config["architectures"][0]].from_config(config | change)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("llama", {"swiglu": False}, "swiglu False; a Llama has True"),
        ("gpt-2", {"normalization": "RMSNorm"}, "normalization 'RMSNorm'; a GPT-2 has 'LayerNorm'"),
        ("nemotron-h", {"squared_relu": False}, "squared_relu False; a Nemotron-H has True"),
        ("nemotron-h", {"layernorm_epsilon": EPS}, "layernorm_epsilon 3e-06.*1e-05"),
    ],
)
def test_a_model_that_does_not_fit(name, change, named, sources):
    config = json.loads((sources[name] / "config.json").read_text())
    model = FAMILIES[config["architectures"][0]].from_config(config).model | change
    family = family_of(model)
    with pytest.raises(UserError, match=named):
        family.to_config(model)


def test_mamba_heads_by_default(sources):
    """Twice the hidden size over the head dimension: 8, as the test's model has."""
    family = FAMILIES["NemotronHForCausalLM"]
    config = json.loads((sources["nemotron-h"] / "config.json").read_text())
    model = family.from_config(config).model
    silent = model | {"mamba_num_heads": None}
    assert family.rules(silent) == family.rules(model)
    assert family.to_config(silent) == family.to_config(model)


def test_every_tensor_keeps_its_dtype(sources, tmp_path):
    """BF16 hybrids have parameters in FP32; --dtype asks for one of all."""
    source, there = tmp_path / "source", tmp_path / "there"
    source.mkdir()
    (source / "config.json").write_text((sources["nemotron-h"] / "config.json").read_text())
    tensors = {
        name: part if name.endswith(("A_log", ".D")) else part.bfloat16()
        for name, part in weights(sources["nemotron-h"]).items()
    }
    save_file(tensors, source / "model.safetensors")
    to_megatron(source, there)
    for dtype, asked in ((None, None), ("float16", torch.float16)):
        back = tmp_path / f"back {dtype}"
        to_hugging_face(there, back, dtype)
        found = weights(back)
        assert all(
            torch.equal(found[name], part.to(asked or part.dtype)) for name, part in tensors.items()
        )
        config = json.loads((back / "config.json").read_text())
        assert config["torch_dtype"] == (dtype or "bfloat16")
        assert "dtype" not in config


@pytest.mark.parametrize("name", ["gpt-2", "nemotron-h", "gpt-oss", "gemma-3"])
def test_transformers_loads_it(name, sources, tmp_path):
    """The folder that was converted there and back. A Llama's frequencies are as said above."""
    from transformers import AutoModelForCausalLM

    to_megatron(sources[name], tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    expected = torch.load(sources[name] / "logits.pt")
    assert torch.equal(model(TOKENS).logits, expected)


def test_nothing_is_overwritten(llama, tmp_path):
    to_megatron(llama, tmp_path / "out")
    with pytest.raises(UserError, match="out exists; --force replaces it"):
        to_megatron(llama, tmp_path / "out")
    to_megatron(llama, tmp_path / "out", force=True)
    assert (tmp_path / "out" / COMPANIONS / "config.json").is_file()


def worker(folder: Path) -> None:
    """Save the logits of every case for as many ranks as there are."""
    fork_results_queue()
    for name, *sizes in CASES:
        if math.prod(sizes) == int(os.environ["WORLD_SIZE"]):
            logits = converted_logits(folder / name, *sizes)
            if logits is not None:
                torch.save(logits, folder / f"{name} {' '.join(map(str, sizes))}.pt")


def save_model(model: torch.nn.Module, folder: Path) -> None:
    """Save a model as Megatron-LM does, each rank its own experts."""
    from megatron.core import dist_checkpointing, parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    folder.mkdir(exist_ok=True)
    torch.distributed.barrier()
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(folder))


def converted_logits(
    checkpoint: Path, tensor: int, pipeline: int, expert: int
) -> torch.Tensor | None:
    """Compute a checkpoint's logits over so many ranks: whole, on the last of them."""
    from megatron.core import parallel_state

    from megatron_lowbit.conversion.megatron_model import loaded_model

    arguments = [
        f"@{checkpoint}/model.args", "--seq-length", "20",
        "--tensor-model-parallel-size", str(tensor),
        "--pipeline-model-parallel-size", str(pipeline),
        "--expert-model-parallel-size", str(expert),
        *(["--sequence-parallel"] if tensor > 1 else []),
    ]  # fmt: skip
    with loaded_model(checkpoint, arguments) as model, torch.no_grad():
        if not parallel_state.is_pipeline_first_stage():
            hidden = torch.empty(20 // tensor, 2, model.config.hidden_size)
            torch.distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(hidden)
        if expert > 1:
            save_model(model, checkpoint.with_name(f"{checkpoint.name} {expert} saved"))
        output = model(TOKENS, torch.arange(20).expand(2, -1), attention_mask=None)
        if parallel_state.is_pipeline_last_stage():
            parts = [torch.empty_like(output) for _ in range(tensor)]
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_gather(parts, output.contiguous(), group)
            output = torch.cat(parts, dim=-1)
        else:
            torch.distributed.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
        torch.distributed.barrier()
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        return output if last else None


OTHERS = {"nemotron_h": {"layers_block_type": ["mlp", "linear_attention", "full_attention"]}}
"""Entries of a model type without which its default is not converted."""


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_entries_that_are_missing_have_transformers_defaults(family):
    """Each entry of transformers' own default is left out by itself, with those inside of it."""
    from transformers import AutoConfig

    others = OTHERS.get(family.model_type, {"num_hidden_layers": 4})
    config = AutoConfig.for_model(family.model_type, **others)
    whole = {**config.to_dict(), **family.fixed}
    expected = family.from_config(whole).model
    for key, value in whole.items():
        parts = [{k: v for k, v in whole.items() if k != key}]
        for name in value if isinstance(value, dict) else ():
            # Beside other entries of rotary embeddings transformers takes yarn's to be rounded.
            if name != "truncate":
                parts.append({**whole, key: {k: v for k, v in value.items() if k != name}})
        for part in parts:
            with suppress(UserError):  # refused, not guessed
                assert family.from_config(part).model == expected, key


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
