"""Models and profiles: YAML files, read strictly, with every fault of every file reported at once.

A file is checked alone here; what several of them make together is checked in spec.py.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from kernelswap import flags as spelling
from kernelswap.errors import ConfigError, Fault
from kernelswap.protocol import Accuracy, Drain, DriftLimits, Hook, Retention, Smoke, Throughput, Timeouts, Verify
from kernelswap.yamlfile import Document, Loc, read

_WORD = re.compile(r"[!-~]+")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def _fault(what: str, todo: str) -> PydanticCustomError:
    # Braces would be taken for a template's fields.
    return PydanticCustomError("kernelswap", "{what}", {"what": what, "todo": todo})


def absolute_path(value: str) -> str:
    if not re.fullmatch(r"/[^\s%$\"'\\:]*", value) or "/../" in f"{value}/":
        raise _fault("is not a plain absolute path", "write the path on the host, without spaces, quotes, $, % or :")
    return value.rstrip("/") or "/"


def _model_path(value: str) -> str:
    if not value.startswith("/"):
        raise _fault("is not an absolute path", "name the model's folder on the host; downloads at start are not safe")
    if problem := spelling.word_problem(value):
        raise _fault(*problem)
    return value


def _served_name(value: str) -> str:
    if problem := spelling.word_problem(value):
        raise _fault(*problem)
    if not value.strip() or not value.isprintable():
        raise _fault("is not a name", "write a name without line breaks")
    if ":" in value:
        raise _fault("holds a colon, which SGLang keeps for `model:adapter`", "choose a name without it")
    return value


def listen_address(value: str) -> str:
    try:
        return value if value == "localhost" else str(ipaddress.ip_address(value))
    except ValueError:
        raise _fault("is not an IP address", "write the address to listen on, e.g. 0.0.0.0 or 127.0.0.1") from None


def linux_user(value: str) -> str:
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", value):
        raise _fault("is not the name of a Linux user", "write the name of the service's user, e.g. sglang")
    return value


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise _fault(f"is not a regular expression: {error}", "escape special characters with a backslash") from None
    return value


def _version(value: str) -> str:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*([.+-]?[0-9A-Za-z]+)*", value):
        raise _fault("is not a version", 'write it as it is installed, in quotes, e.g. "0.5.23"')
    return value


def _architecture(value: str) -> str:
    if not re.fullmatch(r"sm[1-9][0-9]{1,2}", value):
        raise _fault("is not a GPU architecture", "write sm and the compute capability without its dot, e.g. sm120")
    return value


def _gpus(value: Any) -> Any:
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1024):
        return value
    if isinstance(value, list) and value:
        texts = [str(item) for item in value]
        indices = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1024 for item in value)
        uuids = all(isinstance(item, str) and re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", item) for item in value)
        if len(set(texts)) != len(texts):
            raise _fault("names a GPU twice", "name each GPU once")
        if indices or uuids:
            return value
    raise _fault("is not a choice of GPUs", "write a count, all, or a list of indices or of GPU- UUIDs")


def _concurrency(value: Any) -> Any:
    steps = value if isinstance(value, list) else [value]
    if not steps or not all(isinstance(step, int) and not isinstance(step, bool) for step in steps):
        raise _fault("is not a concurrency", "write a number of requests at once, or a list, e.g. [1, 8, 64]")
    if not all(1 <= step <= 65536 for step in steps):
        raise _fault("must be from 1 to 65536", "change the value")
    if len(set(steps)) != len(steps) or len(steps) > 8:
        raise _fault("is not a ladder", "name each concurrency once, eight at most")
    return value


def _floor(value: Any) -> Any:
    rates = list(value.values()) if isinstance(value, dict) else [value]
    if not all((isinstance(rate, int | float) and not isinstance(rate, bool)) or value is None for rate in rates):
        raise _fault("is not a number", "write output tokens per second, or one for each concurrency, e.g. {64: 180}")
    if not all(rate is None or math.isfinite(rate) for rate in rates):
        raise _fault("is not a finite number", "write a number")
    if not all(rate is None or rate >= 0 for rate in rates):
        raise _fault("must be greater than or equal to 0", "change the value")
    if isinstance(value, dict) and not all(str(at).isdigit() for at in value):
        raise _fault("has a key that is no concurrency", "write one of `concurrency`, e.g. {64: 180}")
    return value


def _router(value: Any) -> Any:
    """A router that asks for no key may be its URL alone."""
    return {"url": value} if isinstance(value, str) else value


def _router_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        plain = False
    if (
        not plain
        or parts.path.strip("/")
        or parts.query
        or parts.fragment
        or "@" in value
        or not _WORD.fullmatch(value)
    ):
        raise _fault("is not the URL of a router", "write http://ADDRESS:PORT, and nothing after it")
    return value.rstrip("/")


def _address(value: str) -> str:
    with suppress(ValueError):
        return str(ipaddress.ip_address(value))
    if not re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", value):
        raise _fault("is neither a name nor an IP address", "write how routers reach the host, e.g. 10.0.0.5")
    return value.lower()


def _command(value: list[str]) -> list[str]:
    if not value or not value[0].startswith("/"):
        raise _fault("does not begin with an absolute path", "write the program's path on the host, then its words")
    for word in value:
        if problem := spelling.word_problem(word):
            raise _fault(*problem)
    return value


class Strict(BaseModel):
    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        alias_generator=lambda name: name.replace("_", "-"),
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )


class AnswerFile(Strict):
    prompt: Annotated[str, Field(min_length=1)]
    expect: Annotated[str, Field(min_length=1), AfterValidator(_pattern)]
    max_tokens: Annotated[int, Field(ge=1, le=32768)] = 64


class ThroughputFile(Strict):
    concurrency: Annotated[Any, AfterValidator(_concurrency)]
    input_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    output_tokens: Annotated[int, Field(ge=1, le=10_000_000)]
    requests: Annotated[int, Field(ge=1, le=1_000_000)]
    floor: Annotated[Any, AfterValidator(_floor)] = None
    repetitions: Annotated[int, Field(ge=3, le=20)] = Throughput.repetitions
    regression: Annotated[float, Field(ge=0, lt=1)] | None = Throughput.regression
    inconclusive: Literal["commit", "rollback"] = "commit"
    baseline: Literal["stored", "fresh"] = "stored"

    @property
    def ladder(self) -> list[int]:
        return sorted(self.concurrency) if isinstance(self.concurrency, list) else [self.concurrency]

    @property
    def floors(self) -> dict[int, float]:
        """By concurrency."""
        if isinstance(self.floor, dict):
            return {int(at): float(rate) for at, rate in self.floor.items()}
        return {} if self.floor is None else {self.ladder[-1]: float(self.floor)}


class SmokeFile(Strict):
    garbled: Annotated[float, Field(ge=0, le=1)] = Smoke.garbled


_Nats = Annotated[float, Field(gt=0, le=100)]


class DriftFile(Strict):
    noise_multiple: Annotated[float, Field(ge=1, le=1000)] = DriftLimits.noise_multiple
    equal_tokens: Annotated[float, Field(ge=0, le=1)] = DriftLimits.equal_tokens
    mean_logprob: _Nats = DriftLimits.mean_logprob
    worst_prompt: _Nats = DriftLimits.worst_prompt
    kl: _Nats = DriftLimits.kl
    prompts: Annotated[str, AfterValidator(absolute_path)] | None = None
    policy: Literal["rollback", "note"] = "rollback"


class AccuracyFile(Strict):
    file: Annotated[str, AfterValidator(absolute_path)]
    questions: Annotated[int, Field(ge=1, le=100_000)] = Accuracy.questions
    shots: Annotated[int, Field(ge=0, le=64)] = Accuracy.shots
    runs: Annotated[int, Field(ge=3, le=100)] = Accuracy.runs
    floor: Annotated[float, Field(ge=0, le=1)] | None = None


class VerifyFile(Strict):
    answers: list[AnswerFile] = []
    smoke: SmokeFile = SmokeFile()
    drift: DriftFile | None = DriftFile()
    accuracy: AccuracyFile | None = None
    throughput: ThroughputFile | None = None
    min_healthy: Annotated[float, Field(ge=0, le=86400)] = Verify.min_healthy


_Seconds = Annotated[float, Field(gt=0, le=86400)]


class TimeoutsFile(Strict):
    preflight: _Seconds = Timeouts.preflight
    stop: _Seconds = Timeouts.stop
    clean: _Seconds = Timeouts.clean
    ready: _Seconds = Timeouts.ready
    smoke: _Seconds = Timeouts.smoke
    drift: _Seconds = Timeouts.drift
    accuracy: _Seconds = Timeouts.accuracy
    throughput: _Seconds = Timeouts.throughput
    soak: _Seconds = Timeouts.soak
    nvml: _Seconds = Timeouts.nvml


class RetentionFile(Strict):
    releases: Annotated[int, Field(ge=2, le=10_000)] = Retention.releases  # one to serve, and one to go back to
    swaps: Annotated[int, Field(ge=1, le=10_000)] = Retention.swaps


class EngineFile(Strict):
    python: Annotated[str, AfterValidator(absolute_path)] = "/opt/sglang/bin/python"
    version: Annotated[str, AfterValidator(_version)] | None = None


class RequiresFile(Strict):
    architecture: list[Annotated[str, AfterValidator(_architecture)]] = []
    memory: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    driver: Annotated[str, AfterValidator(_version)] | None = None


class SecretFile(Strict):
    env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    file: Annotated[str, Field(min_length=1)] | None = None


class RouterFile(Strict):
    url: Annotated[str, AfterValidator(_router_url)]
    key: SecretFile | None = None


class DrainFile(Strict):
    deadline: Annotated[float, Field(ge=0, le=86400)] = Drain.deadline
    then: Literal["proceed", "fail"] = "proceed"
    unreachable: Literal["fail", "proceed"] = "fail"


class HookFile(Strict):
    command: Annotated[list[str], AfterValidator(_command)] | None = None
    webhook: SecretFile | None = None
    timeout: Annotated[float, Field(gt=0, le=3600)] = Hook.timeout


class HooksFile(Strict):
    drain: HookFile | None = None
    open: HookFile | None = None
    result: HookFile | None = None


class Settings(Strict):
    """What both a model and a profile may say. flags and environment are checked apart, see `_findings`."""

    flags: dict[str, Any] = {}
    environment: dict[str, Any] = {}
    engine: EngineFile = EngineFile()
    requires: RequiresFile = RequiresFile()
    expose: Literal["verified", "smoke", "ready"] = "verified"
    verify: VerifyFile = VerifyFile()
    timeouts: TimeoutsFile = TimeoutsFile()


class Server(Settings):
    """All that a server is made of; the defaults here are the first layer. Host data may say any of it."""

    path: Annotated[str, AfterValidator(_model_path)]
    served_name: Annotated[str, AfterValidator(_served_name)] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 30000
    host: Annotated[str, AfterValidator(listen_address)] = "0.0.0.0"  # noqa: S104 - the host's firewall and the quarantine decide
    user: Annotated[str, AfterValidator(linux_user)] = "sglang"
    gpus: Annotated[Any, AfterValidator(_gpus)] = None
    secrets: dict[str, SecretFile] = {}
    memory_margin: Annotated[int, Field(ge=0, le=10_000_000)] = 1024
    disk_free: Annotated[int, Field(ge=0, le=1_000_000_000)] = 1024
    end_foreign: bool = False
    retention: RetentionFile = RetentionFile()
    address: Annotated[str, AfterValidator(_address)] | None = None
    routers: list[Annotated[RouterFile, BeforeValidator(_router)]] = []
    drain: DrainFile = DrainFile()
    hooks: HooksFile = HooksFile()


class ModelFile(Server):
    extends: str | None = None


class ProfileFile(Settings):
    extends: str | None = None
    models: dict[str, Settings] = {}


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


@dataclass(frozen=True)
class Library:
    """The models and profiles of an inventory folder, each as its layers: what it extends first, itself last."""

    root: Path
    models: Mapping[str, tuple[Layer, ...]]
    profiles: Mapping[str, tuple[Layer, ...]]
    extended: frozenset[str]  # "models/name" or "profiles/name" that others extend; they need not be complete

    def profile_layers(self, profile: str, model: str) -> tuple[Layer, ...]:
        """A profile's own layers, then its overrides for one model."""
        chain = self.profiles[profile]
        whole = tuple(Layer(layer.source, _without(layer.value, "models")) for layer in chain)
        return whole + tuple(
            Layer(layer.source, layer.value["models"][model], ("models", model))
            for layer in chain
            if model in layer.value.get("models", {})
        )


def load_library(root: Path) -> Library:
    """Reads `<root>/models/*.yaml` and `<root>/profiles/*.yaml`. Raises ConfigError with all their faults."""
    library, faults = read_library(root)
    if faults:
        raise ConfigError(faults)
    return library


def read_library(root: Path) -> tuple[Library, Sequence[Fault]]:
    """The models and profiles without a fault, and the faults of the others."""
    faults: list[Fault] = []
    models = _read_folder(root / "models", faults)
    profiles = _read_folder(root / "profiles", faults)
    broken: set[str] = set()
    for documents, schema in ((models, ModelFile), (profiles, ProfileFile)):
        for document in documents.values():
            found = list(document.faults)
            if document.value is not None:
                document.value = _tidy(document.value)
                found += check(schema, Layer(document, document.value))
            if found:
                broken.add(document.path)
            faults += found
    for document in profiles.values():
        faults += _unknown_models(document, models)
    extended: set[str] = set()
    chains = {
        "models": _chains("model", models, "profile", profiles, extended, faults),
        "profiles": _chains("profile", profiles, "model", models, extended, faults),
    }
    sound = {
        kind: {name: chain for name, chain in found.items() if not any(layer.where(()) in broken for layer in chain)}
        for kind, found in chains.items()
    }
    library = Library(root, sound["models"], sound["profiles"], frozenset(extended))
    return library, sorted(faults, key=_place)


def check(schema: type[BaseModel], layer: Layer, whole: bool = False, settings: bool = True) -> Iterator[Fault]:
    """The faults of one layer. whole: also what is missing from it. settings: whether its flags are SGLang's."""
    try:
        schema.model_validate(layer.value)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            # A later layer may bring what is missing, except inside a list: lists are replaced whole.
            if whole or detail["type"] != "missing" or any(isinstance(item, int) for item in detail["loc"]):
                yield _explain(schema, detail, layer)
    for prefix in _settings_within(layer.value) if settings else ():
        for loc, what, todo in _findings(_at(layer.value, prefix)):
            yield Fault(layer.where((*prefix, *loc)), what, todo)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1)
    if close:
        return f"did you mean `{close[0]}`?"
    return "use one of: " + ", ".join(names) if names else "there is none yet; write its file first"


def _read_folder(folder: Path, faults: list[Fault]) -> dict[str, Document]:
    if not folder.is_dir():
        faults.append(Fault(str(folder), "is not a folder", "create it; models and profiles live below the inventory"))
        return {}
    documents: dict[str, Document] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix not in (".yaml", ".yml"):
            continue
        if path.suffix == ".yml":
            faults.append(Fault(str(path), "has the ending .yml and is not read", f"rename it to {path.stem}.yaml"))
            continue
        if not NAME.fullmatch(path.stem):
            faults.append(
                Fault(str(path), "its name cannot name a release", "use lower-case letters, digits, dots and dashes")
            )
        documents[path.stem] = read(path)
    return documents


_MAPS = ("flags", "environment", "engine", "requires", "verify", "timeouts", "secrets", "drain", "hooks", "models")


def _tidy(value: dict[str, Any]) -> dict[str, Any]:
    """Without the maps that were left empty (`flags:` and nothing below it)."""
    tidy = {key: item for key, item in value.items() if not (item is None and key in _MAPS)}
    if isinstance(tidy.get("models"), dict):
        tidy["models"] = {k: _tidy(v) if isinstance(v, dict) else v or {} for k, v in tidy["models"].items()}
    return tidy


def _without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _unknown_models(document: Document, models: Mapping[str, Document]) -> Iterator[Fault]:
    overrides = (document.value or {}).get("models")
    for name in overrides if isinstance(overrides, dict) else ():
        if name not in models:
            yield Fault(document.where(("models", name)), "is not a model", nearest(name, models))


def _chains(
    kind: str,
    documents: Mapping[str, Document],
    other_kind: str,
    others: Mapping[str, Document],
    extended: set[str],
    faults: list[Fault],
) -> dict[str, tuple[Layer, ...]]:
    chains = {}
    for name in documents:
        chain = [name]
        while isinstance(parent := (documents[chain[0]].value or {}).get("extends"), str):
            where = documents[chain[0]].where(("extends",))
            if parent in chain:
                if parent == name:
                    circle = " -> ".join([*reversed(chain), parent])
                    faults.append(Fault(where, f"extends itself: {circle}", "break the circle"))
                break
            if parent not in documents:
                if len(chain) == 1:
                    todo = nearest(parent, set(documents) - {name})
                    if parent in others:
                        todo = f"it is a {other_kind}; a {kind} extends a {kind}"
                    faults.append(Fault(where, f"there is no {kind} `{parent}`", todo))
                break
            extended.add(f"{kind}s/{parent}")
            chain.insert(0, parent)
        chains[name] = tuple(Layer(documents[item], _without(documents[item].value or {}, "extends")) for item in chain)
    return chains


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


def _explain(schema: type[BaseModel], detail: ErrorDetails, layer: Layer) -> Fault:
    loc = tuple(item for item in detail["loc"] if item != "[key]")
    where, kind, context = layer.where(loc), detail["type"], detail.get("ctx", {})
    if kind == "kernelswap":
        return Fault(where, context["what"], context["todo"])
    if _is_secret(loc) and kind.startswith("model"):
        return Fault(where, "is a secret in clear", "write {env: NAME} or {file: PATH}, and change that secret now")
    if kind == "extra_forbidden" and schema is ProfileFile and len(loc) in (1, 3) and loc[-1] in _keys(Server, ()):
        return Fault(where, "is not for profiles", "set it in the model or in the host's data")
    if kind == "extra_forbidden":
        return Fault(where, "unknown key", nearest(str(loc[-1]), _keys(schema, loc[:-1])))
    if kind == "literal_error":
        return Fault(where, "is not one of the choices", f"use {context['expected']}".replace("'", ""))
    if kind in _SIMPLE:
        return Fault(where, *_SIMPLE[kind])
    return Fault(where, detail["msg"].removeprefix("Input ").replace("should be", "must be"), "change the value")


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


def _place(fault: Fault) -> tuple[str, int, str]:
    """Files by name, lines by number."""
    match = re.match(r"(.*?):([0-9]+)(?=:|$)", fault.where)
    return (match[1], int(match[2]), fault.where) if match else (fault.where, 0, "")
