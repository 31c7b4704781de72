"""From a ServerSpec to a Release: the texts that go to the host, and their digest. Pure, except for reading secrets."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.exceptions import TemplateError

from kernelswap import flags as spelling
from kernelswap import seal
from kernelswap.errors import ConfigError, Fault
from kernelswap.protocol import (
    AGENT_PATH,
    CONFIG_ROOT,
    DIRTY,
    ENGINE_MODULE,
    PLAN_FILE,
    PYTHON,
    Plan,
    Traffic,
    encode,
    gpu_indices,
    unit_name,
)
from kernelswap.seal import SECRETS_FILE, UNNAMED
from kernelswap.servers import Secret, ServerSpec

LOGGING_FILE = "logging.json"
UNIT_TEMPLATE = "sglang.service.j2"
MAX_UNIT_LINE = 1024 * 1024 - 1  # systemd's own limit


class Hidden:
    """A text that no repr, log or diff shows."""

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hidden) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "<hidden>"


@dataclass(frozen=True)
class Release:
    """A server rendered for a host. files: name -> text of the release's public files; secrets: `secrets.yaml`."""

    name: str
    plan: Plan
    files: Mapping[str, str] = field(default_factory=dict)
    secrets: Hidden | None = None


NO_TRAFFIC = Hidden(encode(Traffic()))  # which need not be said


def traffic_text(spec: ServerSpec, secrets: Mapping[str, str]) -> Hidden:
    """The file that says where a server's users come from, see protocol.Traffic."""
    traffic = spec.traffic
    routers = (replace(r, key=secrets.get(f"routers/{n}/key", "")) for n, r in enumerate(traffic.routers))
    hooks = {name: replace(h, webhook=secrets.get(f"hooks/{name}/webhook", "")) for name, h in traffic.hooks.items()}
    return Hidden(encode(replace(traffic, routers=tuple(routers), hooks=hooks)))


def release_folder(instance: str, release: str) -> str:
    """Where a release lies on the host; the service's user must be able to read it, except for the secrets."""
    return f"{CONFIG_ROOT}/{instance}/releases/{release}"


def resolve_secrets(spec: ServerSpec, environ: Mapping[str, str], place: str = "") -> dict[str, str]:
    """The values of the spec's secrets, read on the controller: those for SGLang by the flag's name, those of its
    traffic by their place. Raises ConfigError for missing ones.

    place: whose they are, for faults, e.g. `host gpu1: `.
    """
    named = {f"secrets/{name}": (name, source) for name, source in spec.secrets.items()}
    named |= {name: (name, source) for name, source in spec.traffic_secrets.items()}
    return read_secrets(named, environ, f"{place}instance {spec.instance}: ")


def read_secrets(named: Mapping[str, tuple[str, Secret]], environ: Mapping[str, str], place: str) -> dict[str, str]:
    """Secrets by name. named: by the key that declares each. Raises ConfigError with the faults of all."""
    values: dict[str, str] = {}
    faults: list[Fault] = []
    for key, (name, source) in named.items():
        where = f"{place}{key}"
        if source.env is not None:
            value = environ.get(source.env)
            if value is None:
                faults.append(Fault(where, f"the variable {source.env} is not set", f"export {source.env}"))
                continue
        else:
            try:
                value = Path(source.file or "").expanduser().read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "is not UTF-8"
                faults.append(Fault(where, f"{source.file}: {reason.lower()}", "put the secret into that file"))
                continue
        values[name] = value.rstrip("\r\n")
        if problem := _url_problem(values[name]) if key.endswith("/webhook") else _secret_problem(values[name]):
            faults.append(Fault(where, *problem))
    if faults:
        raise ConfigError(faults)
    return values


def _secret_problem(value: str) -> tuple[str, str] | None:
    if not value:
        return "is empty", "give it a value"
    if value.startswith("-"):
        return "starts with a dash, so SGLang would take it for a flag", "choose another secret"
    if not re.fullmatch(r"[!-~]+", value):
        return "holds a space, a line break or a character outside ASCII, and SGLang would answer 500", "choose another"
    return spelling.word_problem(value)


def _url_problem(value: str) -> tuple[str, str] | None:
    if not re.fullmatch(r"https?://[!-~]+", value):
        return "is not a URL", "set it to the whole URL, http:// or https://"
    return None


def render(spec: ServerSpec, secrets: Mapping[str, str], key: str, templates: Path) -> Release:
    """The release of a server. key: the host's random key, see KEY_PATH; needed only where there are secrets."""
    secrets = {name: value for name, value in secrets.items() if name not in spec.traffic_secrets}
    if set(secrets) != set(spec.secrets):
        raise ValueError(f"secrets of {spec.instance}: {sorted(secrets)} given, {sorted(spec.secrets)} declared")
    if secrets and not key:
        raise ValueError(f"secrets of {spec.instance}: the digest needs the host's key")
    digest = seal.digest(_texts(spec, UNNAMED, templates), secrets, key)
    release = _release(spec, f"{spec.profile}-{digest}", templates)
    return Release(release.name, release.plan, release.files, Hidden(_secrets_text(secrets)) if secrets else None)


def preview(spec: ServerSpec, templates: Path) -> Release:
    """The release without its secrets, and named UNNAMED where its name depends on them."""
    return _release(spec, UNNAMED, templates) if spec.secrets else render(spec, {}, "", templates)


def _release(spec: ServerSpec, name: str, templates: Path) -> Release:
    texts = _texts(spec, name, templates)
    digests = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in texts.items()}
    plan = plan_of(spec, name, digests)
    return Release(name, plan, {**texts, PLAN_FILE: encode(plan) + "\n"})


def plan_of(spec: ServerSpec, name: str = UNNAMED, digests: Mapping[str, str] | None = None) -> Plan:
    """What the agent must know of a release. digests: of its other files; a plan that stays here needs none."""
    return Plan(
        instance=spec.instance,
        release=name,
        profile=spec.profile,
        model=spec.model,
        python=spec.python,
        argv=tuple(word for group in _command(spec) for word in group),
        environment=_environment(spec, name),
        user=spec.user,
        model_path=spec.path,
        served_name=spec.served_name,
        address=spec.host,
        port=spec.port,
        gpus=spec.gpus,
        gpu_count=spec.gpu_count,
        schedulers=spec.schedulers,
        flags=spelling.display(spec.flags),
        secret_flags=tuple(spec.secrets),
        expose=spec.expose,
        memory_margin=spec.memory_margin,
        disk_free=spec.disk_free,
        end_foreign=spec.end_foreign,
        engine_version=spec.engine_version,
        requires=spec.requires,
        verify=spec.verify,
        timeouts=spec.timeouts,
        retention=spec.retention,
        digests=dict(digests or {}),
    )


def _texts(spec: ServerSpec, release: str, templates: Path) -> dict[str, str]:
    """The files that decide how the server runs."""
    texts = {unit_name(spec.instance): _unit(spec, release, templates)}
    if spec.secrets:
        texts[LOGGING_FILE] = _logging(spec)
    return texts


def _unit(spec: ServerSpec, release: str, templates: Path) -> str:
    secrets_path = f"{release_folder(spec.instance, release)}/{SECRETS_FILE}"
    values: dict[str, Any] = {
        "instance": spec.instance,
        "model": spec.model,
        "profile": spec.profile,
        "release": release,
        "user": spec.user,
        "python": spec.python,
        "command": list(_command(spec)),
        "config": ["--config ${CREDENTIALS_DIRECTORY}/" + SECRETS_FILE] if spec.secrets else [],
        "environment": [f"{name}={value}" for name, value in _environment(spec, release).items()],
        "environment_files": [f"-{gpu_indices(spec.instance)}"] if spec.gpus else [],
        "credentials": [f"{SECRETS_FILE}:{secrets_path}"] if spec.secrets else [],
        "before": list(_before(spec)),
        "protect_home": _protect_home(spec),
    }
    text = fill(templates, UNIT_TEMPLATE, values)
    if len(text.encode()) > MAX_UNIT_LINE:
        raise ConfigError([Fault(f"instance {spec.instance}", "its unit is larger than 1 MiB", "shorten its flags")])
    return text


def fill(templates: Path, name: str, values: Mapping[str, Any]) -> str:
    """The text of a template with these values. Raises ConfigError."""
    try:
        return _templates_of(templates).get_template(name).render(values)
    except (TemplateError, OSError, ValueError) as error:
        fault = Fault(str(templates / name), f"cannot be rendered: {error}", "compare it with the shipped one")
        raise ConfigError([fault]) from error


@cache
def _templates_of(folder: Path) -> Environment:
    environment = Environment(  # noqa: S701 - unit files, not HTML
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["word"] = word
    environment.filters["assignment"] = assignment
    return environment


def _command(spec: ServerSpec) -> Iterator[Sequence[str]]:
    """The words after the interpreter, grouped as they are shown."""
    yield ("-m", ENGINE_MODULE)
    yield spelling.spell("model-path", spec.path)
    yield spelling.spell("served-model-name", spec.served_name)
    yield spelling.spell("host", spec.host)
    yield spelling.spell("port", spec.port)
    yield from spelling.groups(spec.flags)


def _environment(spec: ServerSpec, release: str) -> dict[str, str]:
    cache = f"/var/cache/sglang/{spec.instance}"
    tools = spec.python.rpartition("/")[0]
    values = {
        "HOME": cache,
        "PATH": f"{tools}:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_CACHE_DIR": cache,
        # A crash ends in a second instead of a minute of dumps.
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    }
    if spec.gpus:
        values["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        values["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    if spec.secrets:
        values["SGLANG_LOGGING_CONFIG_PATH"] = f"{release_folder(spec.instance, release)}/{LOGGING_FILE}"
    return dict(sorted({**values, **spec.environment}.items()))


def _before(spec: ServerSpec) -> Iterator[str]:
    if spec.flags.get("device") != "cpu":
        # After a boot nothing may have made /dev/nvidia-uvm yet, and the service itself has no right to.
        yield "+-/usr/bin/nvidia-modprobe -u -c 0"
    # As root, so in none of the unit's environment: what PYTHONPATH or PATH name there may be anybody's to write.
    guard = f"{PYTHON} -IS {AGENT_PATH} guard {spec.instance}"
    # A guard that cannot even run (no agent, a broken Python) keeps no server down.
    shell = f"/bin/sh -c '{guard}; [ $$? -ne {DIRTY} ]'"
    yield f"+/usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin {shell}"


def _protect_home(spec: ServerSpec) -> str:
    homes = ("/home/", "/root/", "/run/user/")
    return "read-only" if spec.path.startswith(homes) or spec.python.startswith(homes) else "yes"


def _logging(spec: ServerSpec) -> str:
    """SGLang's own logging, without the start-up line that shows every argument, API keys too.

    SGLang cannot put its prefix (` TP0`) into a format that it is given, so the process's name stands there: on one
    host Process-1 is the first scheduler.
    """
    level = spelling.display(spec.flags).get("log-level", "info").upper()
    quiet = {"sglang.srt.entrypoints.engine": "WARNING", "httpx": "WARNING", "httpcore": "WARNING"}
    return (
        json.dumps(
            {
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {
                    "sglang": {
                        "format": "[%(asctime)s %(processName)s] %(message)s",
                        "datefmt": "%Y-%m-%d %H:%M:%S",
                    }
                },
                "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "sglang"}},
                "root": {"level": level, "handlers": ["stderr"]},
                "loggers": {name: {"level": level} for name, level in quiet.items()},
            },
            indent=2,
        )
        + "\n"
    )


def _secrets_text(secrets: Mapping[str, str]) -> str:
    """A flat YAML mapping, as SGLang's --config wants it. Printable JSON strings are YAML strings."""
    return "".join(f"{name}: {json.dumps(secrets[name], ensure_ascii=False)}\n" for name in sorted(secrets))


# systemd ignores a line that holds one of these, so they are written as bytes.
_NONCHARACTERS = "\ufdd0-\ufdef" + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
_ESCAPED = re.compile(rf'[\\"%\x00-\x1f\x7f{_NONCHARACTERS}]')
_NAMED = {"\\": "\\\\", '"': '\\"', "%": "%%", "\n": "\\n", "\t": "\\t"}


def word(text: str) -> str:
    """One word of ExecStart, such that the process gets exactly `text`."""
    if re.fullmatch(r"[A-Za-z0-9_./:=,@+-]+", text):
        return text
    return assignment(text).replace("$", "$$")


def assignment(text: str) -> str:
    """One NAME=value of Environment=; there `$` has no meaning."""
    return '"' + _ESCAPED.sub(lambda match: _escape(match[0]), text) + '"'


def _escape(character: str) -> str:
    return _NAMED.get(character) or "".join(f"\\x{byte:02x}" for byte in character.encode())
