"""Damaged YAML files, made of good ones, for tests that any content ends in one line."""

import copy
from collections.abc import Iterable, Sequence
from datetime import date

import yaml
from hypothesis import strategies as st

SNIPPETS = [
    *["&a ", "*a", "<<: *a", "!!int ", "!!bool ", "!!binary ", "!!set ", "!!timestamp ", "!x "],
    *["- ", "? ", ": ", "|\n", ">-\n", "[", "]", "{", "}", "'", '"', "#", "\t", "!<"],
    *["\n---\n", "\n...\n"],
    *['"\\e[0m"', '"\\ud800"', "%YAML 9.9\n", "\0", "\x1b", "\x85", "\ufeff", "null", "~", "="],
    *["2026-02-30", "1:30", "0x", ".nan", "-.inf", "1e999", "9" * 5000, "[" * 50, "- " * 50],
    "99:" * 50 + "9",
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
)


def any_key(keys: Sequence[str]) -> st.SearchStrategy:
    """Return strategy of keys: known ones and others."""
    return st.sampled_from(keys) | st.text(max_size=5) | st.integers(-1, 2) | st.none()


def any_value(keys: Sequence[str], words: Sequence[str]) -> st.SearchStrategy:
    """Return strategy of values: scalars, words of the format, and nested ones."""
    return st.recursive(
        SCALARS | st.sampled_from(words),
        lambda children: (
            st.lists(children, max_size=4) | st.dictionaries(any_key(keys), children, max_size=4)
        ),
        max_leaves=12,
    )


@st.composite
def damaged_texts(draw, texts: Iterable[str]):
    """Return one of the texts with bytes changed."""
    data = draw(st.sampled_from(sorted(texts))).encode()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        left_out = draw(st.sampled_from([0, 0, 1, 5, 40]))
        put = draw(st.sampled_from(SNIPPETS).map(str.encode) | st.binary(max_size=3))
        data = data[:at] + put + data[at + left_out :]
    return data


def changed_documents(
    texts: Iterable[str], keys: Sequence[str], words: Sequence[str]
) -> st.SearchStrategy[bytes]:
    """Return one of the texts with values replaced, keys renamed, and parts repeated by aliases."""
    documents = [yaml.safe_load(text) for text in sorted(texts)]
    values, any_keys = any_value(keys, words), any_key(keys)

    @st.composite
    def changed(draw):
        raw = copy.deepcopy(draw(st.sampled_from(documents)))
        for _ in range(draw(st.integers(1, 3))):
            parent, node = None, raw
            while isinstance(node, dict) and node and (parent is None or draw(st.booleans())):
                parent, key = node, draw(st.sampled_from(list(node)))
                node = node[key]
            if parent is None:
                break
            change = draw(st.sampled_from(["value", "value", "key", "alias", "deep"]))
            if change == "value":
                parent[key] = draw(values)
            elif change == "key":
                parent[draw(any_keys)] = parent.pop(key)
            elif change == "alias":
                parent[draw(any_keys)] = raw if draw(st.booleans()) else node
            else:
                for _ in range(draw(st.integers(1, 60))):
                    node = [node] if draw(st.booleans()) else {"a": node}
                parent[key] = node
        text = yaml.dump(raw, sort_keys=False, allow_unicode=draw(st.booleans()))
        return text.encode("utf-8", "surrogatepass")

    return changed()
