"""Differences between serving engines and an export, about which the export tells its user."""

from collections.abc import Iterable, Sequence

from megatron_lowbit.conversion.layouts.layout import Weight

_FUSED = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Weights of latent attention that serving engines multiply as one matrix, Megatron-LM as two."""


def scales_lost_in_engines(weights: Iterable[tuple[Sequence[str], Weight]]) -> str | None:
    """Return advice about weights that serving engines load with another tensor scale, or None.

    vLLM 0.32.0 and SGLang 0.5.23 load ``_FUSED`` as one matrix with one tensor scale. vLLM takes
    one of the two without an error, and so decodes the other weight wrong.
    """
    scaled = {name for names, weight in weights if weight.format.tensor_scaled for name in names}
    first, second = _FUSED
    modules = sorted(name.removesuffix(first) for name in scaled if name.endswith(first))
    fused = [module for module in modules if module + second in scaled]
    return (
        f"vLLM and SGLang give {fused[0]}{first} and {second} one tensor scale, but they have two "
        f"({len(fused)} such pairs): for these engines keep both in high precision by a matcher, "
        "or use a format without tensor scale"
        if fused
        else None
    )
