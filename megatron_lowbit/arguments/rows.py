"""Tables of combinations of arguments that are refused."""

from argparse import Namespace
from collections.abc import Mapping

from megatron_lowbit.command_line import value_of
from megatron_lowbit.errors import require

Rows = dict[str, object]
"""True for a combination of arguments that is given, by the error that names it and a way out."""
_ATTRIBUTES = {"--fp8-format": "fp8", "--fp4-format": "fp4", "--use-nccl-ub": "nccl_ub"}
"""Attributes of flags that have another name."""


def excluded(args: Namespace, template: str, reasons: Mapping[str, str]) -> Rows:
    """Return the rows of excluded arguments, by a template of ``flag`` and ``reason``.

    ``reasons`` gives flags, separated by commas, for each reason. A flag is excluded in any use, or
    only above a number, such as ``--context-parallel-size above 1``.
    """
    return {
        template.format(flag=flag, reason=reason): _is_used(args, *flag.split(" above "))
        for reason, flags in reasons.items()
        for flag in flags.split(", ")
    }


def _is_used(args: Namespace, flag: str, limit: str | None = None) -> bool:
    value = vars(args)[_ATTRIBUTES[flag]] if flag in _ATTRIBUTES else value_of(args, flag)
    return value > int(limit) if limit else bool(value) and value != "none"


def refuse(rows: Rows) -> None:
    """Raise a UserError with the error of the first combination that is given."""
    for error, given in rows.items():
        require(not given, error)
