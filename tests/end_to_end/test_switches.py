"""Precision switches in a run: their iterations, effects, and resumption around them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_run import ONE_MICROBATCH, OTHER_RECIPE, done, saved_histories, start_from, steps

from tests.marks import others_slow

LENGTH = 4  # iterations
AFTER = 2  # finished iterations, of 2 sequences of 32 tokens, at which every switch here comes

NVFP4, BF16 = "nvfp4", "bf16"
DELAYED = str(Path(__file__).with_name("delayed.yaml"))
ANNOUNCED = re.compile(r"iteration \d+: recipe ")
LOGGED = re.compile(rf"iteration +(\d+)/ +{LENGTH} \|")
# Base recipe, the switch, and the arguments of a run that computes so from its start.
CASES = {
    "all": (NVFP4, "iteration: 2, to: bf16", ("--precision-recipe", BF16)),
    "forward": (
        NVFP4, "iteration: 2, to: bf16, part: forward",
        ("--fp8-recipe", BF16, "--fp4-recipe", NVFP4),
    ),
    "backward": (
        NVFP4, "iteration: 2, to: bf16, part: backward",
        ("--fp8-recipe", NVFP4, "--fp4-recipe", BF16),
    ),
    "to delayed scaling": (BF16, f"iteration: 2, to: {DELAYED}", ("--fp8-recipe", DELAYED)),
    "to delayed scaling, backward": (
        BF16, f"iteration: 2, to: {DELAYED}, part: backward",
        ("--fp8-recipe", BF16, "--fp4-recipe", DELAYED),
    ),
    "from delayed scaling": (
        DELAYED, "iteration: 2, to: nvfp4, part: forward",
        ("--fp8-recipe", NVFP4, "--fp4-recipe", DELAYED),
    ),
    "tokens": (NVFP4, "tokens: 128, to: bf16", ("--precision-recipe", BF16)),
    "tokens between steps": (NVFP4, "tokens: 65, to: bf16", ("--precision-recipe", BF16)),
    "fraction": (NVFP4, "fraction: 0.5, to: bf16", ("--precision-recipe", BF16)),
}  # fmt: skip


# The others are units that tests/recipes converts, and combinations of these.
QUICK = ("all", "to delayed scaling")
IN_ORDER = others_slow(CASES, QUICK)


@pytest.fixture
def train(pretrain_here, memory, tmp_path, tmp_path_factory) -> Callable[..., Path]:
    """Function that runs all iterations; runs from the start save each, and are cached."""

    def run(name: str, *arguments, after: tuple[Path, int] | None = None) -> Path:
        if after is None and arguments in memory:
            return memory[arguments]
        folder = (tmp_path_factory.mktemp("runs") if after is None else tmp_path) / name
        if after is not None:
            arguments = (*arguments, *OTHER_RECIPE, "--load", start_from(*after, folder))
        interval = 1 if after is None else LENGTH
        length = ("--train-iters", LENGTH, "--save-interval", interval, *ONE_MICROBATCH)
        result = pretrain_here(*arguments, *length, "--save", folder)
        done(result)
        (folder / "output.txt").write_text(result.stdout)
        if after is None:
            memory[arguments] = folder
        return folder

    return run


def switched(case: str) -> tuple:
    """Return arguments of a run with a switch."""
    base, switch, _ = CASES[case]
    return ("--precision-recipe", base, "--recipe-set", f"switches.heal={{{switch}}}")


@pytest.mark.parametrize("case", IN_ORDER)
def test_equals_the_run_without_it_until_it_comes(train, case):
    """After the switch, losses and gradients differ. Start and switch are printed."""
    base, switch, _ = CASES[case]
    run, plain = train("switched", *switched(case)), train("plain", "--precision-recipe", base)
    same = [steps(run)[step] == steps(plain)[step] for step in steps(plain)]
    assert same == [True] * AFTER + [False] * (LENGTH - AFTER)
    output = (run / "output.txt").read_text().splitlines()
    unit, at = switch.partition(",")[0].split(": ")
    (planned,) = [line for line in output if line.startswith("switch heal:")]
    assert f"from {unit} {at} on" in planned
    (announced,) = [n for n, line in enumerate(output) if ANNOUNCED.match(line)]
    assert output[announced].startswith(f"iteration {AFTER}: recipe ")
    logged = {int(found[1]): n for n, line in enumerate(output) if (found := LOGGED.search(line))}
    assert logged[AFTER] < announced < logged[AFTER + 1]


@pytest.mark.parametrize("case", IN_ORDER)
def test_computes_what_it_switched_to(train, case):
    """A run of the second recipe from the checkpoint at the switch has the same steps."""
    run = train("switched", *switched(case))
    other = train("other", *CASES[case][2], after=(run, AFTER))
    assert steps(other) == {k: v for k, v in steps(run).items() if k > AFTER}


AROUND = [
    pytest.param(case, AFTER, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES
] + [
    pytest.param(case, iteration, marks=[pytest.mark.slow] * (case != "to delayed scaling"))
    for case in ("all", "to delayed scaling", "from delayed scaling")
    for iteration in (AFTER - 1, AFTER + 1)
]


@pytest.mark.parametrize(("case", "iteration"), AROUND)
def test_resumes_to_the_bit_around_it(train, case, iteration):
    """Runs resume before, at and after the switch, and print the current recipe."""
    run = train("switched", *switched(case))
    resumed = train("resumed", *switched(case), after=(run, iteration))
    assert steps(resumed) == {k: v for k, v in steps(run).items() if k > iteration}
    output = (resumed / "output.txt").read_text().splitlines()
    assert any(ANNOUNCED.match(line) for line in output) == (iteration < AFTER)
    name = re.compile(r"recipe (\S+)$")
    (begun,) = [line for line in output if line.startswith(f"in force from iteration {iteration} ")]
    before = (run / "output.txt").read_text().splitlines()
    (first,) = [line for line in before if line.startswith("in force from iteration 0 on: ")]
    (announced,) = [line for line in before if ANNOUNCED.match(line)]
    expected = first if iteration < AFTER else announced
    assert name.search(begun)[1] == name.search(expected)[1]


@pytest.mark.parametrize(
    ("case", "with_histories"),
    [("to delayed scaling", [3, 4]), ("from delayed scaling", [1, 2, 3, 4])],
)
def test_checkpoints_hold_the_histories_that_the_next_step_needs(train, case, with_histories):
    """A layer whose backward pass keeps delayed scaling keeps its history."""
    run = train("switched", *switched(case))
    recorded = [
        step
        for step in range(1, LENGTH + 1)
        if any((h >= 0).any() for h in saved_histories(run / f"iter_{step:07d}").values())
    ]
    assert recorded == with_histories


def test_two_switches_apply_in_order(train):
    """The forward pass switches first, the rest later."""
    run = train(
        "twice", "--precision-recipe", NVFP4,
        "--recipe-set", "switches.first={iteration: 1, to: bf16, part: forward}",
        "--recipe-set", "switches.second={iteration: 3, to: bf16, part: backward}",
    )  # fmt: skip
    forward = train("forward", "--fp8-recipe", BF16, "--fp4-recipe", NVFP4, after=(run, 1))
    high = train("high", "--precision-recipe", BF16, after=(run, 3))
    assert [steps(run)[step] == steps(forward)[step] for step in (2, 3, 4)] == [True, True, False]
    assert steps(high) == {4: steps(run)[4]}


def test_a_switch_at_the_start_is_the_other_recipe(train):
    run = train("now", "--precision-recipe", NVFP4, "--recipe-set",
                "switches.now={iteration: 0, to: bf16}")  # fmt: skip
    assert steps(run) == steps(train("plain", "--precision-recipe", BF16))


@pytest.mark.slow
def test_a_run_resumes_in_the_phase_of_its_tokens(pretrain_here, tmp_path):
    """With another batch size the iteration does not tell how many tokens the run has consumed."""
    switch = ("--precision-recipe", BF16, "--recipe-set",
              f"switches.late={{tokens: 200, to: {DELAYED}}}")  # fmt: skip
    first = tmp_path / "first"
    done(pretrain_here(*switch, "--train-iters", 3, "--save", first, "--save-interval", 2))
    load = ("--load", start_from(first, 2, tmp_path / "second"), "--global-batch-size", 2)
    result = pretrain_here(*switch, "--train-iters", 3, *load, "--save", tmp_path / "second")
    done(result)
    assert "in force from iteration 2 on: recipe delayed" in result.stdout
