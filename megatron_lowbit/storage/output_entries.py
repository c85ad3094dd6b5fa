"""Names of the files in folders that conversions write: ``--force`` deletes no folder with others.

A checkpoint of stock Megatron-LM has the same names as a converted one, except ``lowbit.json``.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from megatron_lowbit.errors import UserError, require
from megatron_lowbit.storage import files
from megatron_lowbit.storage.lock import LOCK

JOURNAL = ".finished.jsonl"
COMPANIONS = (
    "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja", "generation_config.json", "*.model",
)  # fmt: skip
"""Files other than weights that a converted folder keeps."""
_HUGGING_FACE = (
    "config.json", "model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json",
    "hf_quant_config.json", "quantization_report.json", *COMPANIONS,
)  # fmt: skip
_ITERATION = (files.METADATA, files.CONFIG, files.DOCUMENT, "__0_*.distcp")
_WRITTEN = (
    LOCK, JOURNAL, *_HUGGING_FACE, files.TRACKER, "model.args",
    *(f"iter_*/{name}" for name in _ITERATION), *(f"hugging_face/{name}" for name in _HUGGING_FACE),
)  # fmt: skip


def check_replaceable(output: Path) -> None:
    """Raise UserError unless an output is an empty folder, or a model with files of conversions."""
    names = {entry.name for entry in output.iterdir()} - {LOCK} if output.is_dir() else {""}
    is_model = not names.isdisjoint({"config.json", files.TRACKER})
    message = f"{output} is no converted model or checkpoint, which --force replaces"
    require(not names or is_model, f"{message}; move it")
    if foreign := next(_foreign_entries(output), None):
        raise UserError(f"{message}: no conversion writes {foreign.relative_to(output)}; move it")


def _foreign_entries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            # Only this project records the files of a checkpoint.
            if path.name.startswith("iter_") and not (path / files.DOCUMENT).is_file():
                yield path
        elif not any(_matches(path.relative_to(folder), pattern) for pattern in _WRITTEN):
            yield path


def _matches(path: PurePath, pattern: str) -> bool:
    """Match a path part by part, so that ``*`` stays within a folder."""
    parts, patterns = path.parts, pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
