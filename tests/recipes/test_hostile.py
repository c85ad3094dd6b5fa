"""Recipe files and ``--recipe-set`` that no honest user writes, and some that one does."""

import pytest

from megatron_lowbit.errors import UserError
from megatron_lowbit.recipes import load_recipe
from megatron_lowbit.recipes.command import main

CONFIGS = "configs:\n  a: {input: {format: mxfp8-e4m3}}\n"
MATCHERS = "matchers:\n  m: {type: glob, pattern: '*', config: a, enabled: true}\n"
BODY = CONFIGS + MATCHERS


def matcher(fields):
    return f"name: x\n{CONFIGS}matchers:\n  m: {{{fields}, config: a, enabled: true}}\n"


def aliases(first, following, depth):
    """Return lines of which each repeats the one before, several times."""
    lines = [f"a0: &a0 {first}"]
    for number in range(1, depth):
        lines.append(f"a{number}: &a{number} " + following.replace("*", f"*a{number - 1}"))
    return "\n".join(lines)


GLOBS = "".join(f"  m{n}: {{type: glob, pattern: x, config: a, enabled: 1}}\n" for n in range(65))
SWITCHES = "".join(f"  s{n}: {{iteration: {n}, to: bf16}}\n" for n in range(17))
REFUSED = {
    "lists of lists": (aliases("[x]", "[" + "*, " * 10 + "]", 12), ["line 4", "2,000 values"]),
    "merged maps": (aliases("{x: 1}", "{<<: [*, *]}", 60), ["2,000 values"]),
    "itself": ("name: x\nconfigs: &a {b: *a}\n", ["line 2", "alias"]),
    "flow depth": ("[" * 5000, ["line 1", "32 deep"]),
    "block depth": ("- " * 5000, ["32 deep"]),
    "length": ("name: x\n" + "# comment\n" * 10**5, ["65,536 characters"]),
    "values": ("name: [" + "1," * 10000 + "]", ["2,000 values"]),
    "matchers": (f"name: x\n{CONFIGS}matchers:\n{GLOBS}", ["matchers", "64"]),
    "switches": (f"name: x\n{BODY}switches:\n{SWITCHES}", ["switches", "16"]),
    "glob": (matcher(f"type: glob, pattern: '{'[' * 50000}'"), ["matchers.m.pattern", "1000"]),
    "look-ahead": (matcher("type: regex, pattern: '(?!x)'"), ["matchers.m.pattern", "look-ahead"]),
    "backreference": (matcher(r"type: regex, pattern: '(a)\1'"), ["m.pattern", "backreferences"]),
    "repetitions": (
        matcher(r"type: regex, pattern: '((\w{99}){99}){99}'"), ["m.pattern", "size limit"],
    ),
    "exponent": (matcher("type: blocks, first: 1e-99999999999"), ["m.first", "fraction such as"]),
    "digits": (matcher("type: blocks, first: " + "9" * 5000), ["line 5", "is no int"]),
    "large": (f"name: x\n{BODY}switches: {{s: {{iteration: 1{'0' * 99}, to: bf16}}}}", ["64 bits"]),
    "base 60": (matcher("type: blocks, first: " + ":".join(["59"] * 20000)), ["line 5", "64 bits"]),
    "infinity": (f"name: x\n{BODY}switches: {{s: {{tokens: .inf, to: bf16}}}}", ["s.tokens"]),
    "history": (f"name: x\n{BODY}".replace("}}", "}, amax_history: {length: 65537}}", 1),
                ["amax_history", "length", "65536"]),
    "int": (f"name: x\ndescription: !!int x\n{BODY}", ["line 2", "'x' is no int"]),
    "empty int": (f"name: x\ndescription: !!int ''\n{BODY}", ["line 2", "'' is no int"]),
    "bool": (f"name: x\ndescription: !!bool x\n{BODY}", ["line 2", "'x' is no bool"]),
    "timestamp": (f"name: x\ndescription: !!timestamp x\n{BODY}", ["line 2", "timestamp"]),
    "object": ("!!python/object/apply:os.system ['true']", ["line 1", "python/object"]),
    "key of another type": ("name: x\nconfigs: {no: {}}\n", ["line 2", "the key 'no' is not text"]),
    "second key": (f"name: x\n{CONFIGS}{BODY}", ["line 4", "second key 'configs'"]),
    "escape sequence": (f'name: "\\e[31mred"\n{BODY}', ["line 1", r"\x1b[31mred"]),
    "escape in a key": (f'name: x\n"\\e]0;title\\a": 1\n{BODY}', ["line 2", r"\x1b]0;title"]),
    "surrogate": (f'name: "\\ud800"\n{BODY}', ["line 1", r"\ud800"]),
    "direction": (f'name: x\n"\\u202eabc": 1\n{BODY}', [r"\u202eabc: no such key"]),
}  # fmt: skip


@pytest.mark.parametrize("text, parts", REFUSED.values(), ids=REFUSED)
def test_refused_files(tmp_path, text, parts):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    message = shown(["show", str(path)])
    assert message.startswith("mine.yaml: ")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "override, parts",
    [
        ("bf16_blocks.first=1e-99999999999", ["bf16_blocks.first", "fraction"]),
        ("description=!!int x", ["'x' is no int"]),
        ("description=[" + "[" * 5000, ["32 deep"]),
        ("linears.pattern=" + "a" * 70000, ["65,536 characters"]),
        ("matchers.\x1b[31m.type=glob", [r"matchers.\x1b[31m.type", "control characters"]),
        ("name=\x1b[31m", [r"name=\x1b[31m"]),
        ('name="\\e[31m"', [r"\x1b"]),
        ("name=\udcff", [r"\udcff"]),
        ("a\nb=1", [r"a\nb", "no field"]),
        ("linears={type: regex, pattern: '(?=x)', config: nvfp4, enabled: true}", ["look-ahead"]),
    ],
)
def test_refused_overrides(override, parts):
    message = shown(["show", "nvfp4", "--recipe-set", override])
    for part in parts:
        assert part in message


def shown(argv):
    """Return the message that a command ends with."""
    with pytest.raises(UserError) as caught:
        main(argv)
    message = str(caught.value)
    assert message.isprintable()  # neither line ends nor escape sequences
    return message


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\x1b[31m", "folder"])
def test_paths_that_are_no_files(tmp_path, name):
    (tmp_path / "folder.yaml").mkdir()
    assert "recipe file" in shown(["show", f"{tmp_path}/{name}.yaml"])


@pytest.mark.parametrize("data", [b"--num-layers '4", b"--num-layers \xff", None])
def test_model_files(tmp_path, data):
    path = tmp_path / "model.args"
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)
    assert f"--model {path}: " in shown(["show", "nvfp4", "--model", str(path)])


def test_dates_are_text(tmp_path):
    for text in ("2026-02-30", "2026-02-03", "="):
        path = tmp_path / "mine.yaml"
        path.write_text(f"name: x\ndescription: {text}\n{BODY}")
        assert load_recipe(str(path)).description == text


def test_names_are_shown_as_they_are(tmp_path, capsys):
    """Rich's markup and its names of emoji are nothing special."""
    path = tmp_path / "mine.yaml"
    text = f'name: "[/m] :smile:"\n{BODY}switches: {{"[b]": {{iteration: 9, to: bf16}}}}'
    path.write_text(text.replace(" m:", ' "[/k]":'))
    main(["show", str(path), "--num-layers", "1"])
    printed = capsys.readouterr().out
    for part in ("recipe [/m] :smile:", "[/k]", "switch [b]: from"):
        assert part in printed


def test_expressions_take_linear_time(tmp_path):
    """Python's ``re`` would need the age of the universe."""
    path = tmp_path / "mine.yaml"
    path.write_text(matcher("type: regex, pattern: '(([a-z._0-9])*)*X'"))
    assert "matches none" in shown(["show", str(path)])
