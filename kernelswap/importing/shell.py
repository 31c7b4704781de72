"""A shell script as the commands it would run, with the variables that it sets itself put in.

tree-sitter's bash grammar reads it; nothing is run. Conditions and loops are walked through once, in the order in which
they are written.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from kernelswap.importing import knowledge
from kernelswap.importing.words import Command, Source, Word

_PARSER = Parser(Language(tree_sitter_bash.language()))

_LITERAL = {"word", "number", "variable_name", "extglob_pattern", "regex", "test_operator"}
_LOOPS = {"while_statement", "for_statement", "c_style_for_statement"}
# `--host <HOST_IP>`, as documentation has it; a shell would read a file.
_PLACEHOLDER = r"(--[\w-]+[ =]\"?)(<[A-Za-z][^<>]*>)"
_TESTS = {"test_command", "negated_command"}


def commands(text: str, source: Source, line: int = 1, variables: Mapping[str, str] | None = None) -> list[Command]:
    """Every command of a script, in order. line: where the text stands in its file."""
    script = Script(source, line)
    script.variables = {name: (Word(value, line),) for name, value in (variables or {}).items()}
    script.given = frozenset(variables or ())
    return script.run(text)


@dataclass(frozen=True)
class _Part:
    """A piece of a word. words: it is an array, which becomes several words. word: the one that it is."""

    text: str = ""
    quoted: bool = True
    unknown: str = ""
    words: tuple[Word, ...] | None = None
    word: Word | None = None


@dataclass
class Script:
    source: Source
    first: int
    variables: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    exported: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    folder: str | None = None
    python: str | None = None
    found: list[Command] = field(default_factory=list)
    functions: dict[str, Node | None] = field(default_factory=dict)
    called: dict[str, Node | None] = field(default_factory=dict)
    conditions: int = 0
    export_all: bool = False
    zsh: bool = False

    def run(self, text: str) -> list[Command]:
        self.zsh |= re.match(r"#!.*\bzsh\b", text) is not None
        root = _PARSER.parse(self._mended(text).encode()).root_node
        self._errors(root)
        self._walk(root)
        while self.functions:  # never called here: the text is a part of something
            self._call(next(iter(self.functions)), ())
        return self.found

    def _call(self, name: str, arguments: tuple[Word, ...]) -> None:
        """A function of the script; within itself it is no function any more."""
        body = self.functions.pop(name)
        outer = dict(self.variables)
        self.variables |= {str(number): (word,) for number, word in enumerate(arguments, 1)}
        self.variables |= {"@": arguments, "*": arguments}
        if body is not None:
            self._walk(body)
        for number in (*map(str, range(1, len(arguments) + 1)), "@", "*"):
            self.variables.pop(number, None)
            if number in outer:
                self.variables[number] = outer[number]
        self.called[name] = body

    def line(self, node: Node) -> int:
        return self.first + int(node.start_point[0])

    def _mended(self, text: str) -> str:
        """Without what a web page adds; the number of lines stays."""
        if "\r\n" in text:
            self.source.find(self.first, "has Windows line ends, which break continued lines", "save it with Unix ones")
            text = text.replace("\r\n", "\n")
        lines = text.split("\n")
        markdown, within = any(line.lstrip().startswith("```") for line in lines), False
        for index, line in enumerate(lines):
            if markdown:  # only its blocks of shell
                fence = re.match(r"\s*```(\w*)", line)
                if fence:
                    within = not within and fence[1] in ("", "bash", "sh", "shell", "zsh", "console", "text")
                if fence or not within:
                    lines[index] = ""
                    continue
            lines[index] = re.sub(r"^(\s*)\$ (?=\S)|^(\s*)>\s+(?=-)", r"\1\2", line)  # a terminal's prompts
            if re.search(r"[ \t]\^$", line) or (line.count("`") == 1 and re.search(r"[ \t]`$", line)):
                what = f"ends with `{line[-1]}`, as Windows continues a line"
                self.source.find(self.first + index, what, "the next line was taken as part of it")
                lines[index] = lines[index][:-1] + "\\"
            if re.search(r"\\[ \t]+$", line) and not line.lstrip().startswith("#"):
                what = "has a blank after its last backslash, so the shell ends the command here"
                self.source.find(self.first + index, what, "remove the blank; the next line was taken as part of it")
                lines[index] = lines[index].rstrip()
            for match in re.finditer(_PLACEHOLDER, line):
                what = f"`{match[2]}` stands for a value that is still to be written"
                self.source.refuse(self.first + index, what, "write the value")
            lines[index] = re.sub(_PLACEHOLDER, r"\1VALUE", lines[index])
        return "\n".join(lines)

    def _errors(self, node: Node) -> None:
        if not node.has_error:
            return
        if node.is_error or node.is_missing:
            written = (node.text or b"").decode(errors="replace").strip().split("\n")[0][:60]
            what = f"is not understood as shell: `{written}`" if written else "is not understood as shell"
            self.source.refuse(
                self.line(node), what, "look for an open quote or bracket, or import the launch line alone"
            )
            return
        for child in node.children:
            self._errors(child)

    def _walk(self, node: Node) -> None:
        kind = node.type
        if kind == "command":
            self._command(node)
        elif kind == "variable_assignment":
            self._assign(node, export=self.export_all)
        elif kind == "declaration_command":
            self._declare(node)
        elif kind == "unset_command":
            for child in node.named_children:
                self.variables.pop(_text(child), None)
        elif kind == "function_definition":
            name = node.child_by_field_name("name")
            self.functions[_text(name) if name else ""] = node.child_by_field_name("body")
        elif kind in ("comment", "test_command", "heredoc_body", "file_redirect"):
            pass
        elif kind == "heredoc_redirect":
            self._heredoc(node)
        else:
            counter = node.child_by_field_name("variable") if kind in _LOOPS else None
            if counter and _text(counter) not in self.given:
                self.variables.pop(_text(counter), None)
            known = len(self.found)
            if kind == "if_statement":
                self._branch(node)
            elif kind == "list":
                self._list(node)
            else:
                self.conditions += kind == "case_statement"
                for child in node.named_children:
                    self._walk(child)
                self.conditions -= kind == "case_statement"
            if redirects := self._redirects(node):
                self.found[known:] = [
                    replace(each, redirects=each.redirects + redirects) for each in self.found[known:]
                ]
            if kind in _LOOPS:
                self.found[known:] = [replace(each, label="loop") for each in self.found[known:]]

    def _branch(self, node: Node) -> None:
        """The parts of an `if` that may run: one branch where the text tells which."""
        clauses = [node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))]
        before = self.conditions
        for clause in clauses:
            named = [child for child in clause.named_children if child not in clauses]
            then = next((child.start_byte for child in clause.children if child.type == "then"), clause.start_byte)
            tests = [child for child in named if child.start_byte < then]
            holds = True if clause.type == "else_clause" else self._holds(tests[0]) if len(tests) == 1 else None
            for test in tests:
                self._walk(test)
            self.conditions += holds is None
            for child in named[len(tests) :] if holds is not False else ():
                self._walk(child)
            if holds:
                break
        self.conditions = before

    def _list(self, node: Node) -> None:
        """`A && B`, `A || B`: where A is a test, B may not run."""
        first, last = node.named_children[0], node.named_children[-1]
        self._walk(first)
        holds = self._holds(first)
        if holds is None or holds is any(child.type == "&&" for child in node.children):
            tested = holds is None and first.type in _TESTS
            self.conditions += tested
            self._walk(last)
            self.conditions -= tested

    def _holds(self, node: Node) -> bool | None:
        """Whether a test of texts holds: `-n`, `-z`, `=`, `!=`, `!`, `&&`, `||`; None if that cannot be known."""
        parts = [child for child in node.named_children if child.type != "test_operator"]
        operator = "".join(_text(child) for child in node.children if child not in parts)
        if node.type == "test_command" and len(parts) == 1:
            return self._holds(parts[0])
        if node.type == "negated_command" or (node.type == "unary_expression" and operator == "!"):
            holds = self._holds(parts[0])
            return None if holds is None else not holds
        if operator in ("&&", "||") and len(parts) == 2:
            both = [self._holds(part) for part in parts]
            decisive = operator == "||"
            return decisive if decisive in both else None if None in both else not decisive
        if node.type not in ("unary_expression", "binary_expression"):
            return None
        used = set(self.used)
        words = [self._one(part) for part in parts]
        self.used = used
        texts = [word.text for word in words]
        if any(word.unknown for word in words) or re.search(r"[*?\[(]", "".join(texts[1:])):
            return None
        if operator in ("-n", "-z"):
            return bool(texts[0]) is (operator == "-n")
        return (texts[0] == texts[1]) is (operator != "!=") if operator in ("=", "==", "!=") else None

    def _redirects(self, node: Node) -> tuple[Word, ...]:
        """Where a command's output goes, if it is a file."""
        return tuple(
            Word(_text(child), self.line(child))
            for child in node.children
            if child.type == "file_redirect"
            and (target := child.child_by_field_name("destination")) is not None
            and not re.fullmatch(r"/dev/null|&?\d", _text(target))
        )

    def _heredoc(self, node: Node) -> None:
        for child in node.children:
            if child.type == "heredoc_body" and knowledge.LAUNCH.search(_text(child)):
                self.found.append(Command((Word(_text(child), self.line(child)),), label="here-document"))
            elif child.type not in ("heredoc_body", "heredoc_start", "heredoc_end"):
                self._walk(child)

    def _declare(self, node: Node) -> None:
        export = _text(node.children[0]) in ("export", "typeset -x", "declare -x")
        for child in node.named_children:
            if child.type == "word" and _text(child) == "-x":
                export = True
            elif child.type == "variable_assignment":
                self._assign(child, export)
            elif child.type == "variable_name" and export:
                self.exported.add(_text(child))

    def _assign(self, node: Node, export: bool) -> None:
        name_node, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        assert name_node is not None  # noqa: S101 - the grammar's own word
        name = _text(name_node)
        if self.conditions and name in self.given:
            return
        if value is not None and value.type == "array":
            words = tuple(
                word for child in value.named_children if child.type != "comment" for word in self.expand(child)
            )
        else:
            words = (self._one(value) if value is not None else Word("", self.line(node)),)
        if any(child.type == "+=" for child in node.children):
            if self.conditions:
                what = f"`{name}` is added to under a condition"
                self.source.find(self.line(node), what, "what is added was taken; remove it if it is not wanted")
            before = self.variables.get(name, ())
            if value is not None and value.type == "array":
                words = (*before, *words)
            elif before:
                words = (
                    replace(
                        words[0], text=before[-1].text + words[0].text, unknown=before[-1].unknown + words[0].unknown
                    ),
                )
        elif self.conditions:
            words = self._perhaps(name, words, self.line(node))
        self.variables[name] = words
        if export:
            self.exported.add(name)

    def _perhaps(self, name: str, words: tuple[Word, ...], line: int) -> tuple[Word, ...]:
        """The value of a variable that is set only under a condition."""
        before = self.variables.get(name)
        if (
            before is not None
            and [word.text for word in before] != [word.text for word in words]
            and before != (Word("", 0),)
        ):
            return (Word(f"${name}", line, unknown=(f"${name}",)),)
        self.source.find(line, f"`{name}` is set under a condition", "its value there was taken; check that it holds")
        return words

    def _one(self, node: Node) -> Word:
        """A value, which is not split into words."""
        parts = list(self._parts(node, quoted=False))
        joined = "".join(
            " ".join(word.text for word in part.words) if part.words is not None else part.text for part in parts
        )
        unknown = tuple(part.unknown for part in parts if part.unknown)
        return Word(joined, self.line(node), _text(node), unknown, bare=len(parts) == 1 and bool(unknown))

    def _command(self, node: Node) -> None:
        prefix = {
            _text(child.named_children[0]): self._prefix(child)
            for child in node.children
            if child.type == "variable_assignment"
        }
        skipped = ("variable_assignment", "file_redirect", "herestring_redirect", "comment")
        parts = [child for child in node.named_children if child.type not in skipped]
        words = tuple(word for child in parts for word in self.expand(child))
        if words:
            known = len(self.found)
            self._take(words, prefix)
            if redirects := self._redirects(node):
                self.found[known:] = [replace(each, redirects=redirects) for each in self.found[known:]]

    def _prefix(self, node: Node) -> Word:
        value = node.child_by_field_name("value")
        return self._one(value) if value is not None else Word("", self.line(node))

    def _take(self, words: tuple[Word, ...], prefix: dict[str, Word]) -> None:
        name = words[0].text
        if name == "set":
            if len(words) > 3 and re.fullmatch(r"-\w*x\w*|--export", words[1].text):  # fish
                self.variables[words[2].text] = words[3:]
                self.exported.add(words[2].text)
            self.export_all |= any(re.fullmatch(r"-\w*a\w*", word.text) or word.text == "allexport" for word in words)
        elif name == "cd" and len(words) > 1 and not words[1].unknown:
            self.folder = posixpath.join(self.folder or "", words[1].text)
        elif name in self.functions or name in self.called:
            self.functions.setdefault(name, self.called.get(name))
            self._call(name, words[1:])
            return
        elif name == "read":
            for word in words[1:]:
                if word.text not in self.given:
                    self.variables.pop(word.text, None)
        elif name == "eval":
            self.run_again(" ".join(word.text for word in words[1:]), words[0].line)
            return
        elif (
            name in ("source", ".") and len(words) > 1 and (match := re.fullmatch(r"(.*)/bin/activate", words[1].text))
        ):
            self.python = posixpath.join(self.folder or "", match[1], "bin/python")
        if name.startswith("--") and self.found and self.found[-1].words:
            what = "the shell ended the command before this line: a comment or an empty line follows its backslash"
            self.source.find(words[0].line, what, "move it away; the line was taken as part of the command")
            last = self.found.pop()
            self.found.append(replace(last, words=(*last.words, *words)))
            return
        exported = {
            name: self.variables[name][-1]
            for name in sorted(self.exported & self.variables.keys())
            if self.variables[name] and (name not in self.used or knowledge.is_setting(name))
        }
        self.found.append(Command(words, {**exported, **prefix}, self.folder, self.python))

    def run_again(self, text: str, line: int) -> None:
        """A text that the script itself hands to a shell."""
        inner = replace(self, first=line)
        inner.run(text)

    def expand(self, node: Node) -> Iterator[Word]:
        """The words that a node becomes: one, several (arrays, unquoted variables), or none."""
        line, raw = self.line(node), _text(node)
        current: list[_Part] = []
        open_word = False

        def close() -> Iterator[Word]:
            nonlocal current, open_word
            if len(current) == 1 and current[0].word is not None:
                yield current[0].word
            elif open_word:
                unknown = tuple(part.unknown for part in current if part.unknown)
                bare = bool(unknown) and all(part.unknown and not part.quoted for part in current if part.text)
                yield Word("".join(part.text for part in current), line, raw, unknown, bare)
            current, open_word = [], False

        for part in self._parts(node, quoted=False):
            if part.words is not None:
                # `"a${X[@]}b"` joins the first and the last word with what stands beside them; alone each stays itself.
                for index, word in enumerate(part.words):
                    if index:
                        yield from close()
                    current.append(_Part(word.text, unknown=" ".join(word.unknown), word=word))
                    open_word = True
            elif part.quoted or part.unknown:
                current.append(part)
                open_word = True
            else:
                pieces = re.split(r"(\s+)", part.text)
                for piece in pieces:
                    if piece.isspace():
                        yield from close()
                    elif piece:
                        current.append(_Part(piece))
                        open_word = True
        yield from close()

    def _parts(self, node: Node, quoted: bool) -> Iterator[_Part]:
        """quoted False: what a variable holds is split at blanks. Literal text is never split."""
        kind = node.type
        if kind == "raw_string":
            yield _Part(_text(node)[1:-1])
        elif kind == "ansi_c_string":
            yield _Part(_text(node)[2:-1].encode().decode("unicode_escape", "replace"))
        elif kind in ("string", "translated_string"):
            yield from self._string(node)
        elif kind == "simple_expansion":
            yield from self._variable(_text(node)[1:], _text(node), quoted)
        elif kind == "expansion":
            yield from self._expansion(node, quoted)
        elif kind == "command_substitution":
            yield self._substitution(node, quoted)
        elif kind in ("concatenation", "command_name", "array"):
            end = node.start_byte
            for child in node.children:
                yield from self._parts(child, quoted)
                end = child.end_byte
            if end < node.end_byte:
                yield _Part(_text(node).encode()[end - node.start_byte :].decode())
        elif kind in _LITERAL or not node.is_named:
            text = re.sub(r"\\(\n|.)", lambda match: "" if match[1] == "\n" else match[1], _text(node), flags=re.DOTALL)
            if re.match(r"~(?=/|$)", text):
                yield from self._variable("HOME", "~", True)
                text = text[1:]
            yield _Part(text)
        else:
            yield _Part(_text(node), quoted, _text(node))

    def _string(self, node: Node) -> Iterator[_Part]:
        """Between the quotes, whatever is no expansion is literal."""
        whole = node.text or b""
        position = whole.index(b'"') + 1

        def literal(end: int | None) -> Iterator[_Part]:
            text = re.sub(
                r'\\([$`"\\]|\n)', lambda m: "" if m[1] == "\n" else m[1], whole[position:end].decode(errors="replace")
            )
            # `"${X[@]}"` is as many words as X has, none if it is empty; only `""` itself is an empty word.
            if text or whole == b'""':
                yield _Part(text)

        for child in node.named_children:
            if child.type == "string_content":
                continue
            yield from literal(child.start_byte - node.start_byte)
            yield from self._parts(child, quoted=True)
            position = child.end_byte - node.start_byte
        yield from literal(-1)

    def _variable(self, name: str, written: str, quoted: bool) -> Iterator[_Part]:
        self.used.add(name)
        words = self.variables.get(name)
        if words is None:
            yield _Part(written, quoted and name not in "@*", written)
        elif name in "@*" or (self.zsh and not quoted and len(words) > 1):
            yield _Part(words=words)
        else:
            word = words[0] if words else Word("", 0)
            # zsh does not split what a variable holds.
            yield _Part(word.text, quoted or (self.zsh and bool(word.text)), " ".join(word.unknown))

    def _expansion(self, node: Node, quoted: bool) -> Iterator[_Part]:
        written = _text(node)
        match = re.fullmatch(r"\$\{(\w+)(\[[@*]\])?(?:(:?[-=?+]|##|#|%%|%)(.*))?\}", written, re.DOTALL)
        if match is None:
            yield _Part(written, quoted, written)
            return
        name, array, operator, _ = match.groups()
        words = self.variables.get(name)
        self.used.add(name)
        if array and words is not None and not operator:
            yield _Part(words=words)
        elif operator is None:
            yield from self._variable(name, written, quoted)
        elif operator.lstrip(":") in ("-", "="):
            if words is not None and (words[0].text if words else ""):
                yield from self._variable(name, written, quoted)
                return
            value = [child for child in node.named_children if child.type not in ("variable_name", "subscript")]
            what = f"`{name}` may be set outside of this text; its default was taken"
            self.source.find(self.line(node), what, f"give --set {name}=VALUE if it is another")
            if quoted and not value:
                yield _Part()
            for child in value:
                yield from self._parts(child, quoted)
        elif operator.lstrip(":") == "?":
            yield from self._variable(name, f"${{{name}}}", quoted)
        elif operator.lstrip(":") == "+" and words is None:
            yield _Part("", quoted, "")
        elif operator in ("##", "%") and words and not words[0].unknown and match[4] in ("*/", "/*"):
            text = words[0].text
            yield _Part(text.rpartition("/")[2] if operator == "##" else text.rpartition("/")[0], quoted)
        else:
            yield _Part(written, quoted, written)

    def _substitution(self, node: Node, quoted: bool) -> _Part:
        """The few substitutions whose output the text itself tells."""
        inner = [child for child in node.named_children if child.type == "command"]
        words = [word for child in inner for part in child.named_children for word in self.expand(part)]
        if len(inner) == 1 and words and not any(word.unknown for word in words):
            name, rest = words[0].text, [word.text for word in words[1:]]
            if name in ("basename", "dirname") and len(rest) == 1:
                return _Part(getattr(posixpath, name)(rest[0].rstrip("/")), quoted)
            if name == "echo" and rest[:1] != ["-e"]:
                return _Part(" ".join(rest), quoted)
            if (name == "which" and len(rest) == 1) or (name == "command" and rest[:1] == ["-v"]):
                return _Part(rest[-1], quoted)
            if name == "pwd" and self.folder and self.folder.startswith("/"):
                return _Part(self.folder, quoted)
        return _Part(_text(node), quoted, _text(node))


def _text(node: Node) -> str:
    return (node.text or b"").decode(errors="replace")
