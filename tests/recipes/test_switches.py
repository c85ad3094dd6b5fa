"""Precision switches in mid-run, and recipes combined of two."""

from dataclasses import replace

import pytest
import yaml

from megatron_lowbit.recipes import (
    Layer,
    LinearPrecision,
    Progress,
    Recipe,
    combine,
    load_combined,
    load_recipe,
    shipped_recipes,
)
from megatron_lowbit.recipes.matchers import BlocksMatcher, GlobMatcher
from megatron_lowbit.recipes.show import model_layers
from tests.marks import by_turns
from tests.recipes.conftest import refused

LAYERS = model_layers(None, 12)
NVFP4, MXFP8, TILE, BF16 = (load_recipe(n) for n in ("nvfp4", "mxfp8", "fp8-tile", "bf16"))


def switched(*switches, base="nvfp4", overrides=()) -> Recipe:
    """Return a shipped recipe with switches ``s0``, ``s1``, ..., each given as YAML."""
    given = [f"switches.s{i}={switch}" for i, switch in enumerate(switches)]
    return load_recipe(base, [*given, *overrides])


def precisions(recipe) -> list[LinearPrecision]:
    return [recipe.precision_for(layer) for layer in LAYERS]


def parts(forward, backward) -> list[LinearPrecision]:
    """Return fprop of one recipe, dgrad and wgrad of another, layer by layer."""
    return [
        LinearPrecision(f.fprop, b.dgrad, b.wgrad)
        for f, b in zip(precisions(forward), precisions(backward), strict=True)
    ]


# One switch


@pytest.mark.parametrize(
    "switch, before, at, after",
    [
        ("iteration: 100", Progress(99, 10**12, 1.0), Progress(100), Progress(101)),
        ("iteration: 0", None, Progress(), Progress(1)),
        ("tokens: 8.2e+12", Progress(10**9, 8_199_999_999_999, 1.0),
         Progress(tokens=8_200_000_000_000), Progress(tokens=9 * 10**12)),
        ("fraction: 0.82", Progress(10**9, 10**14, 0.8199), Progress(fraction=0.82),
         Progress(fraction=0.9)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["all", "forward", "backward"])
def test_one_switch(switch, before, at, after, part):
    """In force from its point on, whatever the other two measures say, for its part only."""
    recipe = switched(f"{{{switch}, to: fp8-tile, part: {part}}}")
    expected = {
        "all": parts(TILE, TILE),
        "forward": parts(TILE, NVFP4),
        "backward": parts(NVFP4, TILE),
    }[part]
    assert expected != precisions(NVFP4)
    for progress in (at, after):
        assert precisions(recipe.at(progress)) == expected
        assert recipe.at(progress).switches == ()
    if before is not None:
        assert recipe.at(before) == NVFP4


def test_the_start_and_what_is_no_switch():
    """``all`` is the part by default; without progress the start counts."""
    recipe = switched("{iteration: 5, to: fp8-tile}")
    assert recipe.at(Progress(5)) == TILE and recipe.at(Progress()) == NVFP4
    assert precisions(recipe) == precisions(NVFP4)
    disabled = switched("{iteration: 5, to: bf16, enabled: false}")
    assert disabled == NVFP4 and disabled.at(Progress(9)) == NVFP4
    for name in shipped_recipes():
        recipe = load_recipe(name)
        assert recipe.switches or recipe.at(Progress(10**6, 10**13, 0.99)) == recipe


# Several


def test_switches_apply_in_order():
    """Each on what those before it left."""
    recipe = switched(
        "{iteration: 10, to: mxfp8}",
        "{iteration: 20, to: fp8-tile, part: backward}",
        "{iteration: 30, to: bf16, part: forward}",
    )
    assert precisions(recipe.at(Progress(9))) == precisions(NVFP4)
    assert precisions(recipe.at(Progress(10))) == precisions(MXFP8)
    assert precisions(recipe.at(Progress(20))) == parts(MXFP8, TILE)
    assert precisions(recipe.at(Progress(30))) == parts(BF16, TILE)


def test_the_order_is_the_files_not_the_points():
    """The one written last wins once both are reached."""
    late_first = ("{iteration: 20, to: mxfp8}", "{iteration: 10, to: fp8-tile, part: forward}")
    recipe = switched(*late_first)
    assert precisions(recipe.at(Progress(15))) == parts(TILE, NVFP4)
    assert precisions(recipe.at(Progress(25))) == parts(TILE, MXFP8)
    assert switched(*late_first[::-1]).at(Progress(25)) == MXFP8


@pytest.mark.parametrize(
    "switch, later",
    [
        ("iteration: 10", ["iteration: 10"]),
        ("fraction: 0.5, part: forward", ["fraction: 0.5, part: forward"]),
        ("tokens: 10, part: backward", ["tokens: 9"]),
        ("tokens: 10", ["iteration: 0"]),
        ("iteration: 10", ["iteration: 10, part: forward", "iteration: 9, part: backward"]),
    ],
)
def test_a_switch_that_later_ones_replace_from_its_start_on_is_refused(switch, later):
    given = [f"{{{text}, to: mxfp8}}" for text in (switch, *later)]
    message = refused(lambda: switched(*given), parts=["switches.s0: without effect"])
    assert all(f"s{number}: from" in message for number in range(1, len(given)))


@pytest.mark.parametrize(
    "switch, later",
    [
        ("iteration: 10, part: forward", "iteration: 10, part: backward"),
        ("iteration: 10", "iteration: 10, part: forward"),
        ("iteration: 9", "iteration: 10"),
        ("iteration: 10", "tokens: 10"),
    ],
)
def test_switches_of_which_each_has_an_effect(switch, later):
    assert len(switched(f"{{{switch}, to: mxfp8}}", f"{{{later}, to: bf16}}").switches) == 2


def test_switches_of_different_units():
    recipe = switched("{tokens: 1000, to: mxfp8}", "{fraction: 0.5, to: bf16, part: forward}")
    assert precisions(recipe.at(Progress(3, 999, 0.4))) == precisions(NVFP4)
    assert precisions(recipe.at(Progress(3, 999, 0.5))) == parts(BF16, NVFP4)
    assert precisions(recipe.at(Progress(3, 1000, 0.4))) == precisions(MXFP8)
    assert precisions(recipe.at(Progress(3, 1000, 0.5))) == parts(BF16, MXFP8)


def test_phases_of_one_unit_come_in_order():
    """Whatever the file's order, and with switches from the start on already made."""
    recipe = switched(
        "{iteration: 20, to: mxfp8}", "{iteration: 0, to: fp8-tile, part: forward}",
        "{iteration: 10, to: bf16, part: forward}",
    )  # fmt: skip
    phases = recipe.phases()
    assert [[s.name for s in behind] for behind, _ in phases] == [
        ["s1"], ["s1", "s2"], ["s0", "s1", "s2"],
    ]  # fmt: skip
    assert [current for _, current in phases] == [recipe.at(Progress(i)) for i in (0, 10, 20)]
    assert NVFP4.phases() == [([], NVFP4)]


def test_phases_of_different_units_come_in_any_order():
    recipe = switched("{tokens: 1000, to: mxfp8}", "{fraction: 0.5, to: bf16, part: forward}")
    moments = [Progress(0, tokens, share) for tokens in (0, 1000) for share in (0, 0.5)]
    phases = recipe.phases()
    assert [current for _, current in phases] == [recipe.at(moment) for moment in moments]
    assert [[s.name for s in behind] for behind, _ in phases] == [
        [], ["s1"], ["s0"], ["s0", "s1"],
    ]  # fmt: skip


# A backward pass that takes values of its own forward pass goes with it.
SEPARABLE = [
    name
    for name in sorted(shipped_recipes())
    if not any(config.shares_operands for config in load_recipe(name).configs.values())
]


@pytest.mark.parametrize(
    ("base", "order"), by_turns(SEPARABLE, [("forward", "backward"), ("backward", "forward")])
)
def test_both_parts_one_after_the_other_are_all(base, order):
    """Every GEMM of every layer is the target's then, whichever part went first."""
    first, second = (f"{{iteration: {i}, to: mxfp4, part: {p}}}" for i, p in enumerate(order, 1))
    recipe = switched(first, second, base=base)
    target = load_recipe("mxfp4")
    assert precisions(recipe.at(Progress(2))) == precisions(target)
    halfway = {"forward": (target, recipe), "backward": (recipe, target)}[order[0]]
    assert precisions(recipe.at(Progress(1))) == parts(*halfway)


# Combinations


def test_combining_a_recipe_with_itself_changes_nothing():
    assert combine(NVFP4, NVFP4) == NVFP4
    assert load_combined("nvfp4", "nvfp4") == NVFP4


@pytest.mark.parametrize(
    "forward, backward, name",
    [
        ((NVFP4, BF16), (MXFP8, TILE), "nvfp4+fp8-tile"),
        ((NVFP4, BF16), (TILE, TILE), "nvfp4+fp8-tile"),
        ((TILE, TILE), (NVFP4, BF16), "fp8-tile+bf16"),
    ],
)
def test_combining_what_is_combined(forward, backward, name):
    """The first one's fprop, the second one's dgrad and wgrad; nothing of what neither gives."""
    recipe = combine(combine(*forward), combine(*backward))
    assert precisions(recipe) == parts(forward[0], backward[1])
    assert recipe.name == name
    names = recipe.matcher_names(LAYERS[0])
    own = forward[0].matcher_names(LAYERS[0])
    assert names == f"{own} / {backward[1].matcher_names(LAYERS[0])}"


def test_overrides_go_to_their_side():
    recipe = load_combined(
        "fp8-tile",
        "mxfp4-backward",
        ["forward.weight.format=fp8-1x128-e4m3", "backward.wgrad.hadamard.size=128"],
    )
    forward = load_recipe("fp8-tile", ["weight.format=fp8-1x128-e4m3"])
    backward = load_recipe("mxfp4-backward", ["wgrad.hadamard.size=128"])
    assert precisions(recipe) == parts(forward, backward)
    assert precisions(recipe) != precisions(load_combined("fp8-tile", "mxfp4-backward"))


@pytest.mark.parametrize("override", ["grad.rounding=nearest", "fwd.grad=null", "forwards.x=1", ""])
def test_an_override_without_a_side(override):
    parts = [f"forward.{override} for fp8-tile", f"backward.{override} for nvfp4"]
    refused(load_combined, "fp8-tile", "nvfp4", [override], parts=parts)


def test_a_side_without_an_override():
    assert "FIELD=VALUE" in refused(lambda: load_combined("bf16", "nvfp4", ["forward"]))


def test_recipes_with_switches_do_not_combine():
    """Neither as the forward nor as the backward side."""
    both = [switched("{iteration: 5, to: bf16}"), MXFP8]
    for pair in (both, both[::-1]):
        message = refused(lambda pair=pair: combine(*pair))
        assert "nvfp4 has switches" in message and "mxfp8" not in message
    side = ["backward.switches.s={iteration: 5, to: bf16}"]
    assert "nvfp4 has switches" in refused(lambda: load_combined("mxfp8", "nvfp4", side))


BAD = replace(
    MXFP8,
    name="bad",
    matchers={"typo": GlobMatcher(config="mxfp8", enabled=True, pattern="*.liner_fc1")},
)


@pytest.mark.parametrize(
    "recipe",
    [combine(NVFP4, BAD), combine(MXFP8, combine(NVFP4, BAD)), combine(BAD, NVFP4)],
    ids=["backward", "backward of a combination", "forward"],
)
def test_matchers_of_both_parts_are_checked(recipe):
    message = refused(lambda: recipe.check_matchers(LAYERS))
    assert "recipe bad" in message and "typo" in message


def test_matchers_of_recipes_that_are_switched_to_are_checked():
    """Before the run starts, not when its point comes."""
    recipe = switched("{iteration: 5, to: bf16}", "{fraction: 0.5, to: mxfp8}")
    recipe.check_matchers(LAYERS)
    first, second = recipe.switches
    changed = replace(recipe, switches=(first, replace(second, recipe=BAD)))
    assert "typo" in refused(lambda: changed.check_matchers(LAYERS))
    numbers = BlocksMatcher(config="mxfp8", enabled=True, numbers=(0, 12))
    other = replace(first, recipe=replace(MXFP8, matchers={"n": numbers}))
    changed = replace(recipe, switches=(other,))
    assert "block 12" in refused(lambda: changed.check_matchers(LAYERS))
    changed.check_matchers([Layer(f"x.{i}", i, 13) for i in range(13)])


def test_matchers_of_a_recipe_that_decides_no_gemm_are_not_checked():
    combine(combine(MXFP8, BAD), BF16).check_matchers(LAYERS)
    combine(BF16, combine(BAD, MXFP8)).check_matchers(LAYERS)


# Wrong switches


@pytest.mark.parametrize(
    "switch, parts",
    [
        ("{to: bf16}", ["switches.s0", "iteration, tokens, fraction"]),
        ("{iteration: 1, fraction: 0.5, to: bf16}", ["switches.s0", "give one of iteration"]),
        ("{fraction: 1, to: bf16}", ["switches.s0.fraction", "less than 1"]),
        ("{fraction: -0.1, to: bf16}", ["switches.s0.fraction", "greater than or equal to 0"]),
        ("{iteration: -1, to: bf16}", ["switches.s0.iteration", "greater than or equal to 0"]),
        ("{iteration: 1.5, to: bf16}", ["switches.s0.iteration", "integer"]),
        ("{tokens: many, to: bf16}", ["switches.s0.tokens", "number"]),
        ("{iteration: 1}", ["switches.s0.to", "required"]),
        ("{iteration: 1, to: nvfp5}", ["switches.s0.to", "'nvfp5'", "nvfp4"]),
        ("{iteration: 1, to: no.yaml}", ["switches.s0.to", "no.yaml does not exist"]),
        ("{iteration: 1, to: bf16, part: fprop}", ["switches.s0.part", "'forward' or 'backward'"]),
        ("{step: 1, to: bf16}", ["switches.s0.step", "iteration, tokens, fraction, to, part"]),
        ("5", ["switches.s0"]),
    ],
)
def test_wrong_switches(switch, parts):
    refused(switched, switch, parts=parts)


def test_switches_to_recipes_with_switches(tmp_path):
    """One that leads on, or back to itself, would never end: refused by the key that names it."""
    for target in ("bf16", tmp_path / "mine.yaml"):
        path = tmp_path / "mine.yaml"
        raw = {
            "name": "mine",
            "configs": {},
            "matchers": {},
            "switches": {"on": {"iteration": 1, "to": str(target)}},
        }
        path.write_text(yaml.safe_dump(raw))
        message = refused(lambda path=path: switched(f"{{iteration: 5, to: {path}}}"))
        assert "switches.s0.to" in message and "recipe mine has switches of its own" in message
    assert "switches.on.to" in refused(lambda: load_recipe(str(path)))  # names itself


def test_overrides_keep_the_order_of_switches(tmp_path):
    """Also of one that is called like a matcher: switches apply in order."""
    overrides = [
        "switches.linears={iteration: 5, to: bf16}",
        "switches.later={iteration: 9, to: mxfp8}",
        "grad.rounding=nearest",
    ]
    names = [switch.name for switch in load_recipe("nvfp4", overrides).switches]
    assert names == ["linears", "later"]


def test_an_override_hits_one_of_two_aliased_configs(tmp_path):
    path = tmp_path / "aliased.yaml"
    path.write_text(
        """
name: aliased
configs:
  a: &a
    input: {format: mxfp8-e4m3}
    weight: {format: mxfp8-e4m3}
  b: {<<: *a, fprop: {}}
matchers:
  first: {type: blocks, first: 1, config: a, enabled: true}
  rest: {type: glob, pattern: "*", config: b, enabled: true}
"""
    )
    configs = load_recipe(str(path), ["configs.b.input.format=mxfp8-e5m2"]).configs
    assert configs["a"].fprop.lhs.format.name == "mxfp8-e4m3"
    assert configs["b"].fprop.lhs.format.name == "mxfp8-e5m2"
