"""Attention through torch's scaled_dot_product_attention, without a mask in memory.

torch chooses the kernel: cuDNN's or FlashAttention on GPUs in BF16, its own blocked one on CPUs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron_lowbit.megatron import cpu_runtime  # noqa: F401  before megatron

# isort: split
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

_IS_CAUSAL = {AttnMaskType.causal: True, AttnMaskType.no_mask: False}


class TorchAttention(MegatronModule):
    """megatron-core's ``DotProductAttention``, fused: causal or full, with grouped queries.

    ``apply_query_key_layer_scaling`` changes nothing: it keeps FP16 scores small until softmax
    scales them back, and the kernels' scores are FP32. Other arguments of the class that it stands
    for say nothing about the arithmetic.

    Raises ValueError for what it cannot do: context parallelism, a window, a softmax with an
    offset.
    """

    def __init__(
        self,
        config: TransformerConfig,
        attn_mask_type: AttnMaskType,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError("context_parallel_size: a sequence is not split here, leave it at 1")
        if config.window_size is not None or config.softmax_type != "vanilla":
            raise ValueError("window_size and softmax_type: only full vanilla softmax runs here")
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Context (s, b, heads * d) of query (s, b, heads, d), key and value (s, b, groups, d).

        Raises ValueError for a mask, a bias, packed sequences, or a causal query that is not as
        long as its key.
        """
        if not (attention_mask is None and attention_bias is None and packed_seq_params is None):
            raise ValueError("attention takes no mask, bias or packed sequences here: pass None")
        causal = _IS_CAUSAL.get(attn_mask_type or self.attn_mask_type)
        if causal is None or (causal and len(query) != len(key)):
            raise ValueError("attention is causal over one whole sequence here, or has no mask")
        # Kept for backward as it is, the view would keep the whole output of the QKV layer.
        value = value.contiguous()
        dropout = self.dropout if self.training else 0.0
        with self._random_state(dropout):
            context = F.scaled_dot_product_attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
                dropout_p=dropout,
                is_causal=causal,
                scale=self.softmax_scale,
                enable_gqa=query.size(2) != key.size(2),
            )
        # The kernels lay their output out as the query: no copy.
        return context.permute(2, 0, 1, 3).flatten(2)

    def _random_state(self, dropout: float) -> AbstractContextManager:
        """Tensor-parallel ranks, which hold other heads, drop by other numbers.

        Under sequence parallelism megatron-core has entered that state around the whole block.
        """
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()
