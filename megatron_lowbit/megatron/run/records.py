"""Records of recipe and data in checkpoints, and their comparison when a run resumes.

They are saved with the run's arguments: ``recipe_record``, the text of the recipe, and
``data_record``, digests of the data sets by prefix, since a path does not tell that a file has
changed.
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lowbit.data.dataset import dataset_digest
from megatron_lowbit.errors import UserError
from megatron_lowbit.json_files import Entries
from megatron_lowbit.megatron.datasets import data_prefixes
from megatron_lowbit.megatron.run.common_state import has_common_state, read_common_state
from megatron_lowbit.megatron.run.errors import raise_on_all_ranks, say_on_rank_0
from megatron_lowbit.megatron.run.load_source import LoadSource
from megatron_lowbit.recipes import record as recipe_records

RECIPE, DATA = "recipe_record", "data_record"
"""Names of the records among a run's arguments."""
_OTHER = {"recipe": "another recipe", "data": "other data"}
_SHOWN = 12
"""Digits of a digest in messages."""


def record_recipe(args: Namespace) -> None:
    """Let the checkpoints of a run record its recipe, as the attribute ``recipe_record``.

    Raises:
        UserError: the recipe does not exist or is wrong.
    """
    words = (args.fp8, args.fp8 and args.fp8_recipe, args.fp4, args.fp4 and args.fp4_recipe)
    formats = " ".join(str(word) for word in words if word)
    upstream = formats and f"Megatron-LM's own {formats}"
    names = args.precision_recipe or []
    setattr(args, RECIPE, recipe_records.record_of(names, args.recipe_set, upstream))


def record_data(args: Namespace) -> None:
    """Let the checkpoints of a run record its data sets; all ranks together.

    The attribute ``data_record`` has the digest of each data set by its prefix; none for mock data.
    A run that neither loads nor saves reads nothing.
    """
    if args.save is None and args.load is None:
        return
    record: list[dict[str, str]] = [{}]
    with raise_on_all_ranks("read the data"):
        if dist.get_rank() == 0 and not args.mock_data:
            digests = {prefix: dataset_digest(prefix) for prefix in data_prefixes(args)}
            record = [{prefix: sha256 for prefix, sha256 in digests.items() if sha256 is not None}]
    dist.broadcast_object_list(record, src=0)
    setattr(args, DATA, record[0])


def check_resumed(args: Namespace) -> None:
    """Compare a run's recipe and data with the checkpoint from which it resumes.

    Differences that ``--resume-changed`` names are printed, and so is other data at a transition of
    ``--phase-transition-iterations``. All ranks together. A run that does not train, or starts from
    iteration 0, may have any.

    Raises:
        UserError: another one differs.
    """
    with raise_on_all_ranks("read the checkpoint in", args.load):
        source = LoadSource.of(args) if dist.get_rank() == 0 else None
        if source is not None and source.iteration and not args.skip_train:
            begins_phase = source.iteration in (args.phase_transition_iterations or ())
            for name, text in _differences(args, source.path):
                if name not in args.resume_changed and not (name == "data" and begins_phase):
                    raise UserError(
                        f"{source.path}: saved by a run with {_OTHER[name]}: this one has {text}; "
                        f"--resume-changed {name} resumes with it"
                    )
                say_on_rank_0(f"resumed with {_OTHER[name]}: {text}")


def _differences(args: Namespace, checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind of each record that differs, with the part of a line that says how."""
    saved = read_common_state(checkpoint).get("args") if has_common_state(checkpoint) else None
    records = {name: getattr(saved, name, None) for name in (RECIPE, DATA)}
    if missing := [name.partition("_")[0] for name, record in records.items() if record is None]:
        say_on_rank_0(
            f"{checkpoint}: records no {' and '.join(missing)} to compare with this run's"
        )
    if (recipe := records[RECIPE]) is not None:
        recipe = recipe_records.checked(recipe, f"{checkpoint}: {RECIPE}")
        if text := recipe_records.difference(getattr(args, RECIPE), recipe):
            yield "recipe", text
    if (data := records[DATA]) is not None:
        entries = Entries(data, f"{checkpoint}: {DATA}")
        before = {prefix: entries.string(prefix) for prefix in entries}
        now: dict[str, Any] = getattr(args, DATA)
        if set(now.values()) != set(before.values()):
            yield "data", f"{_named(now, before)} instead of {_named(before, now)}"


def _named(these: Mapping[str, str], others: Mapping[str, str]) -> str:
    """Name the data sets that are not among the others."""
    shown = [
        f"{prefix} (SHA-256 {digest[:_SHOWN]})"
        for prefix, digest in these.items()
        if digest not in others.values()
    ]
    return ", ".join(shown) or ("nothing" if these else "mock data")
