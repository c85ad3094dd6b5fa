"""Output layers that a recipe quantizes: products, gradients, training, and what is refused."""

from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial

import pytest
import tiny_run
import torch
from stored_weights_run import in_bf16
from tiny_run import HYBRID, ONE_MICROBATCH, done, losses, metrics, refused, saved_histories

from megatron_lowbit.kernels.select import select_engine
from megatron_lowbit.layers import LinearContext, lowbit_linear
from megatron_lowbit.megatron.run.steps import run_after_backward, steps_of
from megatron_lowbit.recipes import load_recipe
from tests.marks import by_turns
from tests.short_runs import hooked_runs

RECIPE = ("--precision-recipe", "nvfp4", "--recipe-set", "output_layer=fp8-tile")
UNTIED = "--untie-embeddings-and-output-weights"
MTP = ("--mtp-num-layers", 1)


@pytest.fixture
def tied(request, monkeypatch):
    """True where the embedding's weight is the output layer's."""
    if request.param:
        monkeypatch.setattr(tiny_run, "MODEL", [w for w in tiny_run.MODEL if w != UNTIED])
    return request.param


@dataclass
class Call:
    """Tensors of one call of the output layer."""

    x: torch.Tensor
    weight: torch.Tensor
    y: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)


class Watch:
    """Calls of the output layer, the embedding's gradient, and the sum of gradients of a step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.main_grad = self.of_embedding = torch.zeros(())

    def __call__(self, chunks: list, args: Namespace) -> None:
        (chunk,) = chunks
        weight = chunk.output_layer.weight
        self.is_tied = weight is None
        self.weight = chunk.shared_embedding_or_output_weight() if self.is_tied else weight
        self.of_embedding = torch.zeros_like(self.weight, dtype=torch.float64)
        chunk.output_layer.register_forward_hook(self._output, with_kwargs=True)
        chunk.embedding.word_embeddings.register_forward_hook(self._embedded)
        end = partial(run_after_backward, chunks, self._end)
        steps_of(args, chunks).listeners.append(lambda iteration, training: end())

    def _output(self, module: torch.nn.Module, given: tuple, named: dict, result: tuple) -> None:
        call = Call(
            given[0].detach().clone(), self.weight.detach().clone(), result[0].detach().clone()
        )
        for name, tensor in (("x", given[0]), ("y", result[0])):
            tensor.register_hook(lambda grad, name=name: call.grads.update({name: grad.clone()}))
        self.calls.append(call)

    def _embedded(self, module: torch.nn.Module, given: tuple, y: torch.Tensor) -> None:
        def add(grad: torch.Tensor) -> None:
            rows = grad.flatten(0, 1).double()
            self.of_embedding.index_add_(0, given[0].flatten(), rows)

        y.register_hook(add)

    def _end(self) -> None:
        self.main_grad = self.weight.main_grad.detach().double()


@pytest.mark.parametrize(
    ("extra", "tied"),
    by_turns([MTP, (), HYBRID, ("--global-batch-size", 4)], [False, True]),
    indirect=["tied"],
)
def test_it_computes_as_a_linear_layer_of_that_precision(tied, extra, pretrain_here):
    """Bit for bit; the weight's gradient is the sum over calls and, if tied, of the embedding."""
    with hooked_runs(watch := Watch()):
        done(pretrain_here(*RECIPE, *ONE_MICROBATCH, *extra, "--train-iters", 1))
    assert watch.is_tied == tied
    assert len(watch.calls) == (2 if extra in (MTP, ("--global-batch-size", 4)) else 1)
    (precision,) = load_recipe("fp8-tile").configs.values()
    total = watch.of_embedding if tied else 0.0
    for call in watch.calls:
        x, weight = (t.detach().requires_grad_() for t in (call.x, call.weight))
        context = LinearContext(precision, select_engine(x.device, "reference"), key=0)
        y = lowbit_linear(x, weight, context)
        y.backward(call.grads["y"])
        assert torch.equal(call.y, y)
        assert torch.equal(call.grads["x"], x.grad)
        assert not torch.equal(y, torch.nn.functional.linear(x, weight))
        total = total + weight.grad.double()
    error = (watch.main_grad - total).norm() / total.norm()
    assert error < 1e-6


@pytest.mark.parametrize("tied", [True], ids=["tied"], indirect=True)
def test_a_run_prints_measures_and_saves_it(tied, pretrain_here, tmp_path):
    changes = ("--recipe-set", "output_layer=fp8-delayed", "--log-quantization-error-interval", 1)
    run = (*RECIPE[:2], *changes, *ONE_MICROBATCH, "--train-iters", 4, "--lr-warmup-iters", 1)
    result = pretrain_here(*run, "--save", tmp_path)
    done(result)
    assert "recipe nvfp4: 9 of 17 linear layers quantized" in result.stdout
    assert "output_layer:" in result.stdout
    found = losses(tmp_path)
    assert found[1] == pytest.approx(6.3, abs=0.2) and found[4] < found[1] - 0.03
    errors = [m for m in metrics(tmp_path) if "quantization/output_layer/wgrad/error" in m]
    assert len(errors) == 4
    for line in errors:
        assert 0.01 < line["quantization/output_layer/fprop/error"] < 0.1
    histories = saved_histories(tmp_path / "iter_0000004")
    assert [*histories] == ["output_layer"]
    assert (histories["output_layer"] > 0).any()


def test_weights_as_codes_leave_its_weight_in_bf16(pretrain_here, tmp_path):
    """The losses equal BF16 parameters'."""
    run = (*RECIPE, "--recipe-set", "bf16_blocks=none", "--bf16", "--use-distributed-optimizer",
           *ONE_MICROBATCH, "--train-iters", 2)  # fmt: skip
    for name, flag in (("plain", ()), ("codes", ("--quantized-param-gather",))):
        with in_bf16():
            done(pretrain_here(*run, *flag, "--save", tmp_path / name))
    assert losses(tmp_path / "codes") == losses(tmp_path / "plain")


def test_an_unknown_name_ends_the_run_in_one_line(pretrain_here):
    result = pretrain_here(*RECIPE[:3], "output_layer=fp8-til", "--train-iters", 1)
    assert "output_layer: no config 'fp8-til'; use one of fp8-tile" in refused(result)
