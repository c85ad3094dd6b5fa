"""``lowbit-pretrain``: parse, build, train."""

import warnings
from collections.abc import Sequence

from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.hybrid_arguments import require_hybrid


def main(argv: Sequence[str] | None = None, hybrid: bool | None = None) -> None:
    """Pretrain what the command line says: a hybrid where it gives a pattern of blocks, or a GPT.

    ``hybrid``, where it is given, says which of the two a script is for.

    Raises:
        UserError, TrainingError: as ``parse_arguments`` and ``pretrain``.
    """
    args = parse_arguments(argv)
    if hybrid is not None:
        require_hybrid(args, hybrid)
    # Advice to megatron-core's own developers, and that Apex is absent: nothing a user can act on.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    # After parsing: --help and a wrong argument need not wait for torch and megatron.
    from megatron_lowbit.training.pretrain import pretrain

    pretrain(args)
