"""Hugging Face's files that no honest model has: one line says what is wrong, or they convert."""

import copy
import json
import os
import shlex
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_llama import CONFIG, refused, write_llama

from megatron_lowbit.checkpoints.hugging_face_files import INDEX, SINGLE
from megatron_lowbit.checkpoints.inspect import inspect, report
from megatron_lowbit.checkpoints.model_arguments import argument_file
from megatron_lowbit.command_line import expand_files
from megatron_lowbit.conversion.convert import to_megatron
from megatron_lowbit.conversion.families import from_config
from megatron_lowbit.conversion.family import ConvertibleModel
from megatron_lowbit.conversion.quantized_folder import QuantizedFolder
from megatron_lowbit.errors import UserError

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 10000.0}  # fmt: skip
GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
EXAMPLES = [pytest.param(40), pytest.param(600, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A Llama of one layer, with an index."""
    folder = tmp_path_factory.mktemp("hostile") / "source"
    write_llama(folder, {"num_hidden_layers": 1})
    return folder


@pytest.fixture
def broken(source, tmp_path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(source, tmp_path / "broken")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rms_norm_eps": "1e-5\n--log-file-dir x"}, r"rms_norm_eps '1e-5\\n--log-file-dir x'"),
        ({"max_position_embeddings": "64 --x"}, "max_position_embeddings '64 --x': must be an int"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan: must be a finite number above 0"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps 1000.*: must be a finite number above 0"),
        ({"hidden_size": "32"}, "hidden_size '32': must be an integer from 1"),
        ({"hidden_size": 2**70}, "hidden_size 1180591620717411303424: must be an integer"),
        ({"num_hidden_layers": 1.0}, r"num_hidden_layers 1\.0: must be an integer"),
        ({"num_hidden_layers": 3 * 10**9}, r"num_hidden_layers 3000000000: must be an integer"),
        ({"num_key_value_heads": True}, "num_key_value_heads True: must be an integer"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3: must divide num_attention_heads 4"),
        ({"num_attention_heads": 0}, "num_attention_heads 0: must be an integer from 1"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings 'no': must be true or false"),
        ({"rope_theta": float("inf")}, "rope_theta inf: must be a finite number"),
        ({"rope_theta": 10000.5}, r"rope_theta 10000\.5: Megatron-LM's is an integer"),
        ({"rope_scaling": [1]}, r"rope_scaling: holds no JSON object, but \[1\]"),
        ({"rope_parameters": {"rope_type": []}}, r"rope_parameters: rope_type \[\]: must be a str"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters: needs the entry 'low_fr"),
        ({"hidden_act": ["x" * 10**5]}, "hidden_act"),
        ({"architectures": [["x"]]}, "architectures .*: must be a list of strings"),
        ({"architectures": "LlamaForCausalLM"}, "architectures .*: must be a list of strings"),
        ({"architectures": None, "model_type": 3}, "model_type 3: must be a string"),
        ({"pad_vocab_size_multiple": "16"}, "pad_vocab_size_multiple '16': must be an integer"),
        ({"quantization_config": []}, r"quantization_config: holds no JSON object"),
        ({"quantization_config": {"quant_method": []}}, r"quant_method \[\] is not one of"),
        ({"quantization_config": {}}, "quant_method None is not one of"),
        (
            {"architectures": ["NoSuch"]},
            "architecture NoSuch is not one of the .* docs/conversion.md lists them",
        ),
        ({"architectures": ["GPT2LMHeadModel"]}, "needs the entry 'n_embd'"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope': only 'default'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, r"low_freq_factor 2\.0"),
        (GRANITE | {"attention_multiplier": 1e308}, r"1e\+308: must be .* up to 1e\+150"),
        (GRANITE | {"attention_multiplier": 1e-200}, "1e-200: must be .* above 1e-150 and up"),
        (GRANITE | {"logits_scaling": 5e-324}, "logits_scaling 5e-324: must be .* above 1e-150"),
    ],
)
def test_entries_that_do_not_fit(broken, change, message):
    (broken / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1} | change))
    refused(broken, f"config.json: .*{message}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "not valid JSON"),
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 deep"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"hidden_size": "\xff"}', "not valid JSON"),
        (b'{"hidden_size": 1, "hidden_size": 2}', "a second key 'hidden_size'"),
        (b"[]", "holds no JSON object"),
        (b"", "not valid JSON"),
    ],
)
def test_invalid_json(broken, content, message):
    for name in ("config.json", INDEX):
        before = (broken / name).read_bytes()
        (broken / name).write_bytes(content)
        refused(broken, f"{name}: .*{message}")
        (broken / name).write_bytes(before)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_is_too_large_for_memory(broken, name):
    """Such a file may be sparse, and take no space on a disk."""
    os.truncate(broken / name, 2**40)
    refused(broken, f"{name}: has 1099511627776 bytes, more than 134217728")


NO_NAMES = ["/dev/zero", "../source/0.safetensors", "a/../../x", "a\0b", "\ud800", "", [1], None,
            "x" * 256, "\u1234" * 86, "x/" * 2000 + "x"]  # fmt: skip


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        *(({"lm_head.weight": name}, r"lm_head\.weight: .* is not the name of a file in")
          for name in NO_NAMES),
        *((weight_map, "holds no JSON object") for weight_map in (None, [1], 3, "x")),
    ],
)  # fmt: skip
def test_an_index_that_names_no_file_of_the_folder(broken, weight_map, message):
    (broken / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(broken, rf"index\.json: weight_map: {message}")


def test_names_that_move_the_cursor_are_shown_escaped(broken):
    (broken / INDEX).unlink()
    name = "a\x1b[2J\nb"
    save_file({name: torch.ones(2)}, broken / SINGLE)
    assert "a\\x1b[2J\\nb" in "\n".join(report(inspect(broken)))
    assert name in [row["key"] for row in inspect(broken)["tensors"]]


def test_a_folder_in_the_place_of_config_json(broken):
    (broken / "config.json").unlink()
    (broken / "config.json").mkdir()
    refused(broken, r"config\.json is no file")


def text_of(converted: ConvertibleModel) -> str:
    """Return the model.args of a converted model."""
    return argument_file(converted.name, converted.model)


@pytest.mark.parametrize("value", ["a b", "a\n--log-file-dir x", "'", "#", '"\\', "-", "@x", ""])
def test_an_argument_file_reads_back_one_value(tmp_path, value):
    family = from_config(CONFIG)
    file = tmp_path / "model.args"
    file.write_text(text_of(family))
    honest = expand_files([f"@{file}"])
    changed = family._replace(model=family.model | {"normalization": value})
    file.write_text(text_of(changed))
    expected = [
        f"--normalization={value}" if argument.startswith("--normalization=") else argument
        for argument in honest
    ]
    assert expand_files([f"@{file}"]) == expected


# -- any value in any place ------------------------------------------------------------------------


SIZES = {"vocab_size": 100, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}  # fmt: skip
HYBRID = SIZES | {"architectures": ["NemotronHForCausalLM"], "ssm_state_size": 8, "n_groups": 2,
                  "mamba_head_dim": 8, "mamba_num_heads": 8}  # fmt: skip
LLAMA = CONFIG | {"num_hidden_layers": 1, "attention_bias": False, "pad_vocab_size_multiple": 1}
CONFIGS = [
    LLAMA | {"rope_parameters": LLAMA3},
    LLAMA | {"rope_scaling": {"type": "default"}},
    LLAMA
    | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 2,
       "sliding_window": None},
    LLAMA
    | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2, "num_experts_per_tok": 1,
       "num_hidden_layers": 2, "mlp_only_layers": [0], "norm_topk_prob": False,
       "moe_intermediate_size": 8},
    SIZES
    | {"architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "q_lora_rank": 8,
       "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1,
       "topk_group": 1, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
       "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                        "mscale": 1.0, "mscale_all_dim": 1.0,
                        "original_max_position_embeddings": 4096}},
    {"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_head": 4, "n_layer": 1, "n_inner": None,
     "n_positions": 64, "layer_norm_epsilon": 1e-5, "vocab_size": 100, "tie_word_embeddings": True,
     "activation_function": "gelu_new", "scale_attn_weights": True},
    HYBRID | {"conv_kernel": 4, "layers_block_type": ["mlp", "mamba"]},
    HYBRID | {"hybrid_override_pattern": "M*-"},
]  # fmt: skip
QUANTIZED = [
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    {"quant_method": "compressed-tensors", "format": "mixed-precision", "transform_config": None,
     "config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}},
    {"quant_method": "mxfp4"},
]  # fmt: skip

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-3, 200)
    | st.sampled_from([2**31, 2**63, 10**400, -(10**20)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["\0", "\ud800", "../x", "/dev/zero", "--x y\n#", "M*-" * 2000, "F8_E4M3"])
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


def entries_of(document: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each object or list of a document with each of its keys or indices."""
    if isinstance(document, dict | list):
        for key in list(document) if isinstance(document, dict) else range(len(document)):
            yield document, key
            yield from entries_of(document[key])


@st.composite
def with_one_other_value(draw: st.DrawFn, documents: list[Any]) -> Any:
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    holder, key = draw(st.sampled_from(list(entries_of(document))))
    holder[key] = draw(values)
    return document


@st.composite
def damaged(draw: st.DrawFn, contents: list[bytes]) -> bytes:
    """Cut bytes, or change some."""
    content = bytearray(draw(st.sampled_from(contents)))
    if draw(st.booleans()):
        return bytes(content[: draw(st.integers(0, len(content)))])
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def spoiled(documents: list[Any]) -> st.SearchStrategy[bytes]:
    """Draw a document with another value, or with other bytes."""
    return with_one_other_value(documents).map(as_json) | damaged(list(map(as_json, documents)))


def works_or_is_refused(function, *arguments: Any) -> Any:
    """Return the result of a function; None where it raises a UserError, and nothing else."""
    try:
        return function(*arguments)
    except UserError as error:
        assert "\n" not in str(error)
        return None


def read_all(path: Path) -> None:
    folder = QuantizedFolder(path)
    for name in folder.file_of:
        folder.shape(name)
        folder.read(name)


def parts_of(file: Path) -> tuple[Any, bytes]:
    """Return the head and the rest of a safetensors file."""
    content = file.read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:end]), content[end:]


def with_head(head: Any, data: bytes) -> bytes:
    text = as_json(head)
    return struct.pack("<Q", len(text)) + text + data


def fuzz(test, examples: int, **strategies: st.SearchStrategy) -> None:
    check = settings(max_examples=examples, deadline=5000)
    check(given(**strategies)(test))()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_config(examples, tmp_path):
    """Whatever a value is, it is not read, or ``model.args`` has exactly the model's arguments."""

    def check(content: bytes) -> None:
        (tmp_path / "config.json").write_bytes(content)
        save_file({}, tmp_path / SINGLE)
        folder = works_or_is_refused(QuantizedFolder, tmp_path)
        family = folder and works_or_is_refused(from_config, folder.config)
        if family:
            (tmp_path / "args").write_text(text_of(family))
            arguments = expand_files([f"@{tmp_path / 'args'}"])
            words = [line.split() for line in text_of(family).splitlines() if line[0] != "#"]
            assert len(arguments) == sum(map(len, words))
            assert all(argument.isprintable() for argument in arguments)

    fuzz(check, examples, content=spoiled(CONFIGS))


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_config_or_index_of_a_folder(examples, source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "broken")
    index = json.loads((source / INDEX).read_text())
    originals = {"config.json": [LLAMA], INDEX: [index]}

    def check(name: str, data: st.DataObject) -> None:
        (broken / name).write_bytes(data.draw(spoiled(originals[name])))
        works_or_is_refused(to_megatron, broken, tmp_path / "out", True)
        description = works_or_is_refused(inspect, broken)
        assert description is None or all(line.isprintable() for line in report(description))
        shutil.copy(source / name, broken / name)

    fuzz(check, examples, name=st.sampled_from(list(originals)), data=st.data())


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_quantization(examples, tmp_path):
    """Each layout's tensors, with any entries of config.json and any head of the file."""
    parts = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale",
             "weight_scale_inv", "input_scale")  # fmt: skip
    tensors = {f"model.layers.0.mlp.up_proj.{part}": torch.ones(2, 16).byte() for part in parts}
    for name in ("gate_up_proj", "down_proj"):
        blocks = torch.ones(2, 4, 1, 16).byte()
        tensors[f"model.layers.0.mlp.experts.{name}_blocks"] = blocks
        tensors[f"model.layers.0.mlp.experts.{name}_scales"] = blocks[..., 0].clone()
    save_file(tensors, tmp_path / SINGLE)
    head, data = parts_of(tmp_path / SINGLE)
    configs = [LLAMA | {"num_experts": 2, "quantization_config": entry} for entry in QUANTIZED]

    def check(config: Any, head: Any) -> None:
        (tmp_path / "config.json").write_bytes(as_json(config))
        (tmp_path / SINGLE).write_bytes(with_head(head, data))
        works_or_is_refused(read_all, tmp_path)

    changed_config = {"config": with_one_other_value(configs), "head": st.just(head)}
    changed_head = {"config": st.sampled_from(configs), "head": with_one_other_value([head])}
    fuzz(check, examples, **changed_config)
    fuzz(check, examples, **changed_head)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_any_head_of_a_safetensors_file(examples, tmp_path):
    write_llama(tmp_path, LLAMA)
    (tmp_path / INDEX).unlink()
    file = (tmp_path / "0.safetensors").rename(tmp_path / SINGLE)
    head, data = parts_of(file)
    content = file.read_bytes()

    def check(content: bytes) -> None:
        file.write_bytes(content)
        works_or_is_refused(to_megatron, tmp_path, tmp_path / "out", True)
        works_or_is_refused(inspect, tmp_path)

    changed = with_one_other_value([head]).map(lambda other: with_head(other, data))
    fuzz(check, examples, content=changed | damaged([content[: -len(data)], content]))


def test_no_config_is_refused_as_it_is():
    for config in CONFIGS:
        assert shlex.split(text_of(from_config(config)), comments=True)
