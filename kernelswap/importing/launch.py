"""From the commands of a text to the launch lines in it, with everything that is wrapped around them taken off."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kernelswap.importing import compose, container, knowledge, shell, unit
from kernelswap.importing.container import Container
from kernelswap.importing.words import Command, Source, Word


@dataclass
class Launch:
    """One launch line.

    first: where its command begins. line: where SGLang's words begin. words: what SGLang's own parser gets. python: the
    interpreter as it was written.
    """

    line: int
    words: tuple[Word, ...]
    first: int = 0
    python: Word | None = None
    environment: dict[str, Word] = field(default_factory=dict)
    folder: str | None = None
    user: Word | None = None
    container: Container | None = None
    label: str = ""


def launches(text: str, source: Source, variables: Mapping[str, str]) -> list[Launch]:
    """Every launch line of a text, whatever kind of text it is."""
    if re.match(r"(\s*([#;].*)?\n)*\s*\[(Service|Unit|Install)\]", text) and not re.search(r"(?m)^\[Container\]", text):
        commands, user = unit.commands(text, source, variables)
        found = _among(commands, source, variables)
        for launch in found:
            root = None if launch.container else Word("root", launch.first)  # a unit's user without User=
            launch.user = launch.user or user or root
        if not found:
            _explain_absence(commands, source)
        return found
    if re.search(r"^services:", text, re.MULTILINE) and "<<" not in re.sub(r"<<:", "", text):
        return _services(text, source, variables)
    for pattern, what, todo in _KINDS:
        if re.search(pattern, text, re.MULTILINE):
            source.refuse(1, what, todo)
            return []
    commands = shell.commands(text, source, variables=variables)
    found = _among(commands, source, variables)
    if not found:
        _explain_absence(commands, source, text)
    return found


_KINDS = (
    (
        r"^apiVersion:",
        "is a Kubernetes object, which is not read",
        "import the container's command and args as one line",
    ),
    (
        r"^\[Container\]",
        "is a Podman Quadlet, which is not read",
        "import the `podman run` line: systemctl cat UNIT shows it",
    ),
    (
        r"^\[program:",
        "is a configuration of supervisord, which is not read",
        "import what stands after `command=`, with the variables of `environment=` before it",
    ),
    (
        r"^FROM \S+(?s:.*)^(CMD|ENTRYPOINT)\b",
        "is a Dockerfile, which is not read",
        "import the command that starts the container",
    ),
    (
        r"^\s*import sglang\b|^from sglang\b",
        "is a Python program, which is not read",
        "import the launch line that it stands for",
    ),
)


# The same where no launch line was found.
_PIECES = (
    (
        r"""["']-m["']\s*,\s*["']sglang\.launch_server["']""",
        "has the words of a launch line as a list of a program's or a Dockerfile's, which is not read",
        "write them as one line of shell",
    ),
    (
        r"^\s*- +[\"']?(-m|sglang\.launch_server|--model(-path)?)\b",
        "is a piece of YAML, which is not read alone",
        "import the whole Compose file, or write the words as one line of shell",
    ),
    (
        r"^.*\bdocker([ -])compose\b.* (up|start|restart)\b",
        "starts what a Compose file says",
        "import that Compose file",
    ),
)


def _services(text: str, source: Source, variables: Mapping[str, str]) -> list[Launch]:
    found = []
    services = compose.services(text, source, variables)
    for service in services:
        command = Command(service.words, service.container.environment, service.container.folder)
        for launch in _among([command], source, variables, service.container):
            launch.label = f"service {service.name}"
            found.append(launch)
    if not found:
        names = ", ".join(service.name for service in services) or "none"
        source.refuse(
            1,
            f"no service has a launch line of SGLang in its `command:` (services: {names})",
            "write `command:` out, or import the script that the image runs",
        )
    return found


def _among(
    commands: Sequence[Command],
    source: Source,
    variables: Mapping[str, str],
    box: Container | None = None,
) -> list[Launch]:
    """The launch lines among commands; what the others do is told beside them. box: the container that runs them."""
    found: list[Launch] = []
    documents: list[Launch] = []
    others: list[Command] = []
    for command in commands:
        if command.label == "here-document":
            quiet = Source(source.name)
            documents += launches(command.words[0].text, quiet, variables)
            continue
        inner = _unwrap(command, source, variables, box)
        if inner:
            found += inner
        else:
            others.append(command)
    if not found and documents:
        source.refuse(documents[0].line, "the launch line stands in a here-document", "import that text by itself")
    for command in others if found else ():
        _lint(command, source)
    return found


def _unwrap(command: Command, source: Source, variables: Mapping[str, str], box: Container | None) -> list[Launch]:
    """The launch lines of one command, wrappers taken off from the outside in."""
    words = list(command.words)
    launch = Launch(
        command.line, (), command.line, environment=dict(command.environment), folder=command.folder, container=box
    )
    if not _may_launch(words):
        return []
    if command.label == "loop":
        knowledge.say(source, command.line, "", knowledge.lint("loop"))
    for redirect in command.redirects:
        knowledge.say(source, redirect.line, f"`{redirect.text}`", knowledge.lint("redirect"))
    while words:
        name = posixpath.basename(words[0].text)
        if words[0].text.startswith("--") and (launch.container or words[0] is command.words[0]):
            launch.label = "flags"
            return [_finish(launch, words, None, source)]
        start = _start(words)
        if start == 0:
            python, rest = _server(words)
            if python is None and command.python:
                python = Word(command.python, words[0].line)
            elif python is not None and "/" not in python.text and command.python:
                python = replace(python, text=command.python)
            return [_finish(launch, rest, python, source)]
        if match := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words[0].text, re.DOTALL):
            launch.environment[match[1]] = replace(words.pop(0), text=match[2])
        elif name in ("bash", "sh", "zsh", "dash", "ash") and (script := _script(words)) is not None:
            return _again(script, launch, source, variables)
        elif (
            name in ("docker", "podman", "nerdctl")
            and (at := _index(words, "run")) is not None
            and not (_index(words[:at], "compose"))
        ):
            launch.container, words = _boxed(words[at:], launch, source)
        elif name in _CONTAINERS:
            what = f"`{name} {words[1].text}` runs it in a container that the line does not show"
            todo = "write the host's paths, add its variables by hand, or import its `docker run` or Compose file"
            source.find(words[0].line, what, todo)
            words = words[2:][_next(words[2:]) :]
        elif name == "sudo":
            words = _sudo(words, launch)
        elif name == "ssh" or (
            name in ("tmux", "screen", "su", "runuser", "script", "watch", "flock") and start is None
        ):
            _say_wrapper(name, words[0], source)
            text = next((word for word in words[1:] if knowledge.LAUNCH.search(word.text)), None)
            if text is not None and " " in text.text.strip():
                return _again(text, launch, source, variables)
            words = words[1:][_next(words[1:]) :]
        else:
            _say_wrapper(name, words[0], source)
            words = _after_wrapper(words)
    return []


_CONTAINERS = (
    "docker", "podman", "nerdctl", "docker-compose", "podman-compose", "kubectl", "oc", "apptainer", "singularity",
    "enroot", "lxc",
)  # fmt: skip


def _may_launch(words: Sequence[Word]) -> bool:
    first = words[0].text if words else ""
    joined = " ".join(word.text for word in words)
    if first.startswith("--"):
        return True
    return knowledge.LAUNCH.search(joined) is not None and first not in knowledge.table()["mentioning"]


def _start(words: Sequence[Word]) -> int | None:
    """Where the server's own command begins: its interpreter, or `sglang serve`."""
    for index, word in enumerate(words):
        name = posixpath.basename(word.text)
        following = words[index + 1].text if index + 1 < len(words) else ""
        if (name == "sglang" and following == "serve") or name == "launch_server.py":
            return index - (name == "launch_server.py" and index > 0 and "python" in words[index - 1].text)
        if (word.text == "-m" and following in knowledge.MODULES) or word.text == "-msglang.launch_server":
            back = index
            while back and (
                words[back - 1].text.startswith("-") or (back > 1 and words[back - 2].text in ("-X", "-W"))
            ):
                back -= 1
            named = back and (
                words[back - 1].unknown or re.search(r"python|pypy", posixpath.basename(words[back - 1].text))
            )
            return back - 1 if named else index
    return None


def _server(words: Sequence[Word]) -> tuple[Word | None, list[Word]]:
    """The interpreter and SGLang's own words of a command that begins with one of them."""
    name = posixpath.basename(words[0].text)
    if name == "sglang":
        rest = list(words[2:])
        if rest and not rest[0].text.startswith("-"):
            rest[:1] = [replace(rest[0], text="--model-path"), rest[0]]
        folder = posixpath.dirname(words[0].text)
        return (replace(words[0], text=f"{folder}/python") if folder else None), rest
    for index, word in enumerate(words):
        if word.text == "-m":
            return (words[0] if index else None), list(words[index + 2 :])
        if posixpath.basename(word.text) == "launch_server.py" or word.text.startswith("-msglang"):
            return (words[0] if index else None), list(words[index + 1 :])
    return None, []


def _script(words: Sequence[Word]) -> Word | None:
    """The text of `bash -c TEXT`."""
    for index, word in enumerate(words[1:], 1):
        if re.fullmatch(r"-\w*c", word.text) and index + 1 < len(words):
            return words[index + 1]
        if not word.text.startswith("-"):
            return None
    return None


def _again(text: Word, outer: Launch, source: Source, variables: Mapping[str, str]) -> list[Launch]:
    """A text that one shell hands to another."""
    known = {name: word.text for name, word in outer.environment.items() if not word.unknown}
    inner = shell.commands(text.text, source, text.line, {**variables, **known})
    found = _among(inner, source, {**variables, **known}, outer.container)
    for launch in found:
        launch.environment = {**outer.environment, **launch.environment}
        launch.folder = launch.folder or outer.folder
        launch.user = launch.user or outer.user
    return found


def _boxed(words: Sequence[Word], launch: Launch, source: Source) -> tuple[Container, list[Word]]:
    box, rest = container.run(words, source)
    # What the caller exports reaches the container only by --env.
    launch.environment = {
        name: launch.environment.get(name, word) if word.text == f"${name}" else word
        for name, word in box.environment.items()
    }
    launch.folder = box.folder
    return box, list(rest)


def _sudo(words: Sequence[Word], launch: Launch) -> list[Word]:
    rest = list(words[1:])
    while rest and rest[0].text.startswith("-"):
        option = rest.pop(0)
        if option.text in ("-u", "--user") and rest:
            launch.user = rest.pop(0)
        elif option.text.startswith("--user="):
            launch.user = replace(option, text=option.text[7:])
        elif option.text in ("-g", "-D", "-C", "-p", "-h", "-r", "-t") and rest:
            rest.pop(0)
    return rest


def _say_wrapper(name: str, word: Word, source: Source) -> None:
    known = knowledge.wrapper(name)
    if known is None:
        what = f"`{word.text}` runs the launch line, and what it does cannot be seen here"
        source.find(word.line, what, "do by hand what it does for the server, or import the command that it runs")
    else:
        knowledge.say(source, word.line, f"`{name}`", known)


def _after_wrapper(words: Sequence[Word]) -> list[Word]:
    """The words after a wrapper and its options."""
    name = posixpath.basename(words[0].text)
    known = knowledge.wrapper(name)
    if known is None or name not in (
        "env",
        "exec",
        "nohup",
        "time",
        "setsid",
        "nice",
        "stdbuf",
        "command",
        "taskset",
        "timeout",
    ):
        return list(words[1:])[_next(words[1:]) :]
    rest = list(words[1:])
    while rest and rest[0].text.startswith("-"):
        option = rest.pop(0)
        if option.text in known.values and rest:
            rest.pop(0)
    while name in ("taskset", "timeout") and rest and re.fullmatch(r"[0-9a-fA-Fx,.-]+[smhd]?", rest[0].text):
        rest.pop(0)
    return rest


def _next(words: Sequence[Word]) -> int:
    """Where the next wrapper that is known, or the server itself, begins."""
    end = _start(words)
    for index, word in enumerate(words):
        name = posixpath.basename(word.text)
        if index == end or name in ("docker", "podman", "bash", "sh", "zsh") or knowledge.wrapper(name) is not None:
            return index
    return len(words)


def _index(words: Sequence[Word], text: str) -> int | None:
    """Where a subcommand stands, within the first few words."""
    return next((index for index, word in enumerate(words[:6]) if word.text == text), None)


def _finish(launch: Launch, words: Sequence[Word], python: Word | None, source: Source) -> Launch:
    launch.words = tuple(words)
    launch.python = None if launch.container else python
    # Words of an array stand where it was written.
    launch.line = next((word.line for word in words if word.line >= launch.first), launch.line)
    return launch


def _lint(command: Command, source: Source) -> None:
    """What the other commands of a script do that does not come along."""
    words = list(command.words)
    while words and (
        posixpath.basename(words[0].text) in ("sudo", "exec", "nohup", "command", "time", "xargs")
        or "=" in words[0].text
        or (command.words[0].text.endswith(("sudo", "xargs")) and words[0].text.startswith("-"))
    ):
        words.pop(0)
    if not words:
        return
    name = posixpath.basename(words[0].text)
    if words[0].text in ("source", ".") and len(words) > 1 and words[1].text.endswith("/activate"):
        name = "activate"
    if name in knowledge.table()["quiet-commands"] or name.startswith("-"):
        return
    whole = " ".join(word.raw or word.text for word in words)
    shown = re.sub(r"(?<= login) .*", " ...", whole.split("\n")[0])  # a password may follow
    known = knowledge.lint(knowledge.killer(whole) or name)
    if name == "sleep" and command.label == "loop":
        return
    knowledge.say(source, command.line, f"`{shown if len(shown) <= 60 else shown[:57] + '...'}`", known)


def _explain_absence(commands: Sequence[Command], source: Source, text: str = "") -> None:
    """Why there is no launch line: the nearest thing to one."""
    for pattern, what, todo in _PIECES:
        if match := re.search(pattern, text, re.MULTILINE):
            source.refusals.clear()  # of one who took it for shell
            source.refuse(text.count("\n", 0, match.end()) + 1, what, todo)
    if source.refusals:
        return
    engines = knowledge.table()["engines"]
    for command in commands:
        words = [word.text for word in command.words]
        for index, text in enumerate(words):
            name = text if index and words[index - 1] == "-m" else posixpath.basename(text)
            if name in engines:
                source.refuse(command.line, f"starts {engines[name]}", "import a launch line of SGLang")
                return
    for command in commands:
        for word in _targets(command):
            if re.search(r"\.(sh|bash|py|pl)$", word.text) or (
                word.text.startswith(("/", "./")) and command.folder is None
            ):
                what = f"starts `{word.text}`, a script that cannot be seen here"
                source.refuse(word.line, what, "import that script instead")
                return
    for command in commands:
        names = [posixpath.basename(word.text) for word in command.words]
        if names[:1] in (["docker"], ["podman"]) and "run" in names:
            source.refuse(
                command.line,
                "the image starts what its own entrypoint says",
                "write the command out, or import the image's script",
            )
            return
    source.refuse(
        1,
        "holds no launch line of SGLang",
        "give a line with `sglang serve`, `-m sglang.launch_server`, or its flags alone",
    )


def _targets(command: Command) -> Iterator[Word]:
    for word in command.words:
        name = posixpath.basename(word.text)
        if (
            knowledge.wrapper(name) is None
            and not word.text.startswith("-")
            and name not in ("bash", "sh", "python", "python3", "source", ".")
        ):
            yield word
            return
