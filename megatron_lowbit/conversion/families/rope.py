"""Rotary embeddings: their base, and scaled frequencies (linear, Llama 3.1's and YaRN)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lowbit.checkpoints.hugging_face_files import CONFIG
from megatron_lowbit.conversion.family import Entry, check_arguments, integer, positive_number
from megatron_lowbit.conversion.mapping import Model
from megatron_lowbit.errors import UserError, require
from megatron_lowbit.json_files import Entries

LLAMA3_ROPE = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
"""Values of Llama 3.1's scaling of frequencies that megatron-core fixes."""
_LENGTH = "original_max_position_embeddings"
_YARN = {
    "rotary_scaling_factor": positive_number("factor"),
    "yarn_original_max_position_embeddings": integer(_LENGTH),
    "yarn_beta_fast": positive_number("beta_fast", 32.0),
    "yarn_beta_slow": positive_number("beta_slow", 1.0),
    "yarn_correction_range_round_to_int": Entry(
        "truncate", lambda rope: rope.boolean("truncate", True)
    ),
}
"""Arguments with their entries inside the entries of rotary embeddings."""
TYPES_OF_PAIRS = ("default", "dynamic", "linear", "llama3")
"""Types of scaling if neighboring channels turn together, which Megatron-LM's YaRN does not do.

Dynamic scaling has no effect up to ``max_position_embeddings`` tokens.
"""
_TYPES = (*TYPES_OF_PAIRS, "yarn")
_ROUNDED = 1e-6
"""Relative difference of rotary bases that turns angles by less than FP32 rounds the largest."""


def rope_entries(entries: Entries) -> Entries:
    """Return the entries of rotary embeddings, as transformers merges them.

    Their older name takes precedence, and so does the length outside of them.
    """
    rope = entries.inner("rope_scaling") or entries.inner("rope_parameters")
    if rope_type(rope) not in ("llama3", "yarn"):
        return rope
    usual = rope.integer(_LENGTH, entries.integer("max_position_embeddings"))
    return rope.updated(_LENGTH, entries.integer(_LENGTH, usual))


def rope_type(rope: Entries) -> str:
    """Return the type of scaling, under its newer or its older name."""
    return rope.string("rope_type", rope.string("type", "default"))


def scaled_rope(rope: Entries, wanted: str, fixed: Mapping[str, float]) -> Entries | None:
    """Return the entries of rotary embeddings whose frequencies are scaled; None without scaling.

    Raises UserError for another type of scaling, or values other than those that megatron-core has.
    """
    actual = rope_type(rope)
    if actual == "default":
        return None
    require(actual == wanted, f"{CONFIG}: rope_type {actual!r}: only {wanted!r} is converted")
    for key, value in fixed.items():
        if rope.number(key) != value:
            raise UserError(f"{CONFIG}: {key} {rope.number(key)}: megatron-core's is {value!r}")
    return rope


def rotary_base(
    key: str, default: int, rope: Callable[[Entries], Entries] = rope_entries, prefix: str = ""
) -> Entry:
    """Return the entry for a rotary base, at the top level or among the entries of ``rope``."""

    def read(entries: Entries) -> int:
        base = rope(entries).number("rope_theta", entries.number(key, default), above=1)
        message = f"{CONFIG}: {prefix}rope_theta {base}: Megatron-LM's is an integer"
        # StarCoder2-3B has 999999.442.
        require(math.isclose(base, round(base), rel_tol=_ROUNDED), message)
        return round(base)

    return Entry(key, read, float)


def linear_factor(rope: Entries) -> int | None:
    """Return the factor by which linear scaling divides positions; None without it."""
    if rope_type(rope) != "linear":
        return None
    factor = rope.number("factor", above=0)
    require(factor.is_integer(), f"{CONFIG}: factor {factor}: Megatron-LM's is an integer")
    return int(factor)


def linear_scaling(factor: int | None) -> dict[str, Any] | None:
    """Return the entries that divide positions by a factor."""
    return {"rope_type": "linear", "factor": float(factor)} if factor else None


def rotated_part(default: float) -> Entry:
    """Return the entry for the part of a head's channels that rotary embeddings turn."""
    key = "partial_rotary_factor"

    def read(entries: Entries) -> float:
        rope = rope_entries(entries)
        part = rope.number(key, entries.number(key, default), above=0)
        require(part <= 1, f"{CONFIG}: {key} {part}: must be at most 1")
        message = f"{CONFIG}: {key} {part}: Megatron-LM's YaRN turns all channels of a head"
        require(part == 1 or rope_type(rope) != "yarn", message)
        return part

    return Entry(key, read)


def rope_arguments(entries: Entries, *types: str) -> dict[str, Any]:
    """Return Megatron-LM's arguments of frequencies scaled as in Llama 3.1 or by YaRN.

    Args:
        entries: config.json.
        *types: types of scaling that are converted; without any, all that Megatron-LM has.

    Raises UserError for a type or a value that Megatron-LM does not have.
    """
    types = types or _TYPES
    rope = rope_entries(entries)
    actual, known = rope_type(rope), ", ".join(map(repr, types))
    require(actual in types, f"{CONFIG}: rope_type {actual!r}: only {known} are converted")
    if actual == "llama3":
        scaled_rope(rope, actual, LLAMA3_ROPE)
        return {"use_rope_scaling": True, "rope_scaling_factor": rope.number("factor", above=0)}
    if actual != "yarn":
        return {}
    yarn = {name: entry.read(rope) for name, entry in _YARN.items()}
    return {"position_embedding_type": "yarn", **yarn, **yarn_scales(rope)}


def yarn_scales(rope: Entries) -> dict[str, float]:
    """Return the arguments from which YaRN's attention factor is derived.

    Raises UserError for another attention factor, or scales that the two sides read differently.
    """
    all_dimensions = rope.number("mscale_all_dim", 0.0)
    mscale = rope.number("mscale", 0.0 if all_dimensions else 1.0)
    _check_scales(f"{CONFIG}:", mscale, all_dimensions)
    growth = 0.1 * math.log(max(rope.number("factor", above=0), 1))
    derived = (1 + mscale * growth) / (1 + all_dimensions * growth)
    factor = rope.number("attention_factor", derived)
    message = f"{CONFIG}: attention_factor {factor}: Megatron-LM derives {derived} from factor"
    require(math.isclose(factor, derived), message)
    return {"mscale": mscale, "mscale_all_dim": all_dimensions}


def yarn_scale_entries(model: Model) -> dict[str, float]:
    """Return the entries of :func:`yarn_scales`, which are none by default."""
    scales = {name: model[name] for name in ("mscale", "mscale_all_dim")}
    _check_scales("the model has", *scales.values())
    return scales if scales["mscale_all_dim"] else {}


def _check_scales(subject: str, mscale: float, all_dimensions: float) -> None:
    """Raise UserError where transformers and Megatron-LM do not scale attention alike."""
    require(
        (mscale > 0 and all_dimensions > 0) or (mscale, all_dimensions) == (1, 0),
        f"{subject} mscale {mscale} with mscale_all_dim {all_dimensions}: transformers and "
        "Megatron-LM scale attention alike only if both are above 0, or 1 and 0",
    )


def rope_entry(model: Model) -> dict[str, Any]:
    """Return the entry of a model's scaled frequencies.

    Raises UserError for scales, or for two scalings together, that transformers does not have.
    """
    scalings = [linear_scaling(model.get("rotary_seq_len_interpolation_factor"))]
    if model.get("use_rope_scaling"):
        factor = model["rope_scaling_factor"]
        scalings.append({"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE})
    if "yarn_beta_fast" in model:
        check_arguments(model, "model with YaRN", {"rotary_percent": 1.0})
        yarn = {entry.key: entry.write(model[name]) for name, entry in _YARN.items()}
        scalings.append({"rope_type": "yarn", **yarn, **yarn_scale_entries(model)})
    scaled = [scaling for scaling in scalings if scaling]
    message = (
        "the model scales rotary frequencies in several ways; transformers knows one at a time"
    )
    require(len(scaled) <= 1, message)
    return {"rope_scaling": scaled[0] if scaled else None}
