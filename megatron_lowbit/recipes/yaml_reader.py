"""YAML of recipes and studies: text, numbers, lists and mappings, limited in size and checked.

What PyYAML's safe loader makes of other people's files can be endless (aliases of aliases), or an
exception that is not YAML's (``!!int x``, the date 2026-02-30), or nothing at all (a second key of
the same name). Here each is one line that names the place.
"""

import copy
import reprlib
from typing import Annotated, Any, ClassVar, get_type_hints
from unicodedata import category

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from megatron_lowbit.errors import UserError

MAX_CHARACTERS = 2**16
MAX_VALUES = 2000
"""Keys, values, lists and mappings of a file, each as often as aliases repeat it."""
MAX_DEPTH = 32

_TYPES = ("null", "bool", "int", "float", "str", "seq", "map", "merge")
_TAGS = [f"tag:yaml.org,2002:{name}" for name in _TYPES]
_KEYS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")


def read_yaml(text: str) -> Any:
    """Read one YAML document. Dates are text; aliases are copies.

    Raises ValueError for other types, a key given twice, control characters, and what is too large.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS:,} characters")
    try:
        return _Loader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_text(file: Any, name: str) -> str:
    """Read as much of a file, or of a package's resource, as :func:`read_yaml` accepts.

    Raises UserError that begins with ``name``, such as ``recipe file mine.yaml``, where the file is
    missing, not regular, or cannot be read.
    """
    try:
        if not file.is_file():
            raise UserError(f"{name} {'is not a file' if file.exists() else 'does not exist'}")
        with file.open("rb") as opened:
            # UTF-8 has up to four bytes per character.
            return str(opened.read(4 * MAX_CHARACTERS + 1), encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name}: {getattr(error, 'strerror', error)}") from None


def has_control_characters(text: str) -> bool:
    """Check for characters that a terminal may take for a command, or cannot encode."""
    return any(category(char) in ("Cc", "Cs") and char not in "\n\t" for char in text)


class _Loader(yaml.SafeLoader):
    """Safe loader that knows few types and counts what it composes."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag in (None, *_TAGS)
    }
    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {  # type: ignore[misc]
        first: [(tag, expression) for tag, expression in resolvers if tag in _TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = 0
        self._depth = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a node, and count it and all below it. An alias counts as what it repeats."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        aliased = self.check_event(yaml.AliasEvent)
        before = self._values
        self._values += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refused(f"nested more than {MAX_DEPTH} deep", mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if not aliased:
            self._sizes[node] = self._values - before
        elif node not in self._sizes:
            raise _refused("an alias stands inside of what it repeats", mark)
        else:
            self._values += self._sizes[node]
        if self._values > MAX_VALUES:
            raise _refused(f"more than {MAX_VALUES:,} values", mark)
        return copy.deepcopy(node) if aliased else node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping whose keys are text and differ; PyYAML would keep the last equal one.

        YAML takes the names ``no``, ``on`` and ``1`` for other types.
        """
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag not in _KEYS:
                problem = f"the key {reprlib.repr(key.value)} is not text; put it into quotes"
                raise _refused(problem, key.start_mark)
            if key.value in seen:
                raise _refused(f"a second key {reprlib.repr(key.value)}", key.start_mark)
            seen.add(key.value)
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct an object. An exception of its type becomes an error of YAML's."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, LookupError, OverflowError):
            problem = f"{reprlib.repr(node.value)} is no {node.tag.rpartition(':')[2]}"
            raise _refused(problem, node.start_mark) from None
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _refused("an integer of more than 64 bits", node.start_mark)
        if isinstance(value, str) and has_control_characters(value):
            raise _refused(f"control characters in {reprlib.repr(value)}", node.start_mark)
        return value


def _refused(problem: str, mark: yaml.Mark) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class StrictModel(BaseModel):
    """A frozen model whose error about an unknown key names the known ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, data: Any) -> Any:
        return _with_known_keys(data, list(cls.model_fields))


def fields_of(dataclass: type) -> BeforeValidator:
    """Return a validator that refuses unknown keys of a dataclass, and booleans as numbers.

    Pydantic would ignore the keys, and convert the booleans.
    """
    types = get_type_hints(dataclass)

    def check(data: Any) -> Any:
        _with_known_keys(data, list(types))
        for key, value in data.items() if isinstance(data, dict) else ():
            if types[key] in (int, int | None, float) and isinstance(value, bool):
                raise wrong_key(key, f"input should be a number, not {value}")
        return data

    return BeforeValidator(check)


def _not_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"input should be a number, not {value}")
    return value


Number = Annotated[float, BeforeValidator(_not_boolean)]
Integer = Annotated[int, BeforeValidator(_not_boolean)]
"""Numbers, but no booleans, which pydantic would convert."""


def _with_known_keys(data: Any, known: list[str]) -> Any:
    for key in data if isinstance(data, dict) else ():
        if key not in known:
            raise wrong_key(str(key), f"no such key; use one of {', '.join(known)}")
    return data


def wrong_key(key: str, problem: str) -> PydanticCustomError:
    """Return an error that belongs to a key of the mapping that is being checked."""
    # pydantic fills in braces, which may be in values.
    return PydanticCustomError("wrong_key", "{problem}", {"key": key, "problem": problem})


def first_error(error: ValidationError) -> str:
    """Return ``key: problem`` of the first error."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if path[0:1] == ["matchers"]:
        del path[2:3]  # the matcher's type, which pydantic puts behind its name
    if first["type"] == "union_tag_not_found":
        return f"{'.'.join(path)}.type: missing; use one of blocks, glob, regex"
    if first["type"] == "wrong_key":
        path.append(first["ctx"]["key"])
    message = first["msg"].removeprefix("Value error, ")
    return f"{'.'.join(path) or 'the file'}: {message[0].lower() + message[1:]}"
