"""A Compose file as the commands of its services."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kernelswap.importing import knowledge
from kernelswap.importing.container import Container, mount, setting
from kernelswap.importing.words import Source, Word, interpolate, split


@dataclass(frozen=True)
class Service:
    name: str
    line: int
    words: tuple[Word, ...]
    container: Container


def services(text: str, source: Source, variables: Mapping[str, str]) -> list[Service]:
    """Every service with the words that it runs."""
    try:
        content = YAML(typ="rt", pure=True).load(text)
    except YAMLError as error:
        mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
        problem = str(getattr(error, "problem", None) or "check its syntax")
        source.refuse(mark.line + 1 if mark else 1, f"is not valid YAML: {problem}", "correct it")
        return []
    found = content.get("services")
    if not isinstance(found, Mapping):
        return []
    if "include" in content:
        setting(source, _line(content, "include"), "include", "include:")
    reader = _Reader(source, text.split("\n"), variables)
    return [reader.service(str(name), found, name) for name in found if isinstance(found[name], Mapping)]


def _line(parent: Any, key: Any) -> int:
    """The line of a key, or of an item of a list; of the parent for what an anchor brought."""
    try:
        place = parent.lc
        position = place.item(key) if isinstance(parent, Sequence) else place.key(key)
        return int(position[0]) + 1
    except (AttributeError, KeyError, TypeError):
        return int(getattr(getattr(parent, "lc", None), "line", 0) or 0) + 1


@dataclass
class _Reader:
    source: Source
    lines: list[str]
    variables: Mapping[str, str]

    def word(self, text: Any, line: int) -> Word:
        shown = "" if text is None else str(text).lower() if isinstance(text, bool) else str(text)
        return self.known(Word(shown, line, shown))

    def known(self, word: Word) -> Word:
        def assumed(name: str) -> None:
            what = f"`{name}` may be set outside of this text; its default was taken"
            self.source.find(word.line, what, f"give --set {name}=VALUE if it is another")

        return interpolate(word, self.variables.get, assumed)

    def service(self, name: str, parent: Any, key: Any) -> Service:
        item, line = parent[key], _line(parent, key)
        container = Container(line, image=self.word(item.get("image", ""), line).text)
        words = (*self.command(item, "entrypoint"), *self.command(item, "command"))
        if knowledge.LAUNCH.search(" ".join(word.text for word in words)) or _is_server(container, words):
            self.settings(item, container)
        return Service(name, line, words, container)

    def settings(self, item: Any, container: Container) -> None:
        known = knowledge.table()["container"]
        for key in item:
            line = _line(item, key)
            if key in known["compose-names"]:
                value = item[key]
                shown = f"{key}: {value}" if isinstance(value, str | int | bool) else f"{key}:"
                container.host_network |= key == "network_mode" and value == "host"
                setting(self.source, line, known["compose-names"][key], shown)
            elif key not in known["compose-quiet"] and not str(key).startswith("x-"):
                setting(self.source, line, "other", f"{key}:")
        container.environment.update(self.pairs(item, "environment"))
        if "env_file" in item:
            setting(self.source, _line(item, "env_file"), "env-file", "env_file:")
        if not re.fullmatch(r"no|False|on-failure:\d+", str(item.get("restart", "no"))):
            setting(self.source, _line(item, "restart"), "restart", f"restart: {item['restart']}")
        if "working_dir" in item:
            container.folder = str(item["working_dir"])
        for entry, line in _items(item, "volumes"):
            self.volume(container, entry, line)
        for entry, line in _items(item, "ports"):
            self.port(container, entry, line)
        self.gpus(item, container)

    def volume(self, container: Container, entry: Any, line: int) -> None:
        if not isinstance(entry, Mapping):
            mount(container, self.word(entry, line))
        elif entry.get("type") == "bind":
            inside = self.word(entry.get("target", ""), line).text
            container.volumes[inside.rstrip("/")] = self.word(entry.get("source", ""), line)

    def port(self, container: Container, entry: Any, line: int) -> None:
        if isinstance(entry, Mapping):
            address = f"{entry['host_ip']}:" if entry.get("host_ip") else ""
            entry = f"{address}{entry.get('published', '')}:{entry.get('target', '')}"
        container.ports.append(self.word(entry, line))

    def gpus(self, item: Any, container: Container) -> None:
        place: Any = item
        for key in ("deploy", "resources", "reservations", "devices"):
            place = place.get(key, {}) if isinstance(place, Mapping) else {}
        requests = [*place] if isinstance(place, Sequence) and not isinstance(place, str) else []
        if isinstance(item.get("gpus"), Sequence) and not isinstance(item.get("gpus"), str):
            requests += item["gpus"]
        for request in (each for each in requests if isinstance(each, Mapping)):
            if request.get("driver", "nvidia") != "nvidia" and "gpu" not in request.get("capabilities", ()):
                continue
            if isinstance(request.get("device_ids"), Sequence) and request["device_ids"]:
                container.devices = tuple(str(each) for each in request["device_ids"])
            elif isinstance(request.get("count"), int):
                container.count = request["count"]

    def pairs(self, item: Any, key: str) -> Iterator[tuple[str, Word]]:
        values = item.get(key) or {}
        if isinstance(values, Mapping):
            for name in values:
                line = _line(values, name)
                word = self.word(values[name], line)
                yield str(name), word if values[name] is not None else self._passed(str(name), line)
            return
        for entry, line in _items(item, key):
            name, equals, value = str(entry).partition("=")
            yield name, self.word(value, line) if equals else self._passed(name, line)

    def _passed(self, name: str, line: int) -> Word:
        return self.known(Word(f"${{{name}}}", line))

    def command(self, item: Any, key: str) -> tuple[Word, ...]:
        """`command:` or `entrypoint:`, as a list of words or as one text that Compose splits."""
        value = item.get(key)
        if value is None:
            return ()
        first = _line(item, key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return tuple(self.word(entry, _line(value, index)) for index, entry in enumerate(value))
        try:
            words = list(split(str(value).replace("\\\n", " "), first))
        except ValueError as error:
            self.source.refuse(first, f"`{key}:` has {error}", "close it")
            return ()
        return tuple(self.known(word) for word in self.located(words, first))

    def located(self, words: Sequence[Word], line: int) -> Iterator[Word]:
        """Words of a folded text with the lines that they stand on."""
        column = 0
        for word in words:
            for index in range(line - 1, len(self.lines)):
                at = self.lines[index].find(word.raw.split("\n")[0], column if index == line - 1 else 0)
                if at >= 0:
                    line, column = index + 1, at + 1
                    break
            yield replace(word, line=line)


def _items(item: Any, key: str) -> Iterator[tuple[Any, int]]:
    values = item.get(key)
    if isinstance(values, Sequence) and not isinstance(values, str):
        for index, entry in enumerate(values):
            yield entry, _line(values, index)


def _is_server(container: Container, words: Sequence[Word]) -> bool:
    """An image of SGLang that is given flags alone."""
    return "sglang" in container.image and bool(words) and re.match(r"--model(-path)?\b", words[0].text) is not None
