"""A run in this process: its end, interruptions, determinism, infinities, compiled layers."""

import shlex
from argparse import Namespace

import pytest
import torch
import torch._inductor.config as inductor

from megatron_lowbit.arguments import parse_arguments
from megatron_lowbit.arguments.upstream import command_line
from megatron_lowbit.megatron import pretrain
from megatron_lowbit.megatron.layers.local import linears_of
from megatron_lowbit.storage import files
from tests.marks import others_slow
from tests.megatron.tiny_models import TINY
from tests.short_runs import steps

# isort: split
from megatron.training import training

ARGUMENTS = f"""
    {TINY} --num-layers 2 --swiglu --position-embedding-type rope --global-batch-size 2
    --eval-interval 100
"""
NVFP4 = "--precision-recipe nvfp4 --recipe-set bf16_blocks=none"


def train(line: str, *hooks) -> None:
    args = parse_arguments(shlex.split(f"{ARGUMENTS} {line}"))
    with pretrain.teardown(), command_line(args.upstream_command_line):
        pretrain.run(args, hooks)


# -- infinite activations and gradients: Megatron-LM's checks, and their place in the log ----------

MLP = "decoder.layers.1.mlp"


class Infinity(torch.autograd.Function):
    """Identity with one infinite value in the input or in its gradient."""

    @staticmethod
    def forward(ctx, x, backward: bool):
        ctx.backward = backward
        return x if backward else _with_infinity(x)

    @staticmethod
    def backward(ctx, grad):
        return _with_infinity(grad) if ctx.backward else grad, None


def _with_infinity(x):
    x = x.clone()
    x.view(-1)[7] = torch.inf
    return x


def train_with_infinity(line: str, backward: bool) -> None:
    """Run two iterations with an infinity in fc2's input of the last MLP, or in its gradient."""

    def spoil(chunks):
        linears_of(chunks[0])[f"{MLP}.linear_fc2"].register_forward_pre_hook(
            lambda module, inputs: (Infinity.apply(inputs[0], backward), *inputs[1:])
        )
        return chunks

    with pytest.raises(RuntimeError, match="Unexpected result nan"):
        train(f"--rerun-mode disabled {line}", spoil)


@pytest.mark.parametrize("backward", others_slow([False, True], [True]))
def test_a_run_with_values_that_are_not_finite_ends(backward):
    """Amax histories do not hide it; runs of NVFP4 are below."""
    train_with_infinity("--precision-recipe fp8-delayed", backward)


@pytest.mark.parametrize("backward", others_slow((True, False), (True,)))
def test_the_log_says_where_values_are_not_finite(backward, tmp_path, capsys):
    train_with_infinity(f"{NVFP4} --log-quantization-error-interval 1 --save {tmp_path}", backward)
    lines = [line for line in capsys.readouterr().out.splitlines() if "nonfinite" in line]
    # SwiGLU's gradient has two values for one.
    first = (
        "linear_fc1 dgrad/grad/nonfinite: 2" if backward else "linear_fc2 fprop/input/nonfinite: 1"
    )
    assert lines == [f"rank 0, iteration 1: {MLP}.{first}, the first of them"]


# -- torch.compile ---------------------------------------------------------------------------------


def compile_linears(chunks):
    for module in linears_of(chunks[0]).values():
        module.compile(backend="aot_eager")
    return chunks


@pytest.mark.slow
def test_losses_of_compiled_layers(tmp_path):
    """Each microbatch has its own random numbers; a traced constant key would change losses."""

    def run(name, *hooks):
        train(f"{NVFP4} --micro-batch-size 1 --train-iters 3 --save {tmp_path / name}", *hooks)
        return steps(tmp_path / name)

    assert run("compiled", compile_linears) == run("eager")


# -- determinism -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False])
def test_memory_is_filled_unless_megatron_lm_asks_for_determinism(mode):
    """Without the mode, torch's setting is a user's own."""
    torch.use_deterministic_algorithms(True)
    with pretrain.unfilled_memory(Namespace(deterministic_mode=mode)):
        assert torch.empty(2**20).isnan().all() != mode
    assert torch.empty(2**20).isnan().all()


def test_the_mode_ends_with_the_run(monkeypatch):
    """The next run of a process may be without it."""
    during = []

    def modes() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), inductor.deterministic

    monkeypatch.setattr(pretrain, "run", lambda args: during.append(modes()))
    pretrain.main(shlex.split(f"{ARGUMENTS} --deterministic-mode"))
    assert during == [(True, True)] and modes() == (False, False)


# -- the end of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "skipped"), [(250, True), (240, False)])
def test_the_last_iteration_is_validated_once(monkeypatch, last, skipped):
    """Test data is another matter, and so is an iteration that the loop has not validated."""
    calls = []
    monkeypatch.setattr(training, "evaluate_and_print_results", lambda *all, **_: calls.append(all))
    upstream = training.evaluate_and_print_results
    loop, end = "iteration 250", f"iteration {last} on validation set"
    test = "iteration 250 on test"
    with pretrain.validate_once():
        for prefix in (loop, end, test):
            training.evaluate_and_print_results(prefix, "forward", verbose=True)
    assert calls == [(loop, "forward"), *[(end, "forward")] * (not skipped), (test, "forward")]
    assert training.evaluate_and_print_results is upstream


def interrupted(folder, load=None, rank=0) -> str:
    save = folder and str(folder)
    args = Namespace(rank=rank, save=save, load=load, save_interval=500, curr_iteration=7)
    with pytest.raises(KeyboardInterrupt) as caught, pretrain.explain_interruption(args):
        raise KeyboardInterrupt
    return str(caught.value)


def test_ctrl_c_says_what_is_lost(tmp_path):
    lost = "interrupted after iteration 7: nothing was saved; the same command starts again"
    assert interrupted(None) == lost
    earlier = f"{lost}, and a --save-interval below 500 saves earlier"
    assert interrupted(tmp_path) == earlier
    assert interrupted(tmp_path, rank=1) == ""
    files.write_tracker(tmp_path, 10)  # of another run
    assert interrupted(tmp_path) == earlier
    files.write_tracker(tmp_path, 5)
    saved = "interrupted after iteration 7: saved up to iteration 5; the same command"
    assert interrupted(tmp_path) == f"{saved} with --load {tmp_path} goes on from there"
    assert interrupted(tmp_path, load=str(tmp_path)) == f"{saved} goes on from there"


def test_the_last_line_names_no_checkpoint_that_does_not_exist(tmp_path):
    args = Namespace(save=str(tmp_path))
    assert pretrain.saved_in(args) == f"no checkpoint in {tmp_path}"
    files.write_tracker(tmp_path, 3)
    assert pretrain.saved_in(args) == f"checkpoint {tmp_path}"
