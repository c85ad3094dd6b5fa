"""Tiny random models of transformers': there and back identical, the same logits between."""

import json
import math
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import MODELS, SIZES, TOKENS, config_of, make_model, save, weights

from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice
from megatron_lowbit.conversion.convert import COMPANIONS, to_hugging_face, to_megatron
from megatron_lowbit.conversion.families import from_config
from megatron_lowbit.conversion.verify import verify, wrong_weight
from megatron_lowbit.errors import UserError
from megatron_lowbit.megatron.run import workarounds
from megatron_lowbit.megatron.run.records import OF_THE_MODEL, changes
from megatron_lowbit.planning.training_arguments import TrainingArguments
from tests.marks import others_slow

CASES = [
    ("llama", 2, 1, 1), ("llama", 1, 2, 1), ("llama", 2, 2, 1),
    ("tied llama", 1, 1, 1), ("tied llama", 1, 2, 1), ("mixtral", 2, 1, 1),
    ("gpt-2", 1, 1, 1), ("gpt-2", 2, 1, 1), ("gpt-2", 1, 2, 1),
    ("nemotron-h", 1, 1, 1), ("nemotron-h", 2, 1, 1), ("nemotron-h", 1, 2, 1),
    ("qwen3", 2, 1, 1), ("qwen3-moe", 1, 2, 1), ("qwen3-moe", 2, 1, 1),
    ("uniform qwen3-moe", 2, 1, 1),
    ("deepseek-v3", 1, 1, 1), ("deepseek-v3", 1, 2, 1), ("uniform deepseek-v3", 1, 2, 1),
    ("mixtral with windows", 1, 1, 1),
    ("mixtral", 1, 1, 2), ("uniform qwen3-moe", 1, 1, 4), ("deepseek-v3", 1, 1, 2),
    ("gpt-oss", 1, 1, 1), ("gpt-oss", 2, 1, 1), ("gpt-oss", 1, 2, 1), ("gpt-oss", 1, 1, 2),
    ("gemma-3", 1, 1, 1), ("gemma-3", 2, 1, 1), ("gemma-3", 1, 2, 1),
    ("seed-oss", 1, 1, 1), ("smollm3", 1, 1, 1), ("smollm3", 2, 1, 1), ("smollm3", 1, 2, 1),
    ("phi-3", 1, 1, 1), ("phi-3", 2, 1, 1),
    ("llama with biases", 1, 1, 1), ("llama with biases", 2, 1, 1),
    ("linear llama", 1, 1, 1), ("dynamic llama", 1, 1, 1), ("yarn qwen2", 1, 1, 1),
    ("qwen2", 1, 1, 1), ("qwen2", 2, 1, 1), ("qwen2", 1, 2, 1),
    ("qwen2 with windows", 1, 1, 1), ("qwen3 with windows", 1, 1, 1),
    ("ministral", 1, 1, 1), ("cwm", 1, 1, 1), ("arcee", 1, 1, 1), ("gemma", 1, 1, 1),
    ("granite", 1, 1, 1), ("granite", 2, 1, 1), ("biased granite", 1, 1, 1),
    ("glm", 1, 1, 1), ("glm", 2, 1, 1), ("glm-4", 1, 1, 1), ("glm-4", 2, 1, 1),
    ("ernie-4.5", 1, 1, 1), ("helium", 1, 1, 1),
    ("gpt-bigcode", 1, 1, 1), ("starcoder2", 1, 1, 1), ("starcoder2", 2, 1, 1),
    ("stablelm", 1, 1, 1), ("nemotron", 1, 1, 1), ("nemotron", 2, 1, 1), ("nemotron", 1, 2, 1),
    ("jais-2", 1, 1, 1),
    ("tied mamba-2", 1, 1, 1), ("tied bamba", 1, 1, 1), ("tied bamba", 1, 2, 1),
    ("scaled yarn llama", 1, 1, 1), ("mamba-2", 1, 1, 1), ("mamba-2", 2, 1, 1), ("bamba", 1, 1, 1),
    ("bamba", 1, 2, 1),
    ("deepseek-v2", 1, 1, 1), ("deepseek-v2", 1, 2, 1), ("youtu", 1, 1, 1),
    ("qwen2-moe", 1, 1, 1), ("qwen2-moe", 2, 1, 1), ("qwen2-moe", 1, 1, 2),
    ("glm-4.5-moe", 1, 1, 1), ("glm-4.5-moe", 2, 1, 1), ("glm-4.5-moe", 1, 2, 1),
    ("dots.llm1", 1, 1, 1), ("dots.llm1", 1, 1, 2), ("solar-open", 1, 1, 1),
    ("mistral", 1, 1, 1), ("mistral", 2, 1, 1), ("mistral without windows", 1, 1, 1),
]  # fmt: skip
"""Models over numbers of tensor-, pipeline- and expert-parallel ranks."""
TIED = ("smollm3", "gemma", "ernie-4.5", "gpt-bigcode", "starcoder2")
QUICK = [case for case in CASES if math.prod(case[1:]) == 1][::2]
EACH = others_slow(CASES, QUICK)


class Sources(dict[str, Path]):
    """Folders that transformers saved, in several files, each when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> Path:
        folder = self[name] = self.root / name
        save(name, folder, max_shard_size="20KB")
        (folder / "tokenizer.json").write_text("{}")
        return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def logits(sources, run_ranks, tmp_path_factory) -> Callable[[int, bool], Path]:
    """Function that computes this project's logits, and returns their folder.

    It takes a number of ranks, and whether their cases are quick.
    """
    folder = tmp_path_factory.mktemp("logits")

    @cache
    def run(ranks: int, quick: bool) -> Path:
        cases = cases_of(ranks, quick)
        for name in {case[0] for case in cases}:
            if not (folder / name).exists():
                to_megatron(sources[name], folder / name)
        run_ranks(__file__, ranks, "quick" if quick else "slow", folder, timeout=200)
        return folder

    return run


def cases_of(ranks: int, quick: bool) -> list[tuple[str, int, int, int]]:
    return [case for case in CASES if math.prod(case[1:]) == ranks and (case in QUICK) is quick]


@pytest.mark.parametrize("name", others_slow(MODELS, [*MODELS][::3]))
def test_a_run_with_its_arguments_takes_a_checkpoint_for_its_model(name, sources, tmp_path):
    to_megatron(sources[name], tmp_path / "there")
    words = [f"@{tmp_path}/there/model.args", "--seq-length=8", "--micro-batch-size=1"]
    saved = CheckpointReader(tmp_path / "there" / "iter_0000000").args
    assert changes(TrainingArguments(words).parse(1), saved, OF_THE_MODEL) == ""


@pytest.mark.parametrize("name", others_slow(MODELS, [*MODELS][1::3]))
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
    was, now = map(config_of, (source, back))
    assert {key: now.get(key) for key in SIZES} == {key: was.get(key) for key in SIZES}
    assert now["initializer_range"] == 0.3
    assert from_config(now) == from_config(was)


@pytest.mark.parametrize(
    "name",
    ["llama with biases", "linear llama", "yarn qwen2", "scaled yarn llama", "mistral",
     "mistral without windows", "seed-oss", "smollm3", "phi-3", "ministral", "cwm", "arcee",
     "gemma", "glm", "glm-4", "granite", "ernie-4.5", "helium", "gpt-bigcode", "starcoder2",
     "stablelm", "nemotron", "jais-2", "qwen2 with windows", "qwen3 with windows"],
)  # fmt: skip
def test_an_export_computes_the_same_in_transformers(name, sources, tmp_path):
    """By the exported config.json, whose entries have other names than transformers' own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    to_megatron(sources[name], tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "back"))
    model.load_state_dict(weights(tmp_path / "back"), strict=name not in TIED)
    expected = torch.load(sources[name] / "logits.pt")
    with torch.no_grad():
        seen = model.eval()(TOKENS).logits
    assert (seen - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("case", EACH, ids=lambda case: " ".join(map(str, case)))
def test_the_same_logits(case, sources, logits):
    """Compare the logits of transformers and of this project's model, in FP32."""
    name, *sizes = case
    folder = logits(math.prod(sizes), case in QUICK)
    expected = torch.load(sources[name] / "logits.pt")
    seen = torch.load(folder / f"{name} {' '.join(map(str, sizes))}.pt")
    assert (seen - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "expert"), [(case[0], case[3]) for case in CASES if case[3] > 1])
def test_experts_of_several_ranks_are_saved_as_of_one(name, expert, logits):
    folder = logits(expert, quick=False)
    saved = CheckpointReader(folder / f"{name} {expert} saved")
    converted = CheckpointReader(folder / name / "iter_0000000")
    experts = [key for key in saved.model if ".experts." in key]
    assert len(experts) >= 2
    for key in saved.model:
        target = TensorSlice(key)
        assert torch.equal(saved.read(target), converted.read(target)), key


@pytest.mark.parametrize(
    ("name", "norms", "states"),
    [
        (
            "mixtral",
            {"mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"},
            ("final_layernorm._extra_state/shard_0_1",
             "layers.pre_mlp_layernorm._extra_state/shard_3_4",
             "layers.mlp.experts.experts.linear_fc2._extra_state/shard_3.1_4.4"),
        ),
        (
            "deepseek-v3",
            {"linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
             "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
             "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight"},
            [f"layers.2.{module}._extra_state/shard_0_1" for module in (
                "input_layernorm", "self_attention.linear_kv_up_proj", "pre_mlp_layernorm")],
        ),
    ],
)  # fmt: skip
def test_norms_under_both_kinds_of_layers(name, norms, states, sources, tmp_path):
    """Transformer Engine's layers and local ones have other names for some norms, and states."""
    to_megatron(sources[name], tmp_path / "there")
    tensors = CheckpointReader(tmp_path / "there" / "iter_0000000")
    rules = from_config(config_of(sources[name])).rules
    targets = [target for rule in rules for target in rule.targets]
    renamed = 0
    for key, other_key in norms.items():
        for target in targets:
            if target.key.endswith(key):
                other = target._replace(key=target.key.replace(key, other_key))
                first, second = map(tensors.read, (target, other))
                assert torch.equal(first, second)
                assert other.key in tensors.model
                renamed += 1
    assert renamed == 4 * len(norms)
    for key in [key for key in tensors.model if key.endswith(tuple(norms))]:
        del tensors.model[key]
    tensors.check(targets)
    assert {f"decoder.{state}" for state in states} <= {*tensors.objects}


def test_layers_for_multi_token_prediction_are_left_out(sources, tmp_path, capsys):
    """As in DeepSeek's files, after the last layer; without the entry, they have no place."""
    source = tmp_path / "source"
    source.mkdir()
    more = {
        "model.layers.4.enorm.weight": torch.ones(32),
        "model.layers.4.self_attn.o_proj.weight": torch.ones(32, 40),
    }
    save_file(weights(sources["deepseek-v3"]) | more, source / "model.safetensors")
    config = config_of(sources["deepseek-v3"])
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"tensor model\.layers\.4\.enorm\.weight has no place"):
        to_megatron(source, tmp_path / "there")
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    to_megatron(source, tmp_path / "there")
    assert "2 tensors of multi-token prediction are ignored" in capsys.readouterr().out
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == 0
    assert weights(tmp_path / "back").keys() == weights(sources["deepseek-v3"]).keys()


@pytest.mark.parametrize("are_older", [False, True])
def test_the_text_model_of_a_gemma3_with_images(are_older, sources, tmp_path, capsys):
    """Its tensors under either name, with an encoder of images."""
    text = weights(sources["gemma-3"])
    first = "language_model.model." if are_older else "model.language_model."
    tower = "vision_tower." if are_older else "model.vision_tower."
    named = {first + name.removeprefix("model."): tensor for name, tensor in text.items()}
    (tmp_path / "source").mkdir()
    save_file({**named, f"{tower}a.weight": torch.ones(2)}, tmp_path / "source/model.safetensors")
    config = config_of(sources["gemma-3"])
    config.pop("architectures")
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config}
    (tmp_path / "source" / "config.json").write_text(json.dumps(whole))
    to_megatron(tmp_path / "source", tmp_path / "there")
    assert "1 tensors of images are ignored" in capsys.readouterr().out
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    after = weights(tmp_path / "back")
    assert after.keys() == text.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in text.items())
    assert from_config(config_of(tmp_path / "back")) == from_config(config_of(sources["gemma-3"]))


def test_verify_loads_the_biases_of_the_router(sources, tmp_path):
    """transformers has them as buffers, like rotary frequencies, which it does not load."""
    to_megatron(sources["deepseek-v3"], tmp_path / "there")
    difference, largest = verify(sources["deepseek-v3"], tmp_path / "there")
    assert difference <= 1e-5 * largest


def test_verify_of_experts_of_any_width(tmp_path):
    """torch's grouped GEMM, of transformers' default, refuses rows of no multiple of 16 bytes."""
    make_model("qwen3-moe", moe_intermediate_size=33).save_pretrained(tmp_path / "source")
    to_megatron(tmp_path / "source", tmp_path / "there")
    difference, largest = verify(tmp_path / "source", tmp_path / "there")
    assert difference <= 1e-5 * largest
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    assert wrong_weight(tmp_path / "back", None) is None


def test_verify_names_a_model_that_transformers_cannot_compute(sources, tmp_path, monkeypatch):
    to_megatron(sources["llama"], tmp_path / "there")
    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", lambda *_, **__: [][0])
    with pytest.raises(UserError, match=r"^--verify: transformers cannot compute .*\(IndexError: "):
        verify(sources["llama"], tmp_path / "there")


def test_old_names_of_gpt2(sources, tmp_path):
    """Without their first part, and with the masks of attention."""
    new, old = sources["gpt-2"], tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((new / "config.json").read_text())
    tensors = {name.removeprefix("transformer."): part for name, part in weights(new).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 64, 64)}, old / "model.safetensors")
    to_megatron(old, tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert all(torch.equal(back[f"transformer.{name}"], part) for name, part in tensors.items())


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
        tensors_back = weights(back)
        assert all(
            torch.equal(tensors_back[name], part.to(asked or part.dtype))
            for name, part in tensors.items()
        )
        config = config_of(back)
        assert config["torch_dtype"] == (dtype or "bfloat16")
        assert "dtype" not in config


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5-moe", "dots.llm1", "solar-open"])
def test_transformers_keeps_the_dtypes_of_an_export(name, sources, tmp_path):
    """A router's bias that is rounded to BF16 routes other tokens."""
    from transformers import AutoModelForCausalLM

    to_megatron(sources[name], tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back", "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    loaded, source = model.state_dict(), weights(sources[name])
    exported = weights(tmp_path / "back")
    # transformers stacks the experts.
    assert all(exported[key].dtype == part.dtype for key, part in loaded.items() if key in exported)
    biases = [key for key in exported if key.endswith("e_score_correction_bias")]
    assert biases and all(torch.equal(exported[key], source[key]) for key in biases)


def test_dynamic_scaling_is_not_kept(sources, tmp_path, capsys):
    to_megatron(sources["dynamic llama"], tmp_path / "there")
    assert "dynamic scaling of rotary embeddings begins after" in capsys.readouterr().out
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    assert config_of(tmp_path / "back")["rope_scaling"] is None


def test_entries_of_another_model_are_not_carried(sources, tmp_path):
    """A tokenizer's folder may be another model's, with entries that transformers reads in any."""
    others = {"is_causal": False, "layer_types": ["full_attention"] * 9, "bos_token_id": 7,
              "original_max_position_embeddings": 5, "per_layer_config": {"8": {}}}  # fmt: skip
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(others))
    to_megatron(sources["scaled yarn llama"], tmp_path / "there")
    to_hugging_face(tmp_path / "there", tmp_path / "back", companions=tmp_path / "other")
    config = config_of(tmp_path / "back")
    assert {*others} & {*config} == {"bos_token_id"}


def test_nothing_is_overwritten(sources, tmp_path):
    to_megatron(sources["llama"], tmp_path / "out")
    with pytest.raises(UserError, match="out exists; --force replaces it"):
        to_megatron(sources["llama"], tmp_path / "out")
    to_megatron(sources["llama"], tmp_path / "out", force=True)
    assert (tmp_path / "out" / COMPANIONS / "config.json").is_file()


def worker(cases: str, folder: Path) -> None:
    """Save the logits of quick or slow cases for as many ranks as there are."""
    workarounds.save_without_another_process()
    for name, *sizes in cases_of(int(os.environ["WORLD_SIZE"]), cases == "quick"):
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


if __name__ == "__main__":
    worker(sys.argv[1], Path(sys.argv[2]))
