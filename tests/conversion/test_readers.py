"""Exports of every family in every layout load in transformers as the command says.

The test makes a tiny model whose rows differ in size, so that scales of the wrong tile, expert or
tensor show, exports it and loads it by the command's own line. Weights must equal the model before
the export, up to the format's error, if and only if ``outcome`` says so.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import ROPE, make_model

from megatron_lowbit.conversion import command, next_steps, quantized
from megatron_lowbit.conversion.command import main
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.next_steps import FAILS, LOADS, NOT_TRIED, READERS, WRONG, outcome
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
}  # fmt: skip
DEEPSEEK = {
    "num_key_value_heads": 2, "head_dim": 128, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 128, "v_head_dim": 128,
    "moe_intermediate_size": 128, "n_shared_experts": 1, "first_k_dense_replace": 0,
}  # fmt: skip
CHANGES = {
    "Qwen3-MoE": {"moe_intermediate_size": 128, "mlp_only_layers": []},
    "DeepSeek-V3": DEEPSEEK | {"rope_parameters": ROPE},
    "gpt-oss": {"intermediate_size": 128},
    "Gemma-3": {"layer_types": ["sliding_attention", "full_attention"]},
    "Nemotron-H": {"mamba_num_heads": 64, "mamba_head_dim": 4,
                   "layers_block_type": ["mlp", "linear_attention", "full_attention"]},
}  # fmt: skip
FAMILY_NAMES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "SmolLM3", "Seed-OSS", "Phi-3", "Mixtral", "Qwen3-MoE",
    "DeepSeek-V3", "gpt-oss", "Gemma-3", "GPT-2", "Nemotron-H",
)  # fmt: skip
"""Families with each kind of names; further ones have no others."""
FORMATS = {"nvfp4": 0.16, "mxfp4": 0.2, "mxfp8-e4m3": 0.05, "int4-1x32": 0.16, "int4-1x128": 0.2,
           "fp8-128x128-e4m3": 0.05}  # fmt: skip
"""Largest relative error of a weight, by its format."""
PATTERNS = {"all": "*", "some": "*layers.1.*", "none": "*.self_attention.*",
            "experts": "*.experts.*"}  # fmt: skip
RECIPE = """
name: one
description: some weights in one format
configs: {{low: {{weight: {{format: {format}}}, input: {input}}}}}
matchers: {{rule: {{type: glob, pattern: "{pattern}", config: low, enabled: true}}}}
"""
MIXED = """
name: two
description: two formats
configs: {small: {weight: {format: nvfp4}}, large: {weight: {format: mxfp8-e4m3}}}
matchers:
  first: {type: glob, pattern: "*layers.0.*", config: small, enabled: true}
  rest: {type: glob, pattern: "*", config: large, enabled: true}
"""
INPUTS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8-e4m3": "mxfp8-e4m3",
          "int4-1x32": "fp8-row-e4m3", "int4-1x128": "fp8-row-e4m3",
          "fp8-128x128-e4m3": "fp8-1x128-e4m3"}  # fmt: skip
PLAIN = [(family, "plain", "all") for family in ("GPT-2", "Nemotron-H", "gpt-oss", "Gemma-3")]
QUICK = [("Mixtral", "nvfp4", "all"), ("Nemotron-H", "mxfp4", "some"),
         ("gpt-oss", "fp8-128x128-e4m3", "all"), ("gpt-oss", "gpt-oss", "experts"),
         *PLAIN]  # fmt: skip


def cases():
    """Yield each family in each format or layout, with the share of its weights."""
    for family in FAMILY_NAMES:
        yield family, "plain", "all"
        for format in FORMATS:
            shares = [*PATTERNS][: 4 if family in next_steps.ONE_BY_ONE else 3]
            yield from ((family, format, share) for share in shares)
            yield family, f"{format} with inputs", "all"
        yield family, "mixed", "all"
        yield family, "modelopt", "all"
        yield family, "gpt-oss", "experts"


EACH = [pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in cases()]


@cache
def model_of(family: str, **changes):
    """Build the model of a family, whose rows have sizes of their own."""
    torch.manual_seed(0)
    model = make_model(family.lower(), **SIZES | CHANGES.get(family, {}) | changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= torch.randn(*parameter.shape[:-1], 1).exp()
    return model.bfloat16()


def save_checkpoint(folder: Path, family: str, **changes) -> Path:
    model_of(family, **changes).save_pretrained(folder / "source")
    to_megatron(folder / "source", folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    @cache
    def checkpoint(family: str) -> Path:
        return save_checkpoint(tmp_path_factory.mktemp("source"), family)

    return checkpoint


def layout_of(stored_as: str) -> str | None:
    if stored_as in ("modelopt", "gpt-oss", "plain"):
        return None if stored_as == "plain" else stored_as
    return "fp8-blocks" if stored_as.startswith("fp8") else "compressed-tensors"


def recipe_of(stored_as: str, share: str) -> str:
    if stored_as == "mixed":
        return MIXED
    format = {"modelopt": "nvfp4", "gpt-oss": "mxfp4"}.get(stored_as, stored_as.split()[0])
    input = f"{{format: {INPUTS[format]}}}" if stored_as.endswith("inputs") else "null"
    return RECIPE.format(format=format, input=input, pattern=PATTERNS[share])


def loaded_well(
    folder: Path, layout: str | None, expected: Mapping[str, torch.Tensor], error: float
):
    """Load by the command's line, and return LOADS, WRONG or FAILS."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=READERS[layout].dtype or "auto")
        with torch.no_grad():
            model(torch.arange(4)[None])
    except Exception:
        return FAILS
    parameters = dict(model.named_parameters())
    for name, tensor in expected.items():
        exact, seen = tensor.float(), parameters[name].float()
        if not (seen - exact).norm() <= error * exact.norm():
            return WRONG
    return LOADS


@pytest.mark.parametrize(("family", "stored_as", "share"), EACH)
def test_an_export_loads_as_the_command_says(
    family, stored_as, share, checkpoint_of, tmp_path, monkeypatch
):
    if stored_as == "nvfp4 with inputs":  # their scale comes from training's last steps
        amaxes = torch.tensor([3.0, -1.0])  # no steps for the weight: its own
        monkeypatch.setattr(quantized, "_earlier_amaxes", lambda *arguments: amaxes)
    layout, out = layout_of(stored_as), tmp_path / "out"
    (tmp_path / "recipe.yaml").write_text(recipe_of(stored_as, share) if layout else "")
    request = QuantizedAs(layout, [str(tmp_path / "recipe.yaml")]) if layout else None
    source = checkpoint_of(family)
    try:
        to_hugging_face(source, out, quantized=request)
    except UserError as refusal:
        assert not list(tmp_path.glob("*out*"))
        why = {"GPT-2": "transpose|whole blocks", "gpt-oss": "take no experts in it"}
        if stored_as == "gpt-oss" or (family, share) == ("Nemotron-H", "none"):
            why[family] = "matches none"  # no experts, or other names of attention
        assert family in why and re.search(why[family], str(refusal))
        return
    said = outcome(out, family, layout).result
    error = FORMATS.get(stored_as.split()[0], 0.2) if layout else 0.0
    seen = loaded_well(out, layout, dict(model_of(family).named_parameters()), error)
    assert said in (seen, NOT_TRIED)
    if said == NOT_TRIED:
        assert stored_as == "mixed" and family in next_steps.ONE_BY_ONE


@pytest.mark.parametrize(
    ("hidden", "result"),
    [(192, WRONG), (260, FAILS), pytest.param(96, LOADS, marks=pytest.mark.slow)],
)
def test_ragged_fp8_tiles_are_named(hidden, result, tmp_path):
    """transformers divides 192 rows by their two scales, and refuses 260 rows with three."""
    source = save_checkpoint(tmp_path, "Llama", hidden_size=hidden)
    to_hugging_face(source, tmp_path / "out", quantized=QuantizedAs("fp8-blocks", ["fp8-tile"]))
    said = outcome(tmp_path / "out", "Llama", "fp8-blocks")
    assert said.result == result
    assert (f"{hidden}" in said.reason and "128x128 tiles" in said.reason) == (result != LOADS)
    expected = load_file(tmp_path / "source" / "model.safetensors")
    assert loaded_well(tmp_path / "out", "fp8-blocks", expected, 0.05) == result


def verified(capsys, *words: str) -> tuple[int, list[str], str]:
    """Run ``to-hugging-face checkpoint out --verify``; return exit code, lines and errors."""
    code = main(["to-hugging-face", "checkpoint", "out", "--force", "--verify", *words])
    shown = capsys.readouterr()
    return code, shown.out.splitlines(), shown.err


def test_verify_loads_as_the_user_will(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, "Llama", hidden_size=192)
    words = ["--quantized", "compressed-tensors", "--recipe", "qat-mxfp4"]
    code, lines, _ = verified(capsys, *words)
    assert code == 0 and "weights in transformers equal the files" in lines
    # A reader that takes other scales is found, by the weight's name.
    monkeypatch.setattr(next_steps, "_ragged", lambda folder: None)
    code, lines, errors = verified(capsys, "--quantized", "fp8-blocks", "--recipe", "fp8-tile")
    assert code == 1 and re.search(
        r"error: --verify: transformers .* out: model\.layers\.0", errors
    )
    assert lines[-3].startswith("written: out")


def test_verify_says_which_reader_it_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, "Llama")
    code, lines, _ = verified(capsys, "--quantized", "modelopt", "--recipe", "qat-nvfp4")
    assert code == 0 and "weights are compared as lowbit-convert to-megatron reads them" in lines
    assert "not in transformers 5.23.0, which stops with an error" in lines[-2]


def test_verify_has_a_limit_and_an_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path, "Llama")
    from megatron_lowbit.conversion import verify

    monkeypatch.setattr(verify, "verify", lambda *arguments: (0.01, 10.0))
    code, _, errors = verified(capsys)
    assert code == 1 and "the limit for logits is 0.00122" in errors
    assert command.main(["to-megatron", "source", "there", "--verify"]) == 1
    monkeypatch.setattr(verify, "verify", lambda *arguments: (float("nan"), 10.0))
    assert verified(capsys)[0] == 1
    assert verified(capsys, "--dtype", "bfloat16")[0] == 1


def test_the_page_s_table_is_the_commands():
    """Rows of docs/conversion.md against the outcomes that the other tests find."""
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in FORMATS:
            rows[cells[0]] = cells[1:]
    words = {LOADS: "loads", WRONG: "**wrong weights**", FAILS: "error"}
    assert rows == {
        format: ["loads", *(words[result] for result in results)]
        for format, results in next_steps.WITH_EXPERTS.items()
    }
