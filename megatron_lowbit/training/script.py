"""What the scripts beside the package do: parse, build, train."""

import warnings

from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.hybrid_arguments import require_hybrid


def run_script(hybrid: bool) -> None:
    """Pretrain what the command line says, a ``hybrid`` or a GPT.

    Raises:
        UserError, TrainingError: as ``parse_arguments`` and ``pretrain``.
    """
    args = parse_arguments()
    require_hybrid(args, hybrid)
    # Advice to megatron-core's own developers, and that Apex is absent: nothing a user can act on.
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed")
    # After parsing: --help and a wrong argument need not wait for torch and megatron.
    from megatron_lowbit.training.pretrain import pretrain

    pretrain(args)
