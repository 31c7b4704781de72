"""What people may write in models, profiles and host data: each key with its form and its default."""

from __future__ import annotations

import ipaddress
import math
import re
from contextlib import suppress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from kernelswap import flags as spelling
from kernelswap.protocol import Accuracy, Drain, DriftLimits, Hook, Retention, Smoke, Throughput, Timeouts, Verify

_WORD = re.compile(r"[!-~]+")


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
    """What both a model and a profile may say. flags and environment are checked apart, see layers.py."""

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
