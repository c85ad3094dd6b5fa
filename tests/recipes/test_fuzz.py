"""Fuzzed recipe files and ``--recipe-set``: a recipe or a UserError of one line, and quickly."""

from contextlib import redirect_stdout
from datetime import timedelta
from io import StringIO
from unicodedata import category

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe, shipped_recipes
from megatron_lowbit.recipes.command import main
from tests.fuzzed_yaml import SNIPPETS, any_value, changed_documents, damaged_texts

TEXTS = sorted({entry.read_text(encoding="utf-8") for entry in shipped_recipes().values()})
WORDS = [
    *["nvfp4", "mxfp8-e4m3", "nearest", "group", "fresh", "regex", "blocks", "mlp", "bf16"],
    *["*", "(a|b)*$", "(?=x)", "[a", "[/m]", "1e-99999999999", "1/3", "2/0", "x.yaml", "\x9b"],
]
KEYS = [
    *["input", "weight", "grad", "fprop", "dgrad", "wgrad", "format", "rounding", "tensor_scale"],
    *["hadamard", "size", "signs", "amax_history", "length", "accumulation", "inner", "fallback"],
    *["hot_channels"],
    *["name", "description", "configs", "matchers", "switches", "nvfp4", "bf16_blocks", "linears"],
    *["type", "config", "enabled", "first", "last", "numbers", "kinds", "pattern"],
    *["heal", "to", "part", "tokens", "iteration", "fraction"],
]
VALUES = any_value(KEYS, WORDS)
FIELDS = st.lists(st.sampled_from(KEYS) | st.text(max_size=4), min_size=1, max_size=4)
SHORT = st.builds(
    lambda value: yaml.dump(value, default_flow_style=True).replace("\n...\n", ""), VALUES
)
OVERRIDES = st.builds(
    lambda path, sign, value: ".".join(path) + sign + value,
    FIELDS,
    st.sampled_from(["=", "=", "=", "=", "", "=="]),
    SHORT | st.sampled_from(SNIPPETS) | st.text(max_size=8),
)
SETTINGS = {"deadline": timedelta(seconds=5)}


def show_or_refuse(name, overrides=()):
    printed = StringIO()
    try:
        load_recipe(name, overrides)
        with redirect_stdout(printed):
            main(["show", name, "--num-layers=2", *(f"--recipe-set={one}" for one in overrides)])
    except UserError as error:
        assert str(error).isprintable()
    for char in printed.getvalue():
        assert char == "\n" or category(char) not in ("Cc", "Cs")


@pytest.mark.parametrize("examples", [80, pytest.param(2000, marks=pytest.mark.slow)])
def test_fuzzed_files(tmp_path, examples):
    path = tmp_path / "fuzzed.yaml"

    @settings(max_examples=examples, **SETTINGS)
    @given(data=damaged_texts(TEXTS) | changed_documents(TEXTS, KEYS, WORDS))
    def fuzz(data):
        path.write_bytes(data)
        show_or_refuse(str(path))

    fuzz()


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_fuzzed_overrides(examples):
    @settings(max_examples=examples, **SETTINGS)
    @given(
        name=st.sampled_from(list(shipped_recipes())),
        overrides=st.lists(OVERRIDES, min_size=1, max_size=3),
    )
    def fuzz(name, overrides):
        show_or_refuse(name, overrides)

    fuzz()
