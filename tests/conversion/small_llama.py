"""A Llama in Hugging Face's format, of any size, in files of any size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import SIZES, make_model

from megatron_lowbit.conversion.convert import to_megatron
from megatron_lowbit.errors import UserError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def write_llama(
    folder: Path,
    config: dict[str, Any] | None = None,
    shard_bytes: int = 10**9,
    dtype: torch.dtype = torch.float32,
    **changes: torch.Tensor | None,
) -> int:
    """Write config.json and random weights; return the largest file's bytes.

    ``changes`` puts tensors in the place of the model's, or takes them away.
    """
    config = CONFIG | (config or {})
    sizes = {name: config[name] for name in (*SIZES, "tie_word_embeddings")}
    with torch.device("meta"):
        model = make_model("llama", **sizes)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = {name: torch.rand(part.shape).to(dtype) for name, part in model.named_parameters()}
    made |= changes
    shards, size = [{}], 0
    for name, tensor in made.items():
        if tensor is None:
            continue
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"{number}.safetensors", metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, f"{number}.safetensors")
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def refused(source: Path, message: str, convert=to_megatron, *rest) -> None:
    """Check that a conversion is refused with this message in one line, and leaves nothing."""
    with pytest.raises(UserError, match=message) as caught:
        convert(source, source.parent / "out", *rest)
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 600
    assert [path.name for path in source.parent.iterdir()] == [source.name]
