"""Figures of recipes on the pages that recommend them equal the generated pages."""

import re
from collections.abc import Iterator

import pytest
from pages import ROOT

DOCS = ROOT / "docs"
NOT_MEASURED = "not measured"
STEPS = r"### Llama-3-8B: 10 of 32 layers, full vocabulary: NVIDIA {}\b.*?\n\n(\|.*?)\n\n"


def rows(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all tables of a text by their headings."""
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        head, _, *lines = (
            [cell.strip() for cell in x.split("|")[1:-1]] for x in table.splitlines()
        )
        yield from (dict(zip(head, line, strict=True)) for line in lines)


RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


def steps(gpu: str, base: str = "× BF16") -> dict[str, str]:
    """Return speeds relative to a base of whole steps in CUDA graphs."""
    (table,) = re.findall(STEPS.format(gpu), RESULTS, re.DOTALL)
    return {row[""]: row[base] for row in rows(table)}


H100, H200 = steps("H100"), steps("H200")
GAPS = {row[""]: row["gap"] for row in rows((DOCS / "research" / "leaderboard.md").read_text())
        if "gap" in row}  # fmt: skip


def speed(measured: dict[str, str], recipe: str) -> str:
    kinds = (f"{recipe}, own loss, graphs", f"{recipe}, graphs")
    return next((measured[kind] for kind in kinds if kind in measured), NOT_MEASURED)


def both(recipe: str) -> str:
    found = [speed(H100, recipe), speed(H200, recipe)]
    return NOT_MEASURED if set(found) == {NOT_MEASURED} else " / ".join(found)


EXPECTED = {
    "H100": lambda recipe: speed(H100, recipe),
    "H200": lambda recipe: speed(H200, recipe),
    "step, H100 / H200": both,
    "× BF16, H100 / H200": both,
    "loss gap": lambda recipe: GAPS.get(recipe, NOT_MEASURED),
    "loss gap of a 60M model": lambda recipe: GAPS.get(recipe, NOT_MEASURED),
}
# H100 and H200 of mxfp4.md are speeds of a model without an optimizer.
PAGES = {
    "choose-a-recipe.md": set(), "recipes/fp8.md": set(), "recipes/mxfp8.md": set(),
    "recipes/mxfp4.md": {"H100", "H200"}, "recipes/nvfp4.md": set(),
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_figures(page: str):
    checked = 0
    for row in rows((DOCS / page).read_text(encoding="utf-8")):
        name, *_ = row.values()
        recipe = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", name).replace("`", "")
        recipe = recipe.removesuffix(", for comparison")
        for heading in (EXPECTED.keys() - PAGES[page]) & row.keys():
            assert row[heading] == EXPECTED[heading](recipe), f"{recipe}: {heading}"
            checked += 1
    assert checked >= 3


FP8, BF16 = "Megatron-LM FP8 tensorwise", "Megatron-LM BF16"
NATIVE = f"{FP8}, native fused loss"
PEAKS = {row[""]: row["peak, GiB"] for row in rows(RESULTS) if "peak, GiB" in row}


def prose(page: str) -> str:
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


def test_memory():
    most = {PEAKS[f"{name}, own loss"] for name in ("mxfp8", "fp8-tile", FP8)}
    figures = f"need {most.pop()} GiB under `mxfp8`, `fp8-tile` and stock tensorwise FP8, compared"
    assert not most
    assert f"{figures} with {PEAKS[f'{BF16}, own loss']} for BF16" in prose("memory.md")


def test_fused_losses():
    gain = steps("H100", "× tensorwise, native fused loss")[f"{FP8}, own loss, graphs"]
    assert f"are {gain} times as fast under Megatron-LM tensorwise" in prose("megatron-lm.md")
    assert f"BF16 is {H100[f'{BF16}, own loss, graphs']} times as fast" in prose("megatron-lm.md")
    saved = f"{float(PEAKS[NATIVE]) - float(PEAKS[f'{FP8}, own loss']):.1f} GiB"
    for page in ("memory.md", "megatron-lm.md", "choose-a-recipe.md"):
        assert saved in prose(page)


def two_gpus(title: str, column: str) -> dict[str, str]:
    """Return a column of a table of two H200s by row, without the fastest step in parentheses."""
    _, _, text = RESULTS.partition("## Whole training steps on two NVIDIA H200s")
    (table,) = re.findall(rf"### {re.escape(title)}.*?\n\n(\|.*?)\n\n", text, re.DOTALL)
    return {row[""]: row[column].partition(" ")[0] for row in rows(table)}


def test_split_layers():
    took = two_gpus("Llama-3-8B: 10 of 32 layers", "ms (fastest)")
    fused = [
        took[f"{name} in local layers{more}, own loss"]
        for name in ("mxfp8", "fp8-row")
        for more in (" with the fused all-reduce", "")
    ]
    stock, tile = took[f"{BF16}, own loss"], took["fp8-tile, own loss"]
    split = took["fp8-tile with sequence parallelism, own loss"]
    page = prose("research/fused-allreduce.md")
    assert (
        "{} ms per step with it and {} without under `mxfp8`, and {} and {}".format(*fused) in page
    )
    assert f"layers take {stock} ms in BF16" in page
    layers = f"takes {stock} ms in BF16, {tile} under `fp8-tile`, and {split} with sequence"
    assert layers in prose("distributed.md")


def test_data_and_context_parallelism():
    text = (DOCS / "distributed.md").read_text(encoding="utf-8")
    data, context = (row for row in rows(text) if "stock tensorwise FP8" in row)
    whole, long = (two_gpus(f"Llama-3-8B: {n} layers", "tokens/s") for n in ("all", "16 of 32"))
    names = (BF16, FP8, "mxfp8 with its output layer")
    assert [*data.values()][1:] == [whole[f"{name}, own loss, graphs"] for name in names]
    assert [*context.values()][1:] == [long[f"{name}, own loss"] for name in (BF16, FP8, "mxfp8")]


def test_spread_experts():
    took = two_gpus("Qwen3-30B-A3B: 6 of 48 layers", "ms (fastest)")
    text = (DOCS / "experts.md").read_text(encoding="utf-8")
    shown = [row for row in rows(text) if "step, ms" in row]
    assert len(shown) == 5
    for row in shown:
        name = row[""].strip("`").replace("stock ", "").replace("FP8, ", "FP8 ")
        assert row["step, ms"] == took[f"{name}, own loss"]
        assert row["in CUDA graphs"] == took.get(f"{name}, own loss, graphs", "")
