"""Training's arguments of a run on another machine, parsed once for many layouts.

The parser and validation of Megatron-LM read them as on that machine: nothing is adapted to this
machine, no global variable is set and no file is opened.
"""

import argparse
import contextlib
import io
import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache

from megatron_lowbit.arguments.parse import check_given
from megatron_lowbit.arguments.parser import add_own_arguments, front_parser, read_command_line
from megatron_lowbit.arguments.precision import Machine, translate_precision
from megatron_lowbit.arguments.recipe_compatibility import check_without_recipe
from megatron_lowbit.arguments.upstream import environment, translate_refusals
from megatron_lowbit.arguments.values import HYBRID_PATTERNS, check_values, hybrid_pattern
from megatron_lowbit.command_line import CommandParser
from megatron_lowbit.errors import require

# isort: split
from megatron.training.arguments import add_megatron_arguments, validate_args

_RECIPES = Machine(capability=None, transformer_engine=False)
"""A machine without the FP8 of Megatron-LM, whose precision arguments are planned as recipes."""


@cache
def _parsers() -> tuple[CommandParser, argparse.ArgumentParser]:
    """Return the parsers of whole command lines and of what Megatron-LM takes of them."""
    upstream = argparse.ArgumentParser(allow_abbrev=False)
    add_own_arguments(add_megatron_arguments(upstream))
    return front_parser(), upstream


class TrainingArguments:
    """A command line of training, to be parsed for any number of ranks and with changes.

    Raises UserError where training would.

    Attributes:
        words: the command line, with ``@FILE`` or without.
        flags: the arguments as given, before Megatron-LM derives any from others.
        given: the same as a command line, without what was removed.
        added: arguments that training demands and that were not given.
    """

    def __init__(self, words: Sequence[str]) -> None:
        parser, self._parser = _parsers()
        args, self._command_line = read_command_line(parser, words)
        check_values(parser, args, self._command_line)
        check_given(args, self._command_line, hybrid=None)
        schedule = args.step_batch_size_schedule
        require(schedule is None, "--step-batch-size-schedule: plans are of one batch size")
        self.words, self.flags = words, args
        self.given = deepcopy(self._command_line)
        self.remove("--dry-run", "--world-size", "--gpu")
        # Training adds this one itself.
        if "--eval-interval" not in self._command_line:
            self._command_line.add("--eval-interval", "1")
        demanded: list[tuple[str, ...]] = [("--lr", "1e-4")]
        if args.train_samples is None:
            demanded.append(("--train-iters", "1000"))
        if args.seq_length is not None:
            demanded.append(("--max-position-embeddings", str(args.seq_length)))
        if not args.fp16:
            demanded.append(("--bf16",))
        self.added: list[str] = []
        for flag, *values in demanded:
            if flag not in self._command_line:
                self._command_line.add(flag, *values)
                self.added += [flag, *values]
        translate_precision(args, self._command_line, _RECIPES)
        if "--precision-recipe" not in self._command_line:
            check_without_recipe(self._command_line)
            self._command_line.add("--precision-recipe", "bf16")

    @property
    def tokens(self) -> int | None:
        """Tokens of the whole run; None where the arguments do not say it."""
        flags = self.flags
        samples = flags.train_samples or (flags.train_iters or 0) * (flags.global_batch_size or 0)
        return samples * (flags.seq_length or 0) or None

    def remove(self, *flags: str) -> None:
        """Ignore arguments from now on."""
        for flag in flags:
            self._command_line.remove(flag)
            self.given.remove(flag)

    def join_pattern(self) -> None:
        """Remove the bars, which divide a hybrid into model chunks, from now on."""
        pattern = hybrid_pattern(self.flags)
        if pattern is not None:
            self.remove(*HYBRID_PATTERNS)
            for line in (self._command_line, self.given):
                line.add("--hybrid-layer-pattern", pattern.replace("|", ""))

    def parse(self, ranks: int, more: Sequence[str] = ()) -> Namespace:
        """Return validated arguments of a run on so many ranks, with more arguments at the end."""
        tokens = [*self._command_line.tokens(), *more]
        with silenced(), translate_refusals():
            args = self._parser.parse_args(tokens)
            args.rank, args.world_size = 0, ranks
            args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
            require(args.yaml_cfg is None, "--yaml-cfg: plans are of arguments alone")
            # Megatron-LM demands 1 of some runs on some GPUs, and another number of others.
            connections = "1" if needs_one_connection(args) else "8"
            with environment("CUDA_DEVICE_MAX_CONNECTIONS", connections):
                validate_args(args, {})
        return args


def needs_one_connection(args: Namespace) -> bool:
    """Return True if Megatron-LM demands ``CUDA_DEVICE_MAX_CONNECTIONS=1`` on Hopper."""
    splits = args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1
    needs_more = (
        args.use_megatron_fsdp or args.use_torch_fsdp2 or args.overlap_moe_expert_parallel_comm
    )
    return splits and not needs_more


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide the messages of Megatron-LM about arguments and models."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
