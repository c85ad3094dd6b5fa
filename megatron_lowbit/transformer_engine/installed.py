"""Whether Transformer Engine's layers can be used here. Imports them only to find out."""

import importlib
import importlib.util

import torch

from megatron_lowbit.errors import UserError

INSTALL = "pip install --no-build-isolation 'transformer_engine[pytorch]==2.20.2'"


def choose(requested: str | None, unsupported: str | None) -> tuple[str, str]:
    """``local`` or ``transformer_engine``, and why, from ``--transformer-impl``.

    Without a request Transformer Engine where it works, as in Megatron-LM. ``unsupported`` says
    what of the model it cannot do.

    Raises:
        UserError: it is asked for, but cannot be used.
    """
    if requested == "local":
        return "local", "asked for"
    why_not = missing() if unsupported is None else unsupported
    if why_not is None:
        return "transformer_engine", "asked for" if requested else "installed"
    if requested is not None:
        raise UserError(f"--transformer-impl transformer_engine: {why_not}")
    return "local", why_not


def missing() -> str | None:
    """Why Transformer Engine cannot be used; None where it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed: {INSTALL}"
    if not torch.cuda.is_available():
        return "Transformer Engine needs a GPU, and there is none here"
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Its import loads libraries, and fails in as many ways as they do.
    except Exception as error:
        line = (str(error).splitlines() or [""])[0]
        return f"Transformer Engine cannot be imported ({type(error).__name__}: {line})"
    return None
