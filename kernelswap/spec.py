"""What one server is, with every default decided: defaults < model < profile < the profile's override < host data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from kernelswap import flags as spelling
from kernelswap import sglang
from kernelswap.errors import ConfigError, Fault
from kernelswap.layers import Layer, check
from kernelswap.library import Library
from kernelswap.protocol import (
    Accuracy,
    Answer,
    Drain,
    DriftLimits,
    Hook,
    Requires,
    Retention,
    Router,
    Smoke,
    Throughput,
    Timeouts,
    Traffic,
    Verify,
)
from kernelswap.schema import HookFile, Server, ThroughputFile, VerifyFile
from kernelswap.servers import ALWAYS, CHECK, DEFAULT_INSTANCE, NEVER, Note, Secret, ServerSpec, is_router_only
from kernelswap.sglang_opinions import opinions
from kernelswap.wording import nearest
from kernelswap.yamlfile import Loc


@dataclass(frozen=True)
class HostData:
    """A place in an inventory's data: `inventory/gpu.py: gpu-01: instances/main/port`."""

    label: str

    def where(self, loc: Loc) -> str:
        return f"{self.label}: {'/'.join(map(str, loc))}" if loc else self.label


def server_spec(
    library: Library,
    instance: str,
    model: str,
    profile: str,
    overrides: Mapping[str, Any] | None = None,
    where: str = "host data",
    prefix: Loc = (),
    shared: Mapping[str, Any] | None = None,
    reached: str = "",
) -> ServerSpec:
    """The server that `model` and `profile` make with a host's `overrides` laid over them. Raises ConfigError.

    where, prefix: the place of the overrides, for faults. shared: what the host says of all its servers, below these.
    reached: the host's address where `address` does not say it.
    """
    layer = Layer(HostData(where), plain(overrides or {}), prefix)
    common = Layer(HostData(where), plain(shared or {}))
    faults = list(_name_faults(library, instance, model, profile, layer))
    faults += [*check(Server, common), *check(Server, layer)]
    if faults:
        raise ConfigError(faults)
    layers = (*library.models[model], *library.profile_layers(profile, model), common, layer)
    merged: dict[str, Any] = {}
    for each in layers:
        merged = _merge(merged, each.value)
    origin = _Origin(layers, home=library.models[model][-1])
    faults = list(check(Server, Layer(origin, merged), whole=True))
    if faults:
        raise ConfigError(faults)
    server = Server.model_validate(merged)
    faults = [*_gpu_faults(server, origin), *_floor_faults(server, origin), *_listener_faults(server, origin)]
    if faults:
        raise ConfigError(faults)
    spec = _decide(server, instance, model, profile, reached)
    return replace(spec, notes=tuple(_notes(spec, origin)))


def host_specs(
    library: Library, data: Mapping[str, Any], where: str = "host data", profile: str | None = None, name: str = ""
) -> tuple[ServerSpec, ...]:
    """The servers of one host, from its inventory data: `model`, `profile`, `instances`, SHARED. Raises ConfigError.

    profile: asked for on the command line; it then replaces the profile of every instance. name: the host's.
    """
    if is_router_only(data):
        return ()
    faults = list(_misplaced(data, where))
    shared = {key: data[key] for key in SHARED if key in data}
    reached = str(data.get("ssh_hostname") or name)
    specs: list[ServerSpec] = []
    for instance, choice, prefix in _instances(data, where, faults):
        chosen = {"model": choice.get("model") or data.get("model")}
        chosen["profile"] = profile or choice.get("profile") or data.get("profile")
        missing = [key for key, value in chosen.items() if not value]
        if missing:
            faults += [Fault(HostData(where).where((*prefix, key)), "is missing", f"set `{key}`") for key in missing]
            continue
        overrides = {key: value for key, value in choice.items() if key not in chosen}
        model, chosen_profile = str(chosen["model"]), str(chosen["profile"])
        try:
            specs.append(
                server_spec(library, instance, model, chosen_profile, overrides, where, prefix, shared, reached)
            )
        except ConfigError as error:
            faults += error.faults
    faults += _collisions(specs, where)
    if faults:
        raise ConfigError(faults)
    return tuple(specs)


# A server's keys that no inventory has for another purpose; `user`, `host` and `path` may be the owner's own.
_SERVER_KEYS = {"flags", "environment", "engine", "requires", "expose", "verify", "timeouts", "secrets", "gpus"} | {
    "port", "served-name", "memory-margin", "disk-free", "end-foreign", "retention"
}  # fmt: skip


# What a host, or its group, says of all its servers next to `model` and `profile`.
SHARED = ("address", "routers", "drain", "hooks")


def _misplaced(data: Mapping[str, Any], where: str) -> Iterator[Fault]:
    """Keys next to a host that would be ignored, or that are wrong."""
    for key in data:
        if key == "verify" and isinstance(data[key], str):  # --verify
            continue
        if key == "metrics" and not (isinstance(data[key], str) and re.fullmatch(r"/[!-~]*[^/\s]", data[key])):
            todo = "name the folder of node_exporter's textfile collector, e.g. /var/lib/prometheus/node-exporter"
            yield Fault(f"{where}: metrics", f"{data[key]!r} is no absolute path without blanks", todo)
        elif key in _SERVER_KEYS:
            todo = f'write "instances": {{"{DEFAULT_INSTANCE}": {{"{key}": ...}}}}'
            yield Fault(f"{where}: {key}", "belongs to an instance", todo)
        elif key in ("models", "profiles", "instance"):
            known = {"models": "model", "profiles": "profile", "instance": "instances"}
            yield Fault(f"{where}: {key}", "is not a key of a host", f"did you mean `{known[key]}`?")


def _instances(
    data: Mapping[str, Any], where: str, faults: list[Fault]
) -> Iterator[tuple[str, Mapping[str, Any], Loc]]:
    instances = data.get("instances")
    if instances is None:
        yield DEFAULT_INSTANCE, {}, ()
        return
    if not isinstance(instances, Mapping) or not instances:
        faults.append(Fault(f"{where}: instances", "is not a dict of instances", "write {name: {...}}"))
        return
    for name, choice in instances.items():
        if isinstance(choice, Mapping):
            yield str(name), choice, ("instances", str(name))
        else:
            faults.append(
                Fault(
                    f"{where}: instances/{name}",
                    "is not a dict",
                    "write {model: ..., profile: ..., port: ..., gpus: ...}",
                )
            )


def _name_faults(library: Library, instance: str, model: str, profile: str, layer: Layer) -> Iterator[Fault]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", instance):
        todo = "use up to 32 lower-case letters, digits and dashes"
        yield Fault(layer.where(()), f"{instance!r} cannot name an instance", todo)
    for key, name, known in (("model", model, library.models), ("profile", profile, library.profiles)):
        if name not in known:
            yield Fault(layer.where((key,)), f"there is no {key} `{name}`", nearest(name, known))


def plain(value: Any) -> Any:
    """Python data in the shape that YAML gives."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


# The values below these keys belong to others, and each is one value: a later layer replaces it whole.
_REPLACED = (("flags",), ("environment",), ("secrets",), ("hooks",))


def _merge(base: Mapping[str, Any], over: Mapping[str, Any], loc: Loc = ()) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        if loc in _REPLACED and (value is None or value is False):
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict) and loc not in _REPLACED:
            merged[key] = _merge(merged[key], value, (*loc, key))
        elif isinstance(value, dict) and loc not in _REPLACED:
            merged[key] = _merge({}, value, (*loc, key))
        else:
            merged[key] = value
    return merged


@dataclass(frozen=True)
class _Origin:
    """Finds the layer that a merged value came from: the last one that has it, or most of the way to it, or home."""

    layers: Sequence[Layer]
    home: Layer

    def where(self, loc: Loc) -> str:
        depth, index = max((_depth(layer.value, loc), index) for index, layer in enumerate(self.layers))
        return (self.layers[index] if depth else self.home).where(loc)


def _depth(value: Any, loc: Loc) -> int:
    for depth, key in enumerate(loc):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return depth
    return len(loc)


def _gpu_faults(server: Server, origin: _Origin) -> Iterator[Fault]:
    needed = spelling.schedulers(server.flags)
    given = len(server.gpus) if isinstance(server.gpus, list) else server.gpus
    if isinstance(given, int) and 0 < given < needed:
        what = f"gives {given} GPU{'s' * (given > 1)}, and tp-size x pp-size x dp-size asks for {needed}"
        yield Fault(origin.where(("gpus",)), what, "change one of them")


def _notes(spec: ServerSpec, origin: _Origin) -> Iterator[Note]:
    version = spec.engine_version
    for opinion in opinions(spec.flags, spec.environment, version, spec.requires.architecture):
        todo, blocks = opinion.todo, NEVER
        if opinion.refused and version in sglang.versions():
            blocks = ALWAYS
        elif opinion.refused and version:
            todo += f"; SGLang {version} itself is not known here"
        elif opinion.refused:
            todo, blocks = (
                f"{todo}; or declare `engine: {{version: ...}}` if the host has no {sglang.newest().version}",
                CHECK,
            )
        yield Note(Fault(origin.where(opinion.loc), opinion.what, todo), blocks, opinion.combined)


def _floor_faults(server: Server, origin: _Origin) -> Iterator[Fault]:
    run = server.verify.throughput
    for at in sorted(set(run.floors) - set(run.ladder)) if run else ():
        what = f"is for {at} requests at once, which `concurrency` does not have"
        yield Fault(origin.where(("verify", "throughput", "floor")), what, "change one of them")


_ANY = ("0.0.0.0", "::")  # noqa: S104
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _listener_faults(server: Server, origin: _Origin) -> Iterator[Fault]:
    if server.host in _LOOPBACK and any(urlsplit(router.url).hostname not in _LOOPBACK for router in server.routers):
        yield Fault(origin.where(("host",)), f"is {server.host}, and its routers are elsewhere", "listen on 0.0.0.0")


def _collisions(specs: Sequence[ServerSpec], where: str) -> Iterator[Fault]:
    for index, later in enumerate(specs):
        for earlier in specs[:index]:
            place, other = f"{where}: instances/{later.instance}", f"instance {earlier.instance}"
            if later.port == earlier.port:
                yield Fault(f"{place}/port", f"is {later.port}, as of {other}", "choose another port")
            if shared := sorted(set(later.gpus) & set(earlier.gpus)):
                yield Fault(f"{place}/gpus", f"has GPU {', '.join(shared)}, as {other}", "give each instance its own")
            elif not (_uses_gpus(later) and _uses_gpus(earlier)):
                continue
            elif not later.gpus or not earlier.gpus:
                todo = "list the GPUs of each instance, e.g. [0, 1]"
                yield Fault(f"{place}/gpus", f"may share GPUs with {other}", todo)
            elif later.gpus[0].isdigit() != earlier.gpus[0].isdigit():
                todo = "use indices for all, or UUIDs for all"
                yield Fault(f"{place}/gpus", f"cannot be compared with the GPUs of {other}", todo)


def _uses_gpus(spec: ServerSpec) -> bool:
    return spec.flags.get("device") != "cpu"


def _decide(server: Server, instance: str, model: str, profile: str, reached: str) -> ServerSpec:
    schedulers = spelling.schedulers(server.flags)
    gpus = tuple(map(str, server.gpus)) if isinstance(server.gpus, list) else ()
    count = {"all": schedulers, None: 0}.get(server.gpus, server.gpus) if not gpus else len(gpus)
    return ServerSpec(
        instance=instance,
        model=model,
        profile=profile,
        path=server.path,
        served_name=server.served_name or model,
        host=server.host,
        port=int(server.port),
        user=server.user,
        python=server.engine.python,
        gpus=gpus,
        gpu_count=int(count or 0),
        schedulers=schedulers,
        flags=dict(server.flags),
        environment={name: spelling.text(value) for name, value in sorted(server.environment.items())},
        secrets={name: Secret(secret.env, secret.file) for name, secret in sorted(server.secrets.items())},
        expose=server.expose,
        verify=_verify(server.verify),
        timeouts=Timeouts(**{key: float(value) for key, value in server.timeouts.model_dump().items()}),
        memory_margin=int(server.memory_margin),
        disk_free=int(server.disk_free),
        end_foreign=bool(server.end_foreign),
        retention=Retention(int(server.retention.releases), int(server.retention.swaps)),
        engine_version=server.engine.version or "",
        requires=Requires(
            tuple(server.requires.architecture), int(server.requires.memory), server.requires.driver or ""
        ),
        traffic=_traffic(server, reached),
        traffic_secrets=dict(_traffic_secrets(server)),
    )


def _hooks(server: Server) -> Iterator[tuple[str, HookFile]]:
    for moment in type(server.hooks).model_fields:
        if hook := getattr(server.hooks, moment):
            yield moment, hook


def _traffic(server: Server, reached: str) -> Traffic:
    own = "" if server.host in _ANY else server.host
    hooks = {name: Hook(tuple(hook.command or ()), timeout=float(hook.timeout)) for name, hook in _hooks(server)}
    return Traffic(
        address=(server.address or own or reached) if server.routers else "",
        routers=tuple(Router(router.url) for router in server.routers),
        drain=Drain(float(server.drain.deadline), server.drain.then, server.drain.unreachable),
        hooks=hooks,
    )


def _traffic_secrets(server: Server) -> Iterator[tuple[str, Secret]]:
    for index, router in enumerate(server.routers):
        if router.key:
            yield f"routers/{index}/key", Secret(router.key.env, router.key.file)
    for moment, hook in _hooks(server):
        if hook.webhook:
            yield f"hooks/{moment}/webhook", Secret(hook.webhook.env, hook.webhook.file)


def _verify(verify: VerifyFile) -> Verify:
    drift, accuracy = verify.drift, verify.accuracy
    return Verify(
        answers=tuple(Answer(item.prompt, item.expect, int(item.max_tokens)) for item in verify.answers),
        smoke=Smoke(float(verify.smoke.garbled)),
        min_healthy=float(verify.min_healthy),
        drift=None
        if drift is None
        else DriftLimits(
            noise_multiple=float(drift.noise_multiple),
            equal_tokens=float(drift.equal_tokens),
            mean_logprob=float(drift.mean_logprob),
            worst_prompt=float(drift.worst_prompt),
            kl=float(drift.kl),
            prompts=drift.prompts or "",
            policy=drift.policy,
        ),
        accuracy=None
        if accuracy is None
        else Accuracy(
            file=accuracy.file,
            questions=int(accuracy.questions),
            shots=int(accuracy.shots),
            runs=int(accuracy.runs),
            floor=None if accuracy.floor is None else float(accuracy.floor),
        ),
        throughput=_throughput(verify.throughput) if verify.throughput else None,
    )


def _throughput(run: ThroughputFile) -> Throughput:
    *lower, highest = run.ladder
    floors = run.floors
    return Throughput(
        concurrency=highest,
        input_tokens=int(run.input_tokens),
        output_tokens=int(run.output_tokens),
        requests=int(run.requests),
        floor=floors.pop(highest, None),
        lower=tuple(lower),
        floors={str(at): rate for at, rate in floors.items()},
        repetitions=int(run.repetitions),
        regression=None if run.regression is None else float(run.regression),
        inconclusive=run.inconclusive,
        baseline=run.baseline,
    )
