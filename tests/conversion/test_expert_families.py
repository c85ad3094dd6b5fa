"""Qwen3-MoE and DeepSeek-V3: what is refused or left out, names of tensors, quantized exports."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import DRAWN, ROPE, SIZES, YARN, deepseek_v3_model, qwen3_moe_model, weights

from megatron_lowbit.checkpoints.model_arguments import argument_file, model_of, saved_arguments
from megatron_lowbit.checkpoints.reader import CheckpointReader, TensorSlice
from megatron_lowbit.conversion.convert import to_hugging_face, to_megatron
from megatron_lowbit.conversion.families import FAMILIES, family_of
from megatron_lowbit.conversion.quantized import QuantizedAs
from megatron_lowbit.conversion.verify import verify
from megatron_lowbit.errors import UserError
from megatron_lowbit.numerics import quantize
from tests.marks import others_slow


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, make in {"qwen3-moe": qwen3_moe_model, "deepseek-v3": deepseek_v3_model}.items():
        folders[name] = tmp_path_factory.mktemp("source")
        torch.manual_seed(0)
        make().save_pretrained(folders[name])
    return folders


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("qwen3-moe", {"mlp_only_layers": [4]}, "mlp_only_layers 4: the model has 4 layers"),
        ("qwen3-moe", {"mlp_only_layers": ["0"]}, "mlp_only_layers .*must be a list of integers"),
        ("qwen3-moe", {"decoder_sparse_step": 5}, "decoder_sparse_step leave no experts"),
        ("qwen3-moe", {"num_experts_per_tok": 1}, "norm_topk_prob: Megatron-LM does not normalize"),
        ("qwen3-moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5: .* from 1 to 4"),
        ("qwen3-moe", {"num_local_experts": None}, "needs the entry 'num_experts'"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3-moe", {"attention_bias": True}, "attention_bias True"),
        ("deepseek-v3", {"q_lora_rank": None}, "q_lora_rank None: must be a number"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads 2: must be 4, all heads"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False: Megatron-LM normalizes"),
        ("deepseek-v3", {"topk_group": 3}, r"topk_group 3: .*num_experts_per_tok // topk_group"),
        ("deepseek-v3", {"n_group": 3}, "n_group 3: must divide n_routed_experts 8"),
        ("deepseek-v3", {"n_group": 8}, "n_group 8: must divide .* groups of two or more"),
        ("deepseek-v3", {"num_experts_per_tok": 5}, "num_experts_per_tok 5: topk_group 2 .*have 4"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05: only 1e-06"),
        ("deepseek-v3", {"rope_interleave": False}, "rope_interleave False"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"first_k_dense_replace": 5}, "first_k_dense_replace 5: .* from 0 to 4"),
        ("deepseek-v3", {"rope_parameters": YARN | {"beta_fast": 16}}, "beta_fast 16.0: .*32.0"),
        (
            "deepseek-v3",
            {"rope_parameters": YARN | {"original_max_position_embeddings": 64}},
            "original_max_position_embeddings 64.0: megatron-core's is 4096",
        ),
        ("deepseek-v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate"),
        ("deepseek-v3", {"rope_parameters": YARN | {"attention_factor": 1.2}}, "attention_factor"),
        (
            "deepseek-v3",
            {"rope_parameters": YARN | {"mscale_all_dim": 0}},
            "mscale 0.7 with mscale_all_dim 0.0",
        ),
        ("deepseek-v3", {"rope_parameters": ROPE | {"rope_type": "linear"}}, "rope_type 'linear'"),
    ],
)
def test_a_config_that_does_not_fit(name, change, named, sources):
    config = config_of(sources[name]) | change
    with pytest.raises(UserError, match=named):
        FAMILIES[config["architectures"][0]].from_config(config)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (
            "qwen3-moe",
            {"moe_shared_expert_intermediate_size": 40},
            "moe_shared_expert_intermediate_size 40; a Qwen3-MoE has None",
        ),
        (
            "qwen3-moe",
            {"moe_router_score_function": "sigmoid"},
            "score_function 'sigmoid'; a Qwen3-MoE has 'softmax'",
        ),
        ("qwen3-moe", {"qk_layernorm": False}, "moe_layer_freq .*; a Mixtral has 1"),
        ("deepseek-v3", {"qk_layernorm": False}, "qk_layernorm False; a DeepSeek-V3 has True"),
        ("deepseek-v3", {"num_experts": None}, "score_function 'softmax'; a DeepSeek-V3 has"),
        ("deepseek-v3", {"q_lora_rank": None}, "the model has no q_lora_rank"),
        (
            "deepseek-v3",
            {"moe_router_enable_expert_bias": False},
            "moe_router_enable_expert_bias False; a DeepSeek-V3 has True",
        ),
        ("deepseek-v3", {"moe_layer_freq": [1, 0, 1, 1]}, "has its dense layers first"),
        ("deepseek-v3", {"moe_layer_freq": [0, 1]}, r"moe_layer_freq \[0, 1\]: must be"),
        ("deepseek-v3", {"moe_router_group_topk": 1}, "moe_router_group_topk 1: Megatron-LM"),
        (
            "deepseek-v3",
            {"moe_shared_expert_intermediate_size": 30},
            "has a multiple of moe_ffn_hidden_size 20",
        ),
        ("deepseek-v3", {"mscale": 2.0, "mscale_all_dim": 0.0}, "mscale 2.0 with"),
        ("deepseek-v3", {"mscale": "1"}, "mscale '1': must be a finite number"),
        ("deepseek-v3", {"rope_type": "rope"}, "rotary_scaling_factor 40.0; .* has 1.0"),
    ],
)
def test_a_model_that_does_not_fit(name, change, named, sources):
    """As a run's arguments say it."""
    model = FAMILIES[config_of(sources[name])["architectures"][0]].from_config(
        config_of(sources[name])
    )
    args = saved_arguments(model.model)
    vars(args).update(change)
    with pytest.raises(UserError, match=named):
        model = model_of(args, 100)
        family_of(model).to_config(model)


def test_every_second_layer_has_experts():
    """decoder_sparse_step counts from the other end than --moe-layer-freq."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 2}
    config = Qwen3MoeConfig(**SIZES, **DRAWN, **experts, architectures=["Qwen3MoeForCausalLM"])
    family = FAMILIES["Qwen3MoeForCausalLM"]
    model = family.from_config(config.to_dict()).model
    assert model["moe_layer_freq"] == [0, 1, 0, 1]
    assert "--moe-layer-freq=[0,1,0,1]\n" in argument_file("", model)
    written = family.to_config(model)
    assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, [0, 2])
    # Megatron-LM's own count begins with the first layer.
    args = saved_arguments(model | {"moe_layer_freq": 2})
    assert model_of(args, 100)["moe_layer_freq"] == [1, 0, 1, 0]


def test_probabilities_of_the_router(sources):
    """Normalized ones are Megatron-LM's softmax of the chosen; others its softmax before them."""
    config = config_of(sources["qwen3-moe"])
    family = FAMILIES["Qwen3MoeForCausalLM"]
    for normalized in (True, False):
        model = family.from_config(config | {"norm_topk_prob": normalized}).model
        assert model["moe_router_pre_softmax"] is not normalized
        assert family.to_config(model)["norm_topk_prob"] is normalized


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
    assert "2 tensors of multi-token prediction are left out" in capsys.readouterr().out
    to_hugging_face(tmp_path / "there", tmp_path / "back")
    assert config_of(tmp_path / "back")["num_nextn_predict_layers"] == 0
    assert weights(tmp_path / "back").keys() == weights(sources["deepseek-v3"]).keys()


def test_latent_norms_under_both_kinds_of_layers(sources, tmp_path):
    """Transformer Engine's layers hold them in the next projection, local ones alone."""
    to_megatron(sources["deepseek-v3"], tmp_path / "there")
    tensors = CheckpointReader(tmp_path / "there" / "iter_0000000")
    rules = FAMILIES["DeepseekV3ForCausalLM"].rules(model_of(tensors.args, 100))
    for fused, alone in (
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        (
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "self_attention.kv_layernorm.weight",
        ),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        for layer in range(4):
            first, second = (
                tensors.read(TensorSlice(f"decoder.layers.{layer}.{key}")) for key in (fused, alone)
            )
            assert torch.equal(first, second)
            del tensors.model[f"decoder.layers.{layer}.{fused}"]
    tensors.check(rule.target for rule in rules)
    for state in ("input_layernorm", "self_attention.linear_kv_up_proj", "pre_mlp_layernorm"):
        assert f"decoder.layers.2.{state}._extra_state/shard_0_1" in tensors.objects


def test_verify_loads_the_biases_of_the_router(sources, tmp_path):
    """transformers has them as buffers, like rotary frequencies, which it does not load."""
    to_megatron(sources["deepseek-v3"], tmp_path / "there")
    difference, largest = verify(sources["deepseek-v3"], tmp_path / "there")
    assert difference <= 1e-5 * largest


TILES = "fp8-128x128-e4m3"


@pytest.mark.parametrize("name", others_slow(["qwen3-moe", "deepseek-v3"], ["qwen3-moe"]))
def test_fp8_blocks_there_and_back(name, tmp_path):
    """Codes and scales of training's weights, of experts, shared experts and projections alike."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    torch.manual_seed(0)
    if name == "qwen3-moe":
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        options = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
        options |= {"head_dim": 128, "norm_topk_prob": True, "rope_parameters": ROPE}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | DRAWN | sizes | options))
    else:
        model = deepseek_v3_model(**sizes)
    model.save_pretrained(tmp_path / "source")
    to_megatron(tmp_path / "source", tmp_path / "there")
    wanted = QuantizedAs("fp8-blocks", ["fp8-tile"])
    to_hugging_face(tmp_path / "there", tmp_path / "out", quantized=wanted)
    found = weights(tmp_path / "out")
    exact = weights(tmp_path / "source")
    quantized = [n for n in found if f"{n}_scale_inv" in found]
    others = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    matrices = [n for n, part in exact.items() if part.ndim == 2 and not n.endswith(others)]
    assert sorted(quantized) == sorted(matrices)
    # A weight of one part, so quantized as it is, in either kind of MLP.
    for part in ("layers.1.self_attn.o_proj", "layers.3.mlp.experts.2.down_proj"):
        weight = quantize(exact[f"model.{part}.weight"], TILES, scale_format="pow2").dequantize()
        scales = found[f"model.{part}.weight_scale_inv"]
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        rows, columns = weight.shape
        seen = found[f"model.{part}.weight"].float() * wide[:rows, :columns]
        assert torch.equal(seen, weight)
    to_megatron(tmp_path / "out", tmp_path / "again")
    to_hugging_face(tmp_path / "again", tmp_path / "once more", quantized=wanted)
    again = weights(tmp_path / "once more")
    for n in quantized:
        assert torch.equal(again[n].view(torch.uint8), found[n].view(torch.uint8)), n


def test_gpt_oss_of_experts_there_and_back(tmp_path):
    """The recipe names routed experts alone: shared ones and dense layers stay as they are."""
    recipe = tmp_path / "experts.yaml"
    recipe.write_text("""
name: experts
description: MXFP4 in routed experts
configs: {low: {weight: {format: mxfp4-2d, scale_rounding: rceil}, input: {format: mxfp4}}}
matchers: {experts: {type: glob, pattern: "*.experts.*", config: low, enabled: true}}
""")
    torch.manual_seed(0)
    deepseek_v3_model(hidden_size=64, moe_intermediate_size=64).save_pretrained(tmp_path / "source")
    to_megatron(tmp_path / "source", tmp_path / "there")
    wanted = QuantizedAs("gpt-oss", [str(recipe)])
    to_hugging_face(tmp_path / "there", tmp_path / "out", quantized=wanted)
    found = weights(tmp_path / "out")
    assert found["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (8, 128, 2, 16)
    assert "model.layers.0.mlp.gate_proj.weight" in found
    assert found["model.layers.1.mlp.shared_experts.up_proj.weight"].dtype == torch.float32
    to_megatron(tmp_path / "out", tmp_path / "again")
    name = "model.layers.2.mlp.experts.5.down_proj.weight"
    exact = weights(tmp_path / "source")[name]
    key = "decoder.layers.2.mlp.experts.experts.linear_fc2.weight"
    seen = CheckpointReader(tmp_path / "again" / "iter_0000000").read(TensorSlice(key, (5,), (8,)))
    expected = quantize(exact, "mxfp4-2d", scale_rounding="rceil").dequantize()
    assert torch.equal(seen, expected.bfloat16())
