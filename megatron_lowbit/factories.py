"""Factories of quantizers by name, for Megatron-LM's own scripts.

``megatron_lowbit.factories.mxfp8`` is one. A name is a shipped recipe's, or ``RECIPE__CONFIG``
where a recipe has several precisions, with underscores for hyphens. Importing this module imports
neither Megatron-LM nor Transformer Engine; the first use of a name imports the latter.
"""

from functools import cache
from typing import Any

from megatron_lowbit.recipes.te_config import factory_precision


@cache
def __getattr__(name: str) -> Any:
    """Return the one factory of a name: Transformer Engine compares recipes by their factories.

    Raises AttributeError for another name, and UserError where the recipe needs what a factory
    lacks.
    """
    precision = factory_precision(name)

    import torch

    from megatron_lowbit.kernels.select import select_engine
    from megatron_lowbit.transformer_engine.named import NamedFactory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return NamedFactory(name, precision, select_engine(device))
