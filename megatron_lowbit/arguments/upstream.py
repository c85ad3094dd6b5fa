"""Megatron-LM's own parsing and validation of a command line, its errors, and what it prints."""

import io
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import Any, TextIO

from megatron_lowbit.arguments.parser import add_own_arguments
from megatron_lowbit.arguments.values import (
    check_microbatches,
    check_profiled_iterations,
    check_samples,
    check_warmup,
)
from megatron_lowbit.errors import UserError, as_user_error, failed_check, require, terminal
from megatron_lowbit.replaced import replaced

_REFUSALS = (AssertionError, ValueError, RuntimeError, OSError, ImportError)
"""Exceptions by which Megatron-LM refuses arguments."""


def parse_upstream(tokens: list[str], predictions: int | None) -> Namespace:
    """Run Megatron-LM's parsing and validation, which read ``sys.argv``, or raise UserError.

    ``predictions`` is the ``--mtp-num-layers`` that is given.
    """
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.global_vars import unset_global_variables

    try:
        with translate_refusals(), command_line(tokens), translate_tokenizer_errors():
            args: Namespace = parse_and_validate_args(extra_args_provider=add_own_arguments)
            check_warmup(args)
            check_profiled_iterations(args)
            if not args.skip_train:
                check_microbatches(args)
            if args.full_validation or args.eval_iters > 0:
                check_microbatches(args, "eval-")
            if not args.dry_run:
                check_samples(args)
            _check_vocabulary(args)
            _check_predictions(args, predictions)
        return args
    except UserError:
        # Variables that are set by now would prevent another run in this process.
        unset_global_variables()
        raise


def command_line(tokens: Sequence[str]) -> AbstractContextManager[None]:
    """Set the arguments in ``sys.argv``, which Megatron-LM parses."""
    return replaced(sys, "argv", [sys.argv[0], *tokens])


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Set an environment variable that Megatron-LM reads; None leaves it unchanged."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


@contextmanager
def translate_refusals() -> Iterator[None]:
    """Raise a UserError in place of an exception by which Megatron-LM refuses arguments."""
    try:
        yield
    except UserError:
        raise
    except _REFUSALS as error:
        raise UserError(in_one_line(error)) from error
    except Exception as error:
        # Megatron-LM computes with some values before it checks them.
        raise UserError(f"Megatron-LM cannot follow the arguments: {in_one_line(error)}") from error


def _check_vocabulary(args: Namespace) -> None:
    """Raise UserError if tensor-parallel ranks cannot divide the embedding's rows evenly."""
    rows, ranks = args.padded_vocab_size or 0, args.tensor_model_parallel_size
    require(
        rows % ranks == 0,
        f"--padded-vocab-size {rows} cannot be divided by --tensor-model-parallel-size {ranks}; "
        f"give --padded-vocab-size {rows + -rows % ranks}, also for a checkpoint with {rows} rows: "
        "the other rows stand for no token",
    )


def _check_predictions(args: Namespace, given: int | None) -> None:
    """Raise UserError for multi-token prediction that a hybrid's pattern does not have."""
    if args.hybrid_layer_pattern is None or given is None:
        return
    predictions = args.mtp_num_layers if "/" in args.hybrid_layer_pattern else 0
    require(
        given == predictions,
        f"--mtp-num-layers {given}: --hybrid-layer-pattern {args.hybrid_layer_pattern} has "
        f"{predictions} layers of multi-token prediction; append a pattern for each, such as /*-",
    )


def translate_tokenizer_errors() -> AbstractContextManager[None]:
    """Raise UserError for a tokenizer that Megatron-LM cannot build."""
    from megatron.training import global_vars

    original = global_vars.build_tokenizer

    def build(args: Namespace) -> Any:
        require(args.tokenizer_type, "give --tokenizer-type, such as HuggingFaceTokenizer")
        name = f"--tokenizer-model {args.tokenizer_model}"
        if args.tokenizer_model is None:
            name = f"--tokenizer-type {args.tokenizer_type} without --tokenizer-model"
        with as_user_error(f"{name}: cannot be loaded"):
            return original(args)

    return replaced(global_vars, "build_tokenizer", build)


def in_one_line(error: Exception) -> str:
    """Return the message of an exception of Megatron-LM; without a message, the failed check."""
    message = " ".join(str(error).split())
    if not message:
        check = failed_check(error).removesuffix(" is not None")
        missing = re.fullmatch(r"args\.\w+", check)
        message = f"{check} is missing" if missing else f"Megatron-LM requires {check}"
    if "apply_rope_fusion" in message:  # a field of the configuration, true by default
        message += " Or give --no-rope-fusion."
    return re.sub(r"\bargs\.(\w+)", lambda match: "--" + match[1].replace("_", "-"), message)


class _Redirected(io.TextIOBase):
    """Standard output that passes its text to a function; ``terminal`` is the stream before it."""

    def __init__(self, receive: Callable[[str], object], terminal: TextIO) -> None:
        self._receive, self.terminal = receive, terminal

    def write(self, text: str) -> int:
        """Pass a text, which ``print`` splits into its message and the end of the line."""
        self._receive(text)
        return len(text)


@contextmanager
def redirect_upstream(receive: Callable[[str], object]) -> Iterator[None]:
    """Call a function with each printed, logged or warned text, except the texts of ``say``."""
    from megatron.training import training  # noqa: F401  installs the handler
    from megatron.training.log_handler import CustomHandler

    stream = _Redirected(receive, terminal())
    root = logging.getLogger()
    streams = {h: h.stream for h in root.handlers if isinstance(h, CustomHandler)}
    for handler in streams:
        handler.stream = stream
    logging.captureWarnings(True)
    try:
        with redirect_stdout(stream):
            yield
    finally:
        logging.captureWarnings(False)
        for handler, before in streams.items():
            handler.stream = before
