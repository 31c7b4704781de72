"""A YAML file as plain values that remember how they were written and on which line.

Works on the nodes of ruamel.yaml's round-trip loader: only those keep a number's own text (`0.90`, `1e-5`) and both
places of a duplicate key. YAML 1.2, so `on`, `no` and `1:30` are text. Nothing here knows what the keys mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from kernelswap.errors import Fault

Loc = tuple[str | int, ...]

MAX_VALUES = 10_000
MAX_DEPTH = 50
_TAG = "tag:yaml.org,2002:"


class Int(int):
    """A whole number and the text it was written as."""

    text: str


class Float(float):
    """A number and the text it was written as."""

    text: str


@dataclass
class Document:
    """One file. value is None if it could not be read as a mapping; then faults says why."""

    path: str
    value: dict[str, Any] | None = None
    lines: dict[Loc, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def where(self, loc: Loc) -> str:
        """`file:line: key/key` of a place; the line of the nearest place above it if it is not in the file itself."""
        near = loc
        while near and near not in self.lines:
            near = near[:-1]
        line = self.lines.get(near)
        place = self.path if line is None else f"{self.path}:{line}"
        return f"{place}: {'/'.join(map(str, loc))}" if loc else place


def read(path: Path) -> Document:
    document = Document(str(path))
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        document.faults.append(Fault(str(path), f"cannot be read: {reason.lower()}", "check its name and permissions"))
        return document
    except UnicodeDecodeError as error:
        document.faults.append(Fault(str(path), f"is not UTF-8 at byte {error.start}", "save the file as UTF-8"))
        return document
    parse(text, document)
    return document


def parse(text: str, document: Document) -> None:
    """Fills `document` from a text."""
    if any(line.startswith("%") for line in text.splitlines()[:20]):
        document.faults.append(Fault(f"{document.path}:1", "YAML directives are not supported", "remove the % line"))
        return
    try:
        node = YAML(pure=True).compose(text)
    except RecursionError:
        document.faults.append(Fault(document.path, "is nested too deeply", "make it flatter"))
        return
    except YAMLError as error:
        document.faults.append(_syntax_fault(error, text, document.path))
        return
    if node is None:
        document.faults.append(Fault(document.path, "is empty", "write its keys, or delete the file"))
        return
    if not isinstance(node, MappingNode):
        document.faults.append(
            Fault(f"{document.path}:{_line(node)}", "is not a mapping", "write `key: value` lines at the top level")
        )
        return
    document.value = _Builder(document).build(node, (), 0)


def _syntax_fault(error: YAMLError, text: str, path: str) -> Fault:
    if isinstance(error, ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return Fault(f"{path}:{line}", f"holds the character U+{ord(text[error.position]):04X}", "remove it")
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return Fault(path, "is not valid YAML", "check its syntax")
    line = error.problem_mark.line
    problem = str(error.problem or error.context or "syntax error").split("\n")[0]
    source = text.splitlines()[line] if line < text.count("\n") + 1 and text.splitlines()[line:] else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        return Fault(f"{path}:{line + 1}", "is indented with a tab", "indent with spaces")
    return Fault(f"{path}:{line + 1}", f"is not valid YAML: {problem}", "check the indentation and quotes of this line")


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


class _Builder:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.values = 0
        self.open: set[int] = set()

    def fault(self, node: Node, loc: Loc, what: str, todo: str) -> None:
        place = f"{self.document.path}:{_line(node)}"
        self.document.faults.append(Fault(f"{place}: {'/'.join(map(str, loc))}" if loc else place, what, todo))

    def build(self, node: Node, loc: Loc, depth: int) -> Any:
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH or id(node) in self.open:
            if self.values <= MAX_VALUES + 1:
                self.fault(node, loc, "is too large, too deep or contains itself", "write it out plainly")
                self.values = MAX_VALUES + 1
            return None
        if isinstance(node, ScalarNode):
            return self.scalar(node, loc)
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.item(item, (*loc, index), depth) for index, item in enumerate(node.value)]
            return self.mapping(node, loc, depth)
        finally:
            self.open.discard(id(node))

    def item(self, node: Node, loc: Loc, depth: int) -> Any:
        self.document.lines[loc] = _line(node)
        return self.build(node, loc, depth + 1)

    def mapping(self, node: Node, loc: Loc, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self.key(key_node, loc)
            if key is None:
                continue
            place = (*loc, key)
            if key in result:
                first = self.document.lines[place]
                self.fault(key_node, place, f"is given twice, first on line {first}", "remove one of them")
                continue
            self.document.lines[place] = _line(key_node)
            result[key] = self.build(value_node, place, depth + 1)
        return result

    def key(self, node: Node, loc: Loc) -> str | None:
        if not isinstance(node, ScalarNode):
            self.fault(node, loc, "a key is not a plain text", "write `key: value`")
        elif str(node.tag) == _TAG + "merge":
            self.fault(node, (*loc, "<<"), "merge keys are not supported", "use `extends:`")
        else:
            return str(node.value)
        return None

    def scalar(self, node: ScalarNode, loc: Loc) -> Any:
        tag, text = str(node.tag), str(node.value)
        try:
            if tag == _TAG + "int":
                return _whole(text)
            if tag == _TAG + "float":
                return _real(text)
        except ValueError:
            self.fault(node, loc, f"{text!r} is not a number", "quote it if it is text")
            return None
        if tag == _TAG + "bool":
            return text.lower() == "true"
        if tag == _TAG + "null":
            return None
        if tag not in (_TAG + "str", _TAG + "timestamp", _TAG + "value", "!"):
            self.fault(node, loc, f"the tag {tag.removeprefix(_TAG)!r} is not supported", "remove the tag")
        return text


def _whole(text: str) -> Int:
    digits = text.replace("_", "")
    value = Int(int(digits, 0) if digits.lstrip("+-")[:2] in ("0x", "0o", "0b") else int(digits, 10))
    value.text = text
    return value


def _real(text: str) -> Float:
    plain = text.replace("_", "").lower()
    value = Float(float(plain.replace(".inf", "inf").replace(".nan", "nan")))
    value.text = text
    return value
