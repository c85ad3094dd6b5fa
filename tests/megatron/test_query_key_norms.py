"""Norms of queries and keys in local layers: as the arguments say, in every kind of model."""

import pytest
import torch

from tests.megatron.tiny_models import TINY, built, one_rank

# isort: split
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import L2Norm

from megatron_lowbit.megatron.layers.specs import with_l2_norms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on the CPU")

LATENT = "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --v-head-dim 8"
MODELS = {
    "GPT": "--num-layers 1",
    "GPT with experts": "--num-layers 1 --num-experts 2",
    "GPT with a rotary base of windows": "--num-layers 1 --position-embedding-type rope "
    "--window-size 8,0 --window-rotary-base 1000",
    "hybrid": "--hybrid-layer-pattern M* --mamba-num-groups 1 --mamba-head-dim 16 "
    "--position-embedding-type none",
}
RMS, LAYER = torch.nn.RMSNorm, torch.nn.LayerNorm


def norms(line, *names):
    """Return the classes of the norms of those names in the layers of a model."""
    with one_rank():
        modules = dict(built(f"{TINY} --transformer-impl local {line}").named_modules())
    return {type(m) for path, m in modules.items() if path.endswith(names)}


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("--qk-layernorm", RMS), ("--qk-layernorm --normalization LayerNorm", LAYER),
     ("--qk-l2-norm", L2Norm)],
)  # fmt: skip
@pytest.mark.parametrize("model", MODELS)
def test_queries_and_keys_are_normalized(model, flag, expected):
    """Without Transformer Engine Megatron-LM forgets --qk-l2-norm in a GPT without experts."""
    assert norms(f"{MODELS[model]} {flag}", "q_layernorm", "k_layernorm") == {expected}


def test_latents_of_hybrids_are_normalized():
    line = f"{MODELS['hybrid'].replace('M*', 'M+')} --q-lora-rank 16 {LATENT}"
    kinds = norms(f"{line} --qk-layernorm", "q_layernorm", "kv_layernorm")
    assert kinds == {RMS}, kinds


def test_parts_that_a_spec_names_keep_their_norms():
    spec = ModuleSpec(module=("my_package.layers", "Attention"))
    assert with_l2_norms(spec) == spec
