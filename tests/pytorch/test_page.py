"""The code of docs/pytorch.md, and that none of it imports Megatron-LM."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from block_model import build
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5Model

from megatron_lowbit import LowbitLinear, convert
from megatron_lowbit.errors import UserError

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"


def small_t5() -> nn.Module:
    sizes = dict(vocab_size=16, d_model=32, d_ff=32, d_kv=16, num_heads=2, num_layers=2)
    return T5Model(T5Config(**sizes, decoder_start_token_id=0))


def test_the_pages_code(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    models = {
        "model": build(),
        "encoder_decoder": small_t5(),
        "sequential": nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)),
    }
    for block in blocks:
        exec(block, models)
    assert "dgrad=(nvfp4 SR x nvfp4-2d)" in capsys.readouterr().out
    counts = [
        sum(type(module) is LowbitLinear for module in models[name].modules())
        for name in ("model", "encoder_decoder", "sequential")
    ]
    # Two linears in two of four blocks; 4 attention and 2 feed-forward, decoders 4 more.
    assert counts == [4, 2 * 6 + 2 * 10, 2]


def test_gpt2_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=32, n_layer=2, n_head=2))
    with pytest.raises(UserError, match="Conv1D"):
        convert(model, "fp8-tile")


@pytest.mark.slow
def test_megatron_lm_is_not_imported():
    code = (
        "import sys, torch; from megatron_lowbit import convert\n"
        "from megatron_lowbit.kernels.engine import ReferenceEngine\n"
        "from megatron_lowbit.pytorch import linear\n"
        "linear.select_engine = lambda device: ReferenceEngine('tests')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n"
        "convert(model, 'fp8-row', blocks='')(torch.randn(4, 32)).sum().backward()\n"
        "sys.exit('megatron' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
