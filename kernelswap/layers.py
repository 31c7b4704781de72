"""One place's values, to be laid over others, with every fault in them: of the schema, and of what it cannot say."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from kernelswap import flags as spelling
from kernelswap import wording
from kernelswap.errors import Fault
from kernelswap.yamlfile import Loc


class Source(Protocol):
    """Where a value was written."""

    def where(self, loc: Loc) -> str: ...


@dataclass(frozen=True)
class Layer:
    """Values from one place, to be laid over others. prefix: their place within the source."""

    source: Source
    value: Mapping[str, Any]
    prefix: Loc = ()

    def where(self, loc: Loc) -> str:
        return self.source.where((*self.prefix, *loc))


def check(schema: type[BaseModel], layer: Layer, whole: bool = False, settings: bool = True) -> Iterator[Fault]:
    """The faults of one layer. whole: also what is missing from it. settings: whether its flags are SGLang's."""
    try:
        schema.model_validate(layer.value)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            # A later layer may bring what is missing, except inside a list: lists are replaced whole.
            if whole or detail["type"] != "missing" or any(isinstance(item, int) for item in detail["loc"]):
                loc = tuple(item for item in detail["loc"] if item != "[key]")
                yield Fault(layer.where(loc), *wording.explain(schema, detail, loc))
    for prefix in _settings_within(layer.value) if settings else ():
        for loc, what, todo in _findings(_at(layer.value, prefix)):
            yield Fault(layer.where((*prefix, *loc)), what, todo)


def _settings_within(value: Mapping[str, Any]) -> Iterator[Loc]:
    yield ()
    overrides = value.get("models")
    for name, override in overrides.items() if isinstance(overrides, dict) else ():
        if isinstance(override, dict):
            yield ("models", name)


def _at(value: Mapping[str, Any], loc: Loc) -> Mapping[str, Any]:
    for key in loc:
        value = value[key]  # type: ignore[index]
    return value


def _findings(settings: Mapping[str, Any]) -> Iterator[spelling.Finding]:
    """Faults in flags, environment and secrets, whose keys are not ours, and those that several keys make together."""
    yield from _traffic_findings(settings)
    flags = settings.get("flags")
    if isinstance(flags, dict):
        for loc, what, todo in spelling.findings(flags):
            yield ("flags", *loc), what, todo
    environment = settings.get("environment")
    for name, value in environment.items() if isinstance(environment, dict) else ():
        for what, todo in environment_problems(name, value):
            yield ("environment", str(name)), what, todo
    secrets = settings.get("secrets")
    for name, secret in secrets.items() if isinstance(secrets, dict) else ():
        if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9-]*", name):
            yield ("secrets", str(name)), "is not a flag's name", "write it as SGLang's flag, e.g. api-key"
        elif name in spelling.OWNED and name not in spelling.SECRETS:
            yield ("secrets", name), f"Kernelswap sets --{name} itself", spelling.OWNED[name]
        elif name not in spelling.SECRETS:
            yield ("secrets", name), "is no secret of SGLang's", f"use one of: {', '.join(spelling.SECRETS)}"
        yield from _source_findings(("secrets", str(name)), secret)
        if isinstance(flags, dict) and flags.get(name) not in (None, False):
            yield ("secrets", str(name)), "is given under `flags` too", "keep it here only"


def _traffic_findings(settings: Mapping[str, Any]) -> Iterator[spelling.Finding]:
    """Faults that several keys below `routers` and `hooks` make together."""
    routers, hooks = settings.get("routers"), settings.get("hooks")
    seen: set[str] = set()
    for index, router in enumerate(routers if isinstance(routers, list) else ()):
        url = router if isinstance(router, str) else router.get("url") if isinstance(router, dict) else None
        if isinstance(url, str) and (url := url.rstrip("/")) in seen:
            yield ("routers", index), "is listed twice", "name each router once"
        elif isinstance(url, str):
            seen.add(url)
        if isinstance(router, dict):
            yield from _source_findings(("routers", index, "key"), router.get("key"))
    for moment, hook in hooks.items() if isinstance(hooks, dict) else ():
        if isinstance(hook, dict):
            yield from _source_findings(("hooks", str(moment), "webhook"), hook.get("webhook"))
            if (hook.get("command") is None) == (hook.get("webhook") is None):
                todo = "write {command: [/PATH, ...]} or {webhook: {env: NAME}}"
                yield ("hooks", str(moment)), "needs a command or a webhook", todo


def _source_findings(loc: tuple[str | int, ...], secret: Any) -> Iterator[spelling.Finding]:
    if isinstance(secret, dict) and (secret.get("env") is None) == (secret.get("file") is None):
        yield loc, "needs one source", "write {env: NAME} or {file: PATH}"


_SECRET_NAME = re.compile(r"(^|_)(TOKEN|API_?KEY|SECRET(_KEY)?|ACCESS_KEY|PASSWORD|PASSWD)$")
_DROPPED = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (65534, 65535))
    + "]"
)
_GPU_NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")


def environment_problems(name: Any, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        yield "is not the name of a variable", "use letters, digits and underscores"
        return
    if name in _GPU_NAMES:
        yield "would contradict what Kernelswap checks and frees", "choose GPUs with `gpus:`"
    if name == "SGLANG_GRPC_PORT":
        yield "opens a second listener, which no swap shuts off", "remove it"
    if value is None:
        return
    if _SECRET_NAME.search(name) and value != "":
        yield "looks like a secret in clear", "keep secrets out of units: let the server read a file (HF_TOKEN_PATH)"
    elif isinstance(value, bool):
        yield "is true or false, which variables cannot hold", 'quote the word that is meant, e.g. "1" or "true"'
    elif not isinstance(value, int | float | str):
        yield "is not a text", "write a text or a number"
    elif isinstance(value, float) and not math.isfinite(value):
        yield "is not a finite number", "quote it if it is text"
    elif problem := spelling.word_problem(spelling.text(value)):
        yield problem
    elif _DROPPED.search(spelling.text(value)):
        yield "holds a control character or a noncharacter, and systemd would drop the variable", "remove it"
    elif name == "CUDA_HOME" and (":" in str(value) or not str(value).startswith("/")):
        yield "is not one absolute path", "name the CUDA toolkit's folder, e.g. /usr/local/cuda"
