"""The two YAML files, with a comment at each key: where it came from. And what `kernelswap check` says of them."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from kernelswap import flags as spelling
from kernelswap.errors import ConfigError, Fault
from kernelswap.importing import knowledge
from kernelswap.importing.assemble import Server
from kernelswap.importing.words import Source
from kernelswap.library import load_library
from kernelswap.spec import server_spec
from kernelswap.yamlfile import Document, parse

_ORDER = ("path", "served-name", "host", "port", "user", "engine", "gpus", "secrets")


def texts(server: Server, source: Source, model: str, profile: str) -> tuple[str, str]:
    kernels = {name: item for name, item in server.flags.items() if knowledge.of_profile(name)}
    rest = {name: item for name, item in server.flags.items() if name not in kernels}
    tuned = {name: item for name, item in server.environment.items() if knowledge.variable_of_profile(name)}
    plain = {name: item for name, item in server.environment.items() if name not in tuned}
    keys = {name: server.keys[name] for name in _ORDER if name in server.keys}
    keys.setdefault("path", ("/", server.line))  # refused already; the rest can be checked all the same
    return (
        _text(source, f"models/{model}.yaml", keys, rest, plain),
        _text(source, f"profiles/{profile}.yaml", {}, kernels, tuned),
    )


def _text(
    source: Source,
    name: str,
    keys: Mapping[str, tuple[Any, int]],
    flags: Mapping[str, tuple[Any, int]],
    environment: Mapping[str, tuple[Any, int]],
) -> str:
    content = CommentedMap()
    for key, (value, line) in keys.items():
        _put(content, key, value, f"{source.name}:{line}")
    for key, group in (("flags", flags), ("environment", environment)):
        if group:
            content[key] = CommentedMap()
            for item, (value, line) in group.items():
                _put(content[key], item, value, f"{source.name}:{line}")
    if not content:
        content["flags"] = CommentedMap()
    content.yaml_set_start_comment(f"{name}, imported from {source.name}")
    stream = io.StringIO()
    _yaml().dump(content, stream)
    return stream.getvalue()


def _yaml() -> YAML:
    yaml = YAML()
    yaml.width = 100_000
    yaml.indent(mapping=2, sequence=4, offset=2)
    return yaml


def _put(target: CommentedMap, key: str, value: Any, comment: str) -> None:
    target[key] = _node(value)
    target.yaml_add_eol_comment(comment, key, column=0)


def _node(value: Any) -> Any:
    """A value that reads back as exactly this; short lists and maps on one line."""
    if isinstance(value, str):
        return _scalar(value)
    if isinstance(value, Mapping):
        mapping = CommentedMap((key, _node(item)) for key, item in value.items())
        mapping.fa.set_flow_style()
        return mapping
    if isinstance(value, Sequence):
        sequence = CommentedSeq(map(_node, value))
        sequence.fa.set_flow_style()
        return sequence
    return value


def _scalar(text: str) -> Any:
    """A word of a command line: a number or a map where that is written back as the same text."""
    for candidate in _candidates(text):
        stream = io.StringIO()
        _yaml().dump({"value": candidate}, stream)
        document = Document("")
        parse(stream.getvalue(), document)
        if document.value is not None and not document.faults and _same(document.value.get("value"), text):
            return candidate
    return DoubleQuotedScalarString(text)


def _candidates(text: str) -> Sequence[Any]:
    try:
        loaded = _yaml().load(text)
    except Exception:
        loaded = None
    if isinstance(loaded, CommentedMap) or (isinstance(loaded, int | float) and not isinstance(loaded, bool)):
        return (loaded, text)
    return (text,)


def _same(value: Any, text: str) -> bool:
    return value is not None and not isinstance(value, bool) and spelling.text(value) == text


def faults(model: str, model_text: str, profile: str, profile_text: str) -> list[Fault]:
    """What `kernelswap check` says of the result, each at the place of the launch line that it came from."""
    files = {f"models/{model}.yaml": model_text, f"profiles/{profile}.yaml": profile_text}
    with TemporaryDirectory() as folder:
        for path, text in files.items():
            (Path(folder) / path).parent.mkdir()
            (Path(folder) / path).write_text(text, "utf-8")
        try:
            found = [note.fault for note in server_spec(load_library(Path(folder)), "main", model, profile).notes]
        except ConfigError as error:
            found = list(error.faults)
        return [_placed(fault, folder, files) for fault in found]


def _placed(fault: Fault, folder: str, files: Mapping[str, str]) -> Fault:
    where = fault.where.removeprefix(f"{folder}/")
    if match := re.match(r"([^:]+):(\d+)(.*)", where):
        line = files[match[1]].split("\n")[int(match[2]) - 1]
        if comment := re.search(r" # (\S+:\d+)$", line):
            where = comment[1] + match[3]
    return Fault(where, fault.what, fault.todo)
