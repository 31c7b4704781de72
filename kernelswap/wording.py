"""The words for a fault that a schema finds: what is wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from kernelswap.schema import ProfileFile, Server
from kernelswap.yamlfile import Loc

_SIMPLE = {
    "int_type": ("is not a whole number", "write a number without quotes"),
    "float_type": ("is not a number", "write a number without quotes"),
    "bool_type": ("is not true or false", "write true or false"),
    "string_type": ("is not text", "write text; quote it if it looks like a number"),
    "dict_type": ("is not a mapping", "write `key: value` lines below it"),
    "model_type": ("is not a mapping", "write `key: value` lines below it"),
    "model_attributes_type": ("is not a mapping", "write `key: value` lines below it"),
    "list_type": ("is not a list", "write `- item` lines below it"),
    "tuple_type": ("is not a list", "write a list, e.g. [gpu1, gpu2]"),
    "missing": ("is missing", "add it"),
    "finite_number": ("is not a finite number", "write a number"),
    "string_too_short": ("is empty", "write a text"),
    "string_pattern_mismatch": ("has the wrong form", "write the name of a variable"),
}


def explain(schema: type[BaseModel], detail: ErrorDetails, loc: Loc) -> tuple[str, str]:
    """What is wrong at a place, and what to do. loc: without pydantic's own marks."""
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "kernelswap":
        return context["what"], context["todo"]
    if _is_secret(loc) and kind.startswith("model"):
        return "is a secret in clear", "write {env: NAME} or {file: PATH}, and change that secret now"
    if kind == "extra_forbidden" and schema is ProfileFile and len(loc) in (1, 3) and loc[-1] in _keys(Server, ()):
        return "is not for profiles", "set it in the model or in the host's data"
    if kind == "extra_forbidden":
        return "unknown key", nearest(str(loc[-1]), _keys(schema, loc[:-1]))
    if kind == "literal_error":
        return "is not one of the choices", f"use {context['expected']}".replace("'", "")
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    return detail["msg"].removeprefix("Input ").replace("should be", "must be"), "change the value"


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return "use one of: " + ", ".join(names) if names else "there is none yet; write its file first"


def _is_secret(loc: Loc) -> bool:
    """Whether a place is that of a SecretFile."""
    return (loc[:1] == ("secrets",) and len(loc) == 2) or (loc[:1], loc[-1]) in (
        (("routers",), "key"),
        (("key",), "key"),
        (("hooks",), "webhook"),
    )


def _keys(schema: type[BaseModel], loc: Loc) -> list[str]:
    """The keys that are allowed at a place of a schema."""
    for item in loc:
        field = next((field for field in schema.model_fields.values() if field.alias == item), None)
        schema = _schema_in(field.annotation) or schema if field else schema
    return [field.alias or name for name, field in schema.model_fields.items()]


def _schema_in(annotation: Any) -> type[BaseModel] | None:
    """The schema of what an annotation holds: alone, in a list, a map or a choice."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_schema_in, get_args(annotation))), None)
