"""What `docker run` or a Compose service adds to a launch line: folders, ports, GPUs, variables."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from kernelswap.importing import knowledge
from kernelswap.importing.words import Source, Word


@dataclass
class Container:
    """volumes: folder in the container -> folder on the host. devices: the GPUs that it is given, None for all."""

    line: int
    image: str = ""
    entrypoint: tuple[Word, ...] = ()
    environment: dict[str, Word] = field(default_factory=dict)
    volumes: dict[str, Word] = field(default_factory=dict)
    ports: list[Word] = field(default_factory=list)
    devices: tuple[str, ...] | None = None
    count: int | None = None
    host_network: bool = False
    folder: str | None = None

    def on_host(self, word: Word) -> Word | None:
        """A path of the container as the host's; None if it lies in no folder of the host."""
        path = posixpath.normpath(word.text)
        for inside in sorted(self.volumes, key=len, reverse=True):
            if path == inside or path.startswith(inside.rstrip("/") + "/"):
                outside = self.volumes[inside]
                if not re.match(r"[/.~$]", outside.text):
                    return None
                rest = path[len(inside) :].strip("/")
                text = posixpath.join(outside.text, rest) if rest else outside.text.rstrip("/") or "/"
                return replace(word, text=text, unknown=(*word.unknown, *outside.unknown))
        return None

    def published(self, port: str) -> tuple[str, str] | None:
        """The host's address and port where a port of the container is reached."""
        for word in self.ports:
            text = word.text.removesuffix("/tcp")
            outside, _, inside = text.rpartition(":")
            address, _, number = outside.rpartition(":")
            if inside == port and number:
                return address.strip("[]") or "0.0.0.0", number  # noqa: S104 - Docker's own default
        return None


def run(words: Sequence[Word], source: Source) -> tuple[Container, tuple[Word, ...]]:
    """`docker run` and the words that the container runs. words: from `run` on."""
    container = Container(words[0].line)
    rest = list(words[1:])
    while rest and rest[0].text.startswith("-") and rest[0].text != "--":
        option = rest.pop(0)
        for name, value in _options(option, rest):
            _option(container, name, value, source)
    if not rest:
        source.refuse(container.line, "`docker run` names no image", "write the whole command")
        return container, ()
    image = rest.pop(0)
    container.image = image.text
    return container, (*container.entrypoint, *rest)


_SHORT = {
    "-e": "--env",
    "-v": "--volume",
    "-p": "--publish",
    "-w": "--workdir",
    "-u": "--user",
    "-m": "--memory",
    "-l": "--label",
    "-h": "--hostname",
}


def _options(option: Word, rest: list[Word]) -> Iterator[tuple[str, Word]]:
    """An option of the command line with its value; `-itd` is three."""
    bare = knowledge.table()["container"]["bare"]
    name, equals, value = option.text.partition("=")
    if name.startswith("--"):
        if equals:
            yield name, replace(option, text=value)
        elif name in bare:
            yield name, replace(option, text="")
        elif rest:
            yield name, rest.pop(0)
        return
    for index, letter in enumerate(option.text[1:], 2):
        short = f"-{letter}"
        if short in bare:
            yield short, replace(option, text="")
            continue
        value = option.text[index:].removeprefix("=")
        if value or rest:
            yield _SHORT.get(short, short), replace(option, text=value) if value else rest.pop(0)
        return


def _option(container: Container, name: str, value: Word, source: Source) -> None:
    known = knowledge.table()["container"]
    plain = name.lstrip("-")
    if plain == "env":
        variable, equals, text = value.text.partition("=")
        container.environment[variable] = replace(value, text=text) if equals else _passed(variable, value)
    elif plain == "volume":
        mount(container, value)
    elif plain == "mount":
        _long_mount(container, value, source)
    elif plain == "publish":
        container.ports.append(value)
    elif plain == "gpus":
        gpus(container, value.text)
    elif plain == "device" and value.text.startswith("nvidia.com/gpu="):
        name = value.text.partition("=")[2]
        container.devices = None if name == "all" else (*(container.devices or ()), name)
    elif plain == "workdir":
        container.folder = value.text
    elif plain == "entrypoint":
        container.entrypoint = (value,) if value.text else ()
    elif plain in ("network", "net"):
        container.host_network |= value.text == "host"
        setting(source, value.line, "network", f"--network {value.text}")
    elif plain == "restart":
        if not re.fullmatch(r"no|on-failure(:\d+)", value.text):
            setting(source, value.line, "restart", f"--restart {value.text}")
    elif name not in known["quiet"]:
        shown = f"{name} {value.text}" if value.text and plain in known["settings"] else name
        setting(source, value.line, plain, shown)


def setting(source: Source, line: int, name: str, shown: str) -> None:
    knowledge.say(source, line, f"`{shown}`", knowledge.setting("container", name))


def _passed(variable: str, word: Word) -> Word:
    """A variable of the caller's own environment."""
    return replace(word, text=f"${variable}", unknown=(f"${variable}",))


def mount(container: Container, value: Word) -> None:
    """`host:container[:options]`."""
    match = re.match(r"((?:\$\{[^}]*\}|[^:])+):((?:\$\{[^}]*\}|[^:])+)", value.text)
    if match:
        container.volumes[posixpath.normpath(match[2])] = replace(value, text=match[1])


def _long_mount(container: Container, value: Word, source: Source) -> None:
    parts = dict(part.partition("=")[::2] for part in value.text.split(","))
    outside = parts.get("source") or parts.get("src")
    inside = parts.get("target") or parts.get("destination") or parts.get("dst")
    if parts.get("type", "bind") == "bind" and outside and inside:
        container.volumes[posixpath.normpath(inside)] = replace(value, text=outside)
    else:
        setting(source, value.line, "mount", f"--mount {value.text}")


def gpus(container: Container, text: str) -> None:
    """`all`, `2`, `device=0,1`, `"device=0,1"`, `count=2,capabilities=utility`."""
    plain = text.strip("\"'")
    if match := re.search(r'"?device=([^"]*)"?', plain):
        names = re.split(r",(?=capabilities|driver|count)", match[1])[0]
        container.devices = tuple(filter(None, names.split(",")))
    elif match := re.match(r"(?:count=)?(\d+)", plain):
        container.count = int(match[1])
