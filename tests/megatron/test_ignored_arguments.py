"""Arguments that Megatron-LM ignores in hybrids take effect."""

import pytest
import torch

from tests.megatron.tiny_models import TINY, built, one_rank

# isort: split
from megatron.core.models.common.embeddings import RotaryEmbedding

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on the CPU")

HYBRID = "--hybrid-layer-pattern M* --mamba-num-groups 1 --mamba-head-dim 16"
ROPE = "--position-embedding-type rope"


def rotary_embedding(line):
    """Return the rotary embedding of a model."""
    with one_rank():
        model = built(f"{TINY} --transformer-impl local {line}")
        (found,) = (module for module in model.modules() if isinstance(module, RotaryEmbedding))
    return found


@pytest.mark.parametrize(
    "flags",
    ["", "--use-rope-scaling", "--use-rope-scaling --rope-scaling-factor 32",
     "--rotary-interleaved --rotary-base 500 --rotary-percent 0.5"],
)  # fmt: skip
def test_hybrids_rotate_as_gpts_do(flags):
    hybrid = rotary_embedding(f"{HYBRID} {ROPE} {flags}")
    gpt = rotary_embedding(f"--num-layers 1 {ROPE} {flags}")
    torch.testing.assert_close(hybrid.get_emb(10000), gpt.get_emb(10000), rtol=0, atol=0)
