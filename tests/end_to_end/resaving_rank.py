"""One rank of a torchrun job that passes checkpoints on: ``resaving_rank.py JOB.json``.

JOB is a list of [arguments, {source folder: target folder}]. Each run is built once, and loads and
saves each of its sources without a step of training or evaluation. Without sources it trains.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from megatron_lowbit.training.arguments import parse_arguments
from megatron_lowbit.training.checkpoint import valid_iteration
from megatron_lowbit.training.loop import train
from megatron_lowbit.training.pretrain import pretrain
from megatron_lowbit.training.run import Run, restore, save


def scramble(run: Run) -> None:
    """Overwrite what a checkpoint must bring back, so that nothing can be left of the last one."""
    for chunk in run.model:
        for parameter in chunk.parameters():
            parameter.data.fill_(math.nan)
    for part in run.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                main.data.fill_(math.nan)
                for value in part.optimizer.state.get(main, {}).values():
                    value.fill_(99)


def pass_on(run: Run, copies: dict[str, str]) -> None:
    logger = SimpleNamespace(log_save=lambda *_: None)
    for source, target in copies.items():
        scramble(run)
        restore(run, source, valid_iteration(source))
        run.args.save = target
        save(run, logger)


def main() -> None:
    for arguments, copies in json.loads(Path(sys.argv[1]).read_text()):
        work = partial(pass_on, copies=copies) if copies else train
        pretrain(parse_arguments(arguments), work=work)


if __name__ == "__main__":
    main()
