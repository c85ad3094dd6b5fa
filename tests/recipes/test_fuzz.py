"""Fuzzed recipe files and ``--recipe-set``: a recipe or a UserError of one line, and quickly."""

import copy
from contextlib import redirect_stdout
from datetime import date, timedelta
from io import StringIO
from unicodedata import category

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe, shipped_recipes
from megatron_lowbit.recipes.command import main

TEXTS = {name: entry.read_text(encoding="utf-8") for name, entry in shipped_recipes().items()}
RAW = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
SNIPPETS = [
    *["&a ", "*a", "<<: *a", "!!int ", "!!bool ", "!!binary ", "!!set ", "!!timestamp ", "!x "],
    *["- ", "? ", ": ", "|\n", ">-\n", "[", "]", "{", "}", "'", '"', "#", "\t", "!<"],
    *["\n---\n", "\n...\n"],
    *['"\\e[0m"', '"\\ud800"', "%YAML 9.9\n", "\0", "\x1b", "\x85", "\ufeff", "null", "~", "="],
    *["2026-02-30", "1:30", "0x", ".nan", "-.inf", "1e999", "9" * 5000, "[" * 50, "- " * 50],
    "99:" * 50 + "9",
]
WORDS = [
    *["nvfp4", "mxfp8-e4m3", "nearest", "group", "fresh", "regex", "blocks", "mlp", "bf16"],
    *["*", "(a|b)*$", "(?=x)", "[a", "[/m]", "1e-99999999999", "1/3", "2/0", "x.yaml", "\x9b"],
]
KEYS = [
    *["input", "weight", "grad", "fprop", "dgrad", "wgrad", "format", "rounding", "tensor_scale"],
    *["hadamard", "size", "signs", "amax_history", "length", "accumulation", "inner", "fallback"],
    *["name", "description", "configs", "matchers", "switches", "nvfp4", "bf16_blocks", "linears"],
    *["type", "config", "enabled", "first", "last", "numbers", "kinds", "pattern"],
    *["heal", "to", "part", "tokens", "iteration", "fraction"],
]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.dates(date(1, 1, 1), date(9999, 12, 31)),
    st.text(max_size=8),
    st.binary(max_size=4),
    st.sampled_from(WORDS),
)
ANY_KEY = st.sampled_from(KEYS) | st.text(max_size=5) | st.integers(-1, 2) | st.none()
VALUES = st.recursive(
    SCALARS,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(ANY_KEY, children, max_size=4)
    ),
    max_leaves=12,
)


@st.composite
def damaged_texts(draw):
    """Return a shipped file with bytes changed."""
    data = draw(st.sampled_from(sorted(TEXTS.values()))).encode()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        left_out = draw(st.sampled_from([0, 0, 1, 5, 40]))
        put = draw(st.sampled_from(SNIPPETS).map(str.encode) | st.binary(max_size=3))
        data = data[:at] + put + data[at + left_out :]
    return data


@st.composite
def changed_recipes(draw):
    """Return a shipped recipe with values replaced, keys renamed, and parts repeated by aliases."""
    raw = copy.deepcopy(draw(st.sampled_from(list(RAW.values()))))
    for _ in range(draw(st.integers(1, 3))):
        parent, node = None, raw
        while isinstance(node, dict) and node and (parent is None or draw(st.booleans())):
            parent, key = node, draw(st.sampled_from(list(node)))
            node = node[key]
        if parent is None:
            break
        change = draw(st.sampled_from(["value", "value", "key", "alias", "deep"]))
        if change == "value":
            parent[key] = draw(VALUES)
        elif change == "key":
            parent[draw(ANY_KEY)] = parent.pop(key)
        elif change == "alias":
            parent[draw(ANY_KEY)] = raw if draw(st.booleans()) else node
        else:
            for _ in range(draw(st.integers(1, 60))):
                node = [node] if draw(st.booleans()) else {"a": node}
            parent[key] = node
    text = yaml.dump(raw, sort_keys=False, allow_unicode=draw(st.booleans()))
    return text.encode("utf-8", "surrogatepass")


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
SETTINGS = {"database": None, "derandomize": True, "deadline": timedelta(seconds=5)}


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


def fuzz_files(folder, examples):
    path = folder / "fuzzed.yaml"

    @settings(max_examples=examples, **SETTINGS)
    @given(data=damaged_texts() | changed_recipes())
    def fuzz(data):
        path.write_bytes(data)
        show_or_refuse(str(path))

    fuzz()


def fuzz_overrides(examples):
    @settings(max_examples=examples, **SETTINGS)
    @given(
        name=st.sampled_from(list(shipped_recipes())),
        overrides=st.lists(OVERRIDES, min_size=1, max_size=3),
    )
    def fuzz(name, overrides):
        show_or_refuse(name, overrides)

    fuzz()


def test_fuzzed_files(tmp_path):
    fuzz_files(tmp_path, 80)


def test_fuzzed_overrides():
    fuzz_overrides(120)


@pytest.mark.slow
def test_many_fuzzed_files(tmp_path):
    fuzz_files(tmp_path, 2000)


@pytest.mark.slow
def test_many_fuzzed_overrides():
    fuzz_overrides(2000)
