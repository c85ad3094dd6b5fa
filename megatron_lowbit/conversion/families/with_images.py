"""Models with images, whose text model is converted.

Their config.json holds the text model's in ``text_config``, and their tensors have longer names.
"""

from typing import Any

from megatron_lowbit.conversion.families import FAMILIES
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries, as_object

ARCHITECTURES = (
    "Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)  # fmt: skip
_PARTS = ("vision_tower.", "multi_modal_projector.")
OF_IMAGES = (*_PARTS, *(f"model.{part}" for part in _PARTS))
"""Starts of the names of tensors that are not the text model's."""
RENAMED = {
    "model.": ("language_model.model.", "model.language_model."),
    "lm_head.": ("language_model.lm_head.",),
}
"""Starts of the names of a text model's tensors, and those that they have in a model with images.

The first of each are in older files.
"""


def text_config(config: dict[str, Any], file: str) -> dict[str, Any] | None:
    """Return the config.json of a text model; None where the model has no images.

    Raises UserError where no family is of the text model's type.
    """
    names = Entries(config, file).strings("architectures")
    if not names or names[0] not in ARCHITECTURES:
        return None
    place = f"{file}: text_config"
    text = as_object(config.get("text_config"), place)
    model_type = Entries(text, place).string("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type:
            shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
            return {**text, **shared, "architectures": [family.architecture]}
    raise UserError(f"{place}: model_type {model_type} is of no family that is converted")
