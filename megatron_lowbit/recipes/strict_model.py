"""Base of the models that recipe files are checked with, and the text of their errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from megatron_lowbit.errors import UserError


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Turn a ValueError into a UserError whose message begins with the prefix."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None


class StrictModel(BaseModel):
    """A frozen model that names its keys where an unknown one is given."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _knows_the_keys(cls, data: Any) -> Any:
        return _check_keys(data, list(cls.model_fields))


def fields_of(kind: type) -> BeforeValidator:
    """Return a validator that knows the keys of a dataclass; pydantic would ignore others."""
    names = [field.name for field in fields(kind)]
    return BeforeValidator(lambda data: _check_keys(data, names))


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


def _check_keys(data: Any, known: list[str]) -> Any:
    """Return data; raise for the first key of a mapping that is not a known one."""
    if isinstance(data, dict):
        for key in data:
            if key not in known:
                raise wrong_key(str(key), f"no such key; use one of {', '.join(known)}")
    return data
