"""Supply what the PyPI package of Megatron-LM 0.19.2 expects and does not find.

``typing.override`` is missing from Python 3.11. The Makefile of the dataset helpers is missing from
the package, which holds the compiled helpers themselves. Multi-latent attention gives the width of
its keys and values to its core attention, and the local one does not take them. Where Apex is
installed, local models get its norm, which refuses RMSNorm. Every parser of its arguments reads
the source code of its classes anew. What local layers compute wrongly or
cannot train is refused. See docs/upstream-notes.md.
"""

import sys
import typing
from argparse import Namespace
from functools import wraps
from typing import Any

from megatron_lowbit.errors import require

if sys.version_info < (3, 12):
    from typing_extensions import override

    typing.override = override  # type: ignore[attr-defined]


def use_prebuilt_dataset_helpers() -> None:
    """Let ``initialize_megatron`` take the compiled dataset helpers that the package holds."""
    from megatron.core.datasets import helpers_cpp, utils  # noqa: F401  their presence is the point

    utils.compile_helpers = lambda: None


def read_sources_once() -> None:
    """Let parsers of Megatron-LM's arguments share the help that they take from source code."""
    from megatron.training.argument_utils import ArgumentGroupFactory

    upstream = ArgumentGroupFactory._get_field_docstrings
    if hasattr(upstream, "__wrapped__"):
        return
    found: dict[type, dict[str, str]] = {}

    @wraps(upstream)
    def read_once(factory: ArgumentGroupFactory, kind: type) -> dict[str, str]:
        if kind not in found:
            found[kind] = upstream(factory, kind)
        return dict(found[kind])

    ArgumentGroupFactory._get_field_docstrings = read_once


def check_local_layers(args: Namespace) -> None:
    """Raise UserError for models that Megatron-LM's local layers do not train correctly."""
    if args.transformer_impl != "local":
        return
    require(
        not args.multi_latent_attention or args.tensor_model_parallel_size == 1,
        "--multi-latent-attention with --transformer-impl local: Megatron-LM's gradient of the "
        "shared rotary key is wrong; --tensor-model-parallel-size must be 1",
    )
    require(
        args.num_experts is None or not args.add_bias_linear,
        "--num-experts with --transformer-impl local: Megatron-LM cannot train experts that have "
        "biases; give --disable-bias-linear",
    )


def use_local_latent_attention() -> None:
    """Let local core attention take the width of multi-latent attention's keys and values."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    upstream = DotProductAttention.__init__
    if hasattr(upstream, "__wrapped__"):
        return

    @wraps(upstream)
    def init(
        self: DotProductAttention,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        upstream(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    DotProductAttention.__init__ = init


def use_torch_rms_norm() -> None:
    """Let Megatron-LM's norm of Apex be torch's where the model has RMSNorm, which Apex lacks."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    if "__new__" not in vars(FusedLayerNorm):  # A CPU has replaced it already.
        FusedLayerNorm.__new__ = staticmethod(_norm_of)


def _norm_of(kind: type, config: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return the norm of a configuration; without one, as copies are made, an empty ``kind``."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if config is None or config.normalization == "LayerNorm":
        return object.__new__(kind)
    return WrappedTorchNorm(config, *args, **kwargs)
