"""A host's `router: {...}`: read strictly, every default decided, rendered as the unit of an sglang-router.

The router knows no server from its unit: servers come and go over its API, see agent/routers.py and agent/member.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from kernelswap import flags as spelling
from kernelswap.agent import client
from kernelswap.errors import ConfigError, Fault
from kernelswap.flags import FlagValue
from kernelswap.layers import Layer, check, environment_problems
from kernelswap.protocol import ROUTER_KEY
from kernelswap.render import fill
from kernelswap.schema import SecretFile, Strict, absolute_path, linux_user, listen_address
from kernelswap.servers import Secret
from kernelswap.spec import HostData, plain

UNIT_TEMPLATE = "sglang-router.service.j2"

GRACE = "shutdown-grace-period-secs"
# A server that died is noticed in seconds and asked again soon after it is back; SGLang's /health takes one of them.
DEFAULTS: Mapping[str, FlagValue] = {
    "cb-failure-threshold": 3,
    "cb-success-threshold": 1,
    "cb-timeout-duration-secs": 10,
    "health-check-interval-secs": 5,
    "health-failure-threshold": 2,
    "health-success-threshold": 1,
    "worker-startup-check-interval": 1,
    "worker-startup-timeout-secs": 120,
    GRACE: 180,
}
_GROUPS = "prefill/decode groups are not supported yet"
_JOIN = "servers come in by themselves: name this router in their `routers`"
OWNED = {
    "host": "set `host:` beside `flags:`",
    "port": "set `port:` beside `flags:`",
    "prometheus-host": "set `host:` beside `flags:`",
    "prometheus-port": "set `metrics-port:` beside `flags:`",
    "api-key": "set `key: {env: NAME}` beside `flags:`",
    "control-plane-api-keys": "it would show in the process list; set `key: {env: NAME}` beside `flags:`",
    "worker-urls": _JOIN,
    "service-discovery": _JOIN,
    "pd-disaggregation": _GROUPS,
    "mini-lb": _GROUPS,
    "prefill": _GROUPS,
    "decode": _GROUPS,
    "postgres-db-url": "it may hold a password, which would show in the process list; set POSTGRES_DB_URL by a drop-in",
    "redis-url": "it may hold a password, which would show in the process list; set REDIS_URL by a drop-in",
    "oracle-password": "it would show in the process list; set ATP_PASSWORD by a drop-in",
}  # fmt: skip
# The key comes out of a file that systemd hands over, so that no process list shows it.
KEYED = (
    "import pathlib, sys; from sglang_router.launch_router import main; "
    "sys.argv += ['--api-key', pathlib.Path(sys.argv.pop(1)).read_text().strip()]; main()"
)


class RouterHostFile(Strict):
    """The keys of `router`; flags and environment are checked apart."""

    python: Annotated[str, AfterValidator(absolute_path)] = "/opt/sglang-router/bin/python"
    user: Annotated[str, AfterValidator(linux_user)] = "sglang-router"
    host: Annotated[str, AfterValidator(listen_address)] = "0.0.0.0"  # noqa: S104 - users come from elsewhere
    port: Annotated[int, Field(ge=1, le=65535)] = 30000
    metrics_port: Annotated[int, Field(ge=1, le=65535)] = 29000
    key: SecretFile | None = None
    flags: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class RouterSpec:
    """The router of a host. key: where the controller finds the key that it asks of its users and of servers."""

    python: str
    user: str
    host: str
    port: int
    metrics_port: int
    key: Secret | None
    flags: Mapping[str, FlagValue]
    environment: Mapping[str, str]

    @property
    def url(self) -> str:
        """At which its own host reaches it."""
        return client.url(client.from_here(self.host), self.port)


def router_spec(data: Mapping[str, Any], where: str) -> RouterSpec | None:
    """The router that a host's data declares, if it does. Raises ConfigError. where: the host, for faults."""
    if "router" not in data:
        return None
    if not isinstance(data["router"], Mapping):
        todo = 'write {"router": {}} for one with every default'
        raise ConfigError([Fault(f"{where}: router", "is not a dict", todo)])
    layer = Layer(HostData(where), plain(data["router"]), ("router",))
    faults = [*check(RouterHostFile, layer, whole=True, settings=False), *_findings(layer)]
    if faults:
        raise ConfigError(faults)
    router = RouterHostFile.model_validate(layer.value)
    return RouterSpec(
        router.python,
        router.user,
        router.host,
        router.port,
        router.metrics_port,
        Secret(router.key.env, router.key.file) if router.key else None,
        {**DEFAULTS, **router.flags},
        {name: spelling.text(value) for name, value in sorted(router.environment.items())},
    )


def _findings(layer: Layer) -> Iterator[Fault]:
    flags, environment, key = (layer.value.get(name) for name in ("flags", "environment", "key"))
    for name, value in flags.items() if isinstance(flags, dict) else ():
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", str(name)):
            todo = "write it as on sglang-router's command line, without the dashes in front"
            yield Fault(layer.where(("flags", str(name))), "is not a flag's name", todo)
        elif name == GRACE and (isinstance(value, bool) or not isinstance(value, int | None)):
            yield Fault(layer.where(("flags", name)), "is not a whole number", "write seconds")
        elif name in OWNED:
            yield Fault(layer.where(("flags", name)), "is not for `flags`", OWNED[name])
        else:
            for loc, what, todo in spelling.value_findings((name,), value):
                yield Fault(layer.where(("flags", *loc)), what, todo)
    for name, value in environment.items() if isinstance(environment, dict) else ():
        for what, todo in environment_problems(name, value):
            yield Fault(layer.where(("environment", str(name))), what, todo)
    if isinstance(key, dict) and (key.get("env") is None) == (key.get("file") is None):
        yield Fault(layer.where(("key",)), "needs one source", "write {env: NAME} or {file: PATH}")


def unit(spec: RouterSpec, templates: Path) -> str:
    """The text of the router's unit. Raises ConfigError."""
    words = [*spelling.spell("host", spec.host), *spelling.spell("port", spec.port)]
    words += [*spelling.spell("prometheus-host", spec.host), *spelling.spell("prometheus-port", spec.metrics_port)]
    values = {
        "user": spec.user,
        "python": spec.python,
        "start": ["-m", "sglang_router.launch_router"] if spec.key is None else ["-c", KEYED],
        "key": None if spec.key is None else ROUTER_KEY,
        "command": [words, *spelling.groups(spec.flags)],
        "environment": [f"{name}={value}" for name, value in spec.environment.items()],
        "stop": int(str(spec.flags.get(GRACE) or DEFAULTS[GRACE])) + 20,
    }
    return fill(templates, UNIT_TEMPLATE, values)
