"""torch.compile of a converted model: the eager bits, a break of the graph at each layer."""

import pytest
import torch
from block_model import batch, build, loss_of

from megatron_lowbit import convert, load_recipe

EVERYWHERE = load_recipe("nvfp4", ["bf16_blocks=none"])


def results(model, compiled, autocast=False):
    """Return two losses, all gradients and an evaluation's output."""
    torch.manual_seed(5)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        losses = [loss_of(compiled, batch(number)) for number in range(2)]
    sum(losses).backward()
    compiled.eval()
    with torch.no_grad():
        evaluated = compiled(batch(2))
    compiled.train()
    return [*losses, evaluated, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("checkpointed", "autocast"),
    [(None, False), pytest.param(None, True, marks=pytest.mark.slow), (False, True)],
)
def test_eager_bits(checkpointed, autocast, reference):
    """The backend leaves the arithmetic of other modules as it is."""
    torch._dynamo.reset()
    model = convert(build(), EVERYWHERE)
    model.reentrant = checkpointed
    expected = results(model, model, autocast)
    compiled = torch.compile(model, backend="aot_eager")
    for got, right in zip(results(model, compiled, autocast), expected, strict=True):
        assert torch.equal(got, right)


@pytest.mark.slow
def test_a_break_at_each_layer(reference):
    torch._dynamo.reset()
    model = convert(build(), EVERYWHERE)
    x = torch.randn(4, 32, 32, requires_grad=True)
    torch.compile(model.layers[0], backend="eager")(x)  # the first call ever has another break
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(model.layers[0])(x).break_reasons
    assert len(breaks) >= 2 and all("_product" in one.reason for one in breaks)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_product"):
        torch.compile(model, backend="eager", fullgraph=True)(batch(0))
    evaluated = torch.compile(model.eval(), backend="eager", fullgraph=True)(batch(0))
    assert torch.equal(evaluated, model(batch(0)))


@pytest.mark.slow
def test_the_default_backend_and_engine():
    """Inductor's LayerNorm may differ in last bits, by which an input rounds to another E4M3 code.

    A code's step is 1/8 of it at most; of the 64 terms of a sum few change.
    """
    torch._dynamo.reset()
    model = convert(build(), "fp8-tile")
    expected = results(model, model)
    got = results(model, torch.compile(model))
    torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=0)
