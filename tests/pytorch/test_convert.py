"""convert(): which modules a recipe reaches, and what it refuses by name."""

import copy
import re

import pytest
import torch
from accelerate import hooks
from block_model import BLOCKS, WIDTH, Model, batch, build, loss_of
from torch import nn

from megatron_lowbit import LowbitLinear, convert, load_recipe, lowbit_linear
from megatron_lowbit.errors import UserError
from megatron_lowbit.kernels.engine import ReferenceEngine
from megatron_lowbit.layers import LinearContext
from megatron_lowbit.recipes import Progress

pytestmark = pytest.mark.usefixtures("reference")
MLPS = "matchers.linears.pattern='*.up'"


def converted(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is LowbitLinear]


def linear(columns: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, columns)


def in_list(name: str, blocks: list[nn.Module], kind: type = nn.ModuleList) -> nn.Module:
    """Return a model with blocks at ``body.NAME``, and a linear layer outside of them."""
    body = nn.Module()
    body.add_module(name, kind(blocks))
    model = nn.Module()
    model.body, model.head = body, linear()
    return model


def test_the_model_is_changed_in_place():
    model = build()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    assert convert(model, "fp8-tile") is model
    assert dict(model.named_modules()) == modules
    assert all(value is parameters[name] for name, value in model.named_parameters())
    blocks = range(BLOCKS)
    assert converted(model) == [f"layers.{n}.{part}" for n in blocks for part in ("up", "down")]


def test_hooks_stay():
    model, seen = build(), []
    model.layers[1].up.register_forward_hook(lambda *_: seen.append("called"))
    convert(model, "fp8-tile")
    model(batch(0))
    assert seen == ["called"]


def test_first_and_last_blocks_are_those_of_the_model():
    model = convert(build(), load_recipe("nvfp4", ["bf16_blocks.first=1", "bf16_blocks.last=2"]))
    assert converted(model) == ["layers.1.up", "layers.1.down"]
    assert converted(convert(build(), load_recipe("nvfp4", [MLPS]))) == [
        "layers.1.up", "layers.2.up"
    ]  # fmt: skip


def test_twelve_blocks_are_numbered_not_sorted():
    model = in_list("layers", [linear() for _ in range(12)])
    convert(model, load_recipe("nvfp4", ["bf16_blocks.first=0", "bf16_blocks.last=2"]))
    assert converted(model) == [f"body.layers.{number}" for number in range(10)]


@pytest.mark.parametrize("name", ["layers", "layer", "h", "blocks", "block"])
def test_lists_are_found_by_name(name):
    model = convert(in_list(name, [linear(), linear()]), "fp8-tile")
    assert converted(model) == [f"body.{name}.0", f"body.{name}.1"]


def test_lists_within_blocks_are_no_blocks():
    """An expert or a T5 sublayer has the number of its block."""
    inner = [nn.ModuleDict({"layer": nn.ModuleList([linear(), linear()])}) for _ in range(3)]
    model = convert(in_list("block", inner), load_recipe("nvfp4", ["bf16_blocks.last=1"]))
    assert converted(model) == ["body.block.1.layer.0", "body.block.1.layer.1"]


def test_a_dictionary_with_numbers_is_a_list():
    blocks = {"0": linear(), "1": linear()}
    model = in_list("layers", blocks, nn.ModuleDict)
    assert converted(convert(model, "fp8-tile")) == ["body.layers.0", "body.layers.1"]


def test_blocks_that_are_given():
    recipe = load_recipe("nvfp4", ["bf16_blocks.first=1", "bf16_blocks.last=0"])
    model = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())
    assert converted(convert(model, recipe, blocks="")) == ["2", "4"]
    model = nn.ModuleDict({"decoder": in_list("layers", [linear()]), "encoder": nn.ModuleDict(
        {"layers": nn.ModuleList([linear(), linear()])}
    )})  # fmt: skip
    order = ["encoder.layers", "decoder.body.layers"]
    convert(model, recipe, blocks=order)
    assert converted(model) == ["decoder.body.layers.0", "encoder.layers.1"]


def test_several_lists_are_refused():
    model = nn.ModuleDict({name: in_list("h", [linear()]) for name in ("one", "two")})
    with pytest.raises(UserError, match=r"one\.body\.h, two\.body\.h; give one"):
        convert(model, "fp8-tile")


@pytest.mark.parametrize(
    "model, blocks, message",
    [
        (nn.Sequential(linear()), None, "no nn.Linear in the numbered children of a module named"),
        (build(), "encoder", "blocks='encoder': the model has no module of that path"),
        (build(), [], "give at least one path"),
        (build(), "embed", "blocks='embed': no child of that module has an nn.Linear"),
    ],
)
def test_blocks_that_are_not_there(model, blocks, message):
    with pytest.raises(UserError, match=message):
        convert(model, "fp8-tile", blocks=blocks)


def test_a_rule_without_a_layer_is_refused_and_changes_nothing():
    matcher = "{type: glob, pattern: '*.q', config: nvfp4, enabled: true}"
    recipe, model = load_recipe("nvfp4", [f"matchers.q={matcher}"]), build()
    message = r"matcher q matches none of the model's 8 linear layers; .* like layers\.0\.up$"
    with pytest.raises(UserError, match=message):
        convert(model, recipe)
    assert not converted(model)


@pytest.mark.parametrize(
    "recipe, message",
    [
        (load_recipe("nvfp4", ["bf16_blocks.first=4"]), "quantizes none of the model's 8 linear"),
        ("fp8-delayed", "recipe fp8-delayed: config fp8: amax_history"),
        (load_recipe("nvfp4", ["bf16_blocks.kinds=[mlp]"]), "matcher bf16_blocks names kinds"),
        (
            load_recipe("nvfp4", ["switches.heal={iteration: 3, to: bf16, part: all}"]),
            "recipe nvfp4 has switches",
        ),
        (load_recipe("nvfp4", "output_layer=fp8-tile"), "recipe nvfp4 has an output_layer"),
        ("nvpf4", "did you mean nvfp4"),
    ],
)
def test_recipes_that_are_refused(recipe, message):
    model = build()
    with pytest.raises(UserError, match=message):
        convert(model, recipe)
    assert not converted(model)


def test_two_blocks():
    """nvfp4 keeps one block at each end."""
    model = in_list("h", [linear(), linear()])
    with pytest.raises(UserError, match="2 blocks: the matchers bf16_blocks leave all in high"):
        convert(model, "nvfp4")
    convert(model, load_recipe("nvfp4", ["bf16_blocks=none"]))
    assert converted(model) == ["body.h.0", "body.h.1"]


def test_a_switch_is_another_conversion():
    recipe = load_recipe("fp8-tile", ["switches.heal={iteration: 3, to: bf16, part: forward}"])
    model = convert(build(), recipe.at(Progress(iteration=0)))
    assert model.layers[0].up.precision.fprop.quantized
    convert(model, recipe.at(Progress(iteration=3)))
    precision = model.layers[0].up.precision
    assert not precision.fprop.quantized and precision.dgrad.quantized


def test_bf16_restores_the_model():
    model = convert(convert(build(), "fp8-tile"), "bf16")
    assert not converted(model) and vars(model.layers[0].up).keys() == vars(model.head).keys()


class Conv1D(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


def replaced() -> nn.Linear:
    """Return a linear layer whose forward is another function, as accelerate's hooks make it."""
    module = linear()
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    "other, name",
    [
        (Conv1D(), "Conv1D"),
        (nn.MultiheadAttention(WIDTH, 4).out_proj, "NonDynamicallyQuantizableLinear"),
        (nn.LazyLinear(WIDTH), "LazyLinear"),
        (replaced(), "Linear, whose forward is replaced"),
    ],
)
def test_modules_that_stay_are_named(other, name):
    block = nn.ModuleDict({"fits": linear(), "other": other, "table": nn.Embedding(2, 2)})
    before = type(other)
    with pytest.warns(UserWarning, match=rf": 1 modules .* body\.h\.0\.other \({name}\)"):
        model = convert(in_list("h", [block]), "fp8-tile")
    assert converted(model) == ["body.h.0.fits"] and type(other) is before


def test_modules_that_the_recipe_keeps_are_not_named(recwarn):
    block = nn.ModuleDict({"up": linear(), "other": Conv1D()})
    convert(in_list("h", [block]), load_recipe("fp8-tile", [MLPS]))
    assert not recwarn.list


def test_a_model_with_none_that_fit_names_the_others():
    with pytest.raises(UserError, match=r"body\.h\.0 \(LazyLinear\)"):
        convert(in_list("h", [nn.LazyLinear(WIDTH)]), "fp8-tile")


def test_a_shared_module():
    shared = linear()
    model = convert(in_list("h", [shared, shared]), "fp8-tile")
    assert type(shared) is LowbitLinear
    recipe = load_recipe("nvfp4", ["bf16_blocks.first=1", "bf16_blocks.last=0"])
    with pytest.raises(UserError, match=r"body\.h\.0 and body\.h\.1 are one module"):
        convert(model, recipe)


def test_tied_weights_add_their_gradients():
    """Two layers with one weight compute as two with equal weights, whose gradients are added."""
    apart = convert(build(), "fp8-tile")
    apart.layers[2].up.weight = nn.Parameter(apart.layers[1].up.weight.detach().clone())
    tied = copy.deepcopy(apart)
    tied.layers[2].up.weight = tied.layers[1].up.weight
    losses = [loss_of(model, batch(0)) for model in (apart, tied)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    added = apart.layers[1].up.weight.grad + apart.layers[2].up.weight.grad
    assert torch.equal(tied.layers[1].up.weight.grad, added)


def test_a_model_on_no_device():
    with torch.device("meta"):
        model = convert(Model(), "fp8-tile")
        assert model(torch.zeros(4, 32, dtype=torch.long)).shape == (4, 32, 16)
    model.to_empty(device="cpu").load_state_dict(build().state_dict())
    assert torch.equal(model(batch(0)), convert(build(), "fp8-tile")(batch(0)))


class Adapter(nn.Module):
    """A low-rank adapter of a linear layer, with the names of PEFT."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        parts = {"in_features": base_layer.in_features, "out_features": base_layer.out_features}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(parts["in_features"], 8, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(8, parts["out_features"], bias=False)})
        self.other = nn.Linear(*parts.values())

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_are_left_alone():
    """The layer that is adapted is converted, by rules for its own path."""
    model = build()
    for block in model.layers:
        block.up = Adapter(block.up)
        block.down.lora_a = nn.Linear(2 * WIDTH, 8, bias=False)  # with the names of torchtune
    names = ["up.base_layer", "down"]
    convert(model, "fp8-tile")
    assert converted(model) == [f"layers.{n}.{name}" for n in range(BLOCKS) for name in names]
    convert(model, load_recipe("fp8-tile", MLPS))
    assert converted(model) == [f"layers.{n}.up.base_layer" for n in range(BLOCKS)]


def hooked(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=True))
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_under_hooks_of_accelerate(when):
    """They compute as without the hooks, which are called, and can be restored."""
    plain, expected = build(), convert(build(), "fp8-tile")
    model = hooked(build()) if when == "before" else hooked(convert(build(), "fp8-tile"))
    calls = []
    up = model.layers[0].up
    up._hf_hook.pre_forward = lambda module, *args, **kwargs: calls.append(1) or (args, kwargs)
    for precision, right in (("fp8-tile", expected), ("bf16", plain), ("fp8-tile", expected)):
        convert(model, precision)
        assert len(converted(model)) == (precision != "bf16") * 2 * BLOCKS
        assert torch.equal(model(batch(0)), right(batch(0)))
    assert len(calls) == 3
    hooks.remove_hook_from_module(model, recurse=True)
    for precision, right in (("bf16", plain), ("fp8-tile", expected)):
        convert(model, precision)
        assert torch.equal(model(batch(0)), right(batch(0)))
    assert len(calls) == 3


@pytest.mark.parametrize("recipe", ["fp8-tile", "bf16"])
def test_another_forward_is_named(recipe):
    model = build()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x: x
    message = (
        r"8 modules .* layers\.0\.up \(Linear, whose forward is replaced\), .*; convert before"
    )
    with pytest.raises(UserError, match=message):
        convert(model, recipe)


class Sharded(LowbitLinear):
    """Stands for the class that fully_shard or a parametrization gives a layer."""


@pytest.mark.parametrize("change", [{"__class__": Sharded}, {"forward": abs}], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8-tile"])
def test_a_converted_layer_that_keeps_another_recipe_is_named(recipe, change, recwarn):
    model = convert(build(), "fp8-tile")
    for name, value in change.items():
        setattr(model.layers[1].up, name, value)
    convert(model, recipe)
    named = [r"1 modules .* keep their precision: layers\.1\.up"] * (recipe != "fp8-tile")
    assert len(recwarn) == len(named)
    assert all(map(re.search, named, [str(warning.message) for warning in recwarn]))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
            self.add_module(name, linear())
            getattr(self, name).weight.data *= 3**-number

    def forward(self, x):
        return torch.cat([part(x) for part in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)


def attention(*changes: str) -> Attention:
    """Return the attention of the first of two blocks, converted."""
    recipe = load_recipe("nvfp4", ["bf16_blocks=none", *changes])
    torch.manual_seed(0)
    return convert(in_list("layers", [Attention(), Attention()]), recipe).body.layers[0]


def test_queries_keys_and_values_are_quantized_as_one_matrix():
    """The product of each, against a product with their concatenation quantized as a whole."""
    layer, x = attention(), torch.eye(WIDTH)
    whole = torch.cat([getattr(layer, f"{part}_proj").weight.data for part in "qkv"])
    biases = torch.cat([getattr(layer, f"{part}_proj").bias for part in "qkv"])
    context = LinearContext(layer.q_proj.precision, ReferenceEngine("tests"), 0)
    expected = lowbit_linear(x, whole, context) + biases
    assert torch.equal(layer(x), expected)
    apart = lowbit_linear(x, layer.v_proj.weight, context) + layer.v_proj.bias
    assert not torch.equal(apart, expected[:, 2 * WIDTH :])
    assert layer.o_proj.scaled_with == ()


def test_scales_are_shared_within_an_adapter_too():
    """PEFT keeps a layer as the ``base_layer`` of its own."""
    block = Attention()
    block.v_proj = nn.ModuleDict({"base_layer": block.v_proj})
    convert(in_list("layers", [block]), load_recipe("nvfp4", ["bf16_blocks=none"]))
    assert block.q_proj.scaled_with == (block.k_proj, block.v_proj["base_layer"])


def test_only_modules_of_one_precision_share_a_scale():
    layer = attention("matchers.linears.pattern='*.[qv]_proj'")
    assert type(layer.k_proj) is nn.Linear
    assert layer.q_proj.scaled_with == (layer.v_proj,)


def test_shared_scales_leave_the_state_dict_and_go_with_the_recipe():
    model = in_list("layers", [Attention()])
    names, modules = list(model.state_dict()), list(model.modules())
    convert(model, "fp8-tensorwise")
    layer = model.body.layers[0]
    assert layer.q_proj.scaled_with == (layer.k_proj, layer.v_proj)
    assert list(model.state_dict()) == names and list(model.modules()) == modules
    convert(model, "bf16")
    assert "scaled_with" not in vars(layer.q_proj)


def test_a_weight_whose_partner_is_elsewhere_is_refused():
    layer = attention()
    layer.v_proj.to("meta")
    with pytest.raises(UserError, match=r"shares this one's tensor scale is .* on meta"):
        layer.q_proj(torch.eye(WIDTH))
