"""What else could start SGLang on this host: other people's units, cron, boot scripts, Compose files, containers.

Texts are judged by pure functions; nothing is run. Places and words: knowledge/start_paths.json.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shlex
import time
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from kernelswap.agent import containers, identity, knowledge, units
from kernelswap.agent.containers import ContainerError
from kernelswap.agent.redaction import hide_secrets, redact

SHOWN = 200  # characters of a line
ROOT = Path("/")


@dataclass(frozen=True)
class Line:
    """A command that starts SGLang. number: 1-based, of the file that was judged; port: that it asks for, if it says.

    by: the script that has it, where the judged text only calls that.
    """

    number: int
    text: str
    port: Optional[int] = None
    by: str = ""


@dataclass(frozen=True)
class StartPath:
    """One way to a server besides ours. kind: see docs/reference.md. where: the file or container; how: what has it
    start; text: what it runs, without secrets; port: that it asks for, if it says."""

    kind: str
    where: str
    how: str
    text: str
    port: Optional[int] = None


@dataclass(frozen=True)
class Found:
    """looked: the places that were looked at; unknown: those that could not be, each with the reason."""

    paths: Tuple[StartPath, ...]
    looked: Tuple[str, ...]
    unknown: Tuple[Tuple[str, str], ...] = ()


Read = Callable[[str], Optional[str]]


@functools.cache
def known() -> Dict[str, Any]:
    table: Dict[str, Any] = json.loads(knowledge.read("start_paths.json"))
    return table


# Texts.


def lines_of(text: str, read: Read = lambda _path: None, names: Collection[str] = (), skip: str = "") -> List[Line]:
    """The commands of a script, a crontab or any text of lines that start SGLang, also through a script that they call.

    read: the text of a script by its path, None for what is none. names: units and containers that do so when they are
    started. skip: what stands before a command: `time` of a crontab, `user` after it, `anacron`'s three fields.
    """
    return list(_lines(text, read, frozenset(names), skip, known()["script"]["levels"]))


def _lines(text: str, read: Read, names: Collection[str], skip: str, levels: int) -> Iterator[Line]:
    folder = ""
    for number, line in _logical(text):
        for words in _commands(_command_of(line, skip)):
            if words[0] == "cd" and len(words) > 1:
                folder = words[1]
            found = _judge(words, read, names, folder, levels)
            if found:
                yield Line(number, _shown(line), found.port, found.by)
                break


def _logical(text: str) -> Iterator[Tuple[int, str]]:
    """Lines without comments, joined where a backslash continues them, each with the number of its first."""
    joined, begin = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        begin = begin if joined else number
        if line.lstrip().startswith(("#", ";")) and not joined:
            continue
        if line.endswith("\\"):
            joined += line[:-1] + " "
            continue
        yield begin, joined + line
        joined = ""
    if joined:
        yield begin, joined


_BEFORE = {
    "": r"",
    "time": r"\s*(@\w+|(\S+\s+){4}\S+)\s+",
    "user": r"\s*(@\w+|(\S+\s+){4}\S+)\s+\S+\s+",
    "anacron": r"\s*\S+\s+\d+\s+\S+\s+",
}


def _command_of(line: str, skip: str) -> str:
    match = re.match(_BEFORE[skip], line)
    return line[match.end() :] if match else line


_OPERATOR = re.compile(r"[;|&()\n]+")


def _commands(line: str) -> Iterator[List[str]]:
    """The simple commands of a shell line, as words; targets of redirections are none of them."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        tokens = list(lexer)
    except ValueError:  # no shell, or a quote that is closed on another line
        tokens = re.sub(r"([;|&()]+)", r" \1 ", line).split()
    words: List[str] = []
    redirected = False
    for token in tokens:
        if _OPERATOR.fullmatch(token):
            if words:
                yield words
            words = []
        elif set(token) <= set("<>&"):
            redirected = True
        elif redirected:
            redirected = False
        else:
            words.append(token)
    if words:
        yield words


def _judge(words: Sequence[str], read: Read, names: Collection[str], folder: str, levels: int) -> Optional[Line]:
    """The command if it starts SGLang, itself or through what it calls."""
    while len(words) > 1 and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    whole, words = words, _unwrapped(words)
    text = " ".join(whole)
    if not words:
        return None
    name = PurePosixPath(words[0]).name
    if name in known()["questions"]["names"]:
        return None
    if name in known()["starters"]["names"] and (found := _starter(words, names)):
        return found
    if name in ("docker", "podman", "nerdctl") and set(words[1:3]) & set(known()["questions"]["verbs"]):
        return None
    shell = identity.SHELL.fullmatch(words[0]) and next(
        (words[i + 1] for i, word in enumerate(words[:-1]) if re.fullmatch(r"-[a-z]*c", word)), None
    )
    if shell:
        return next(iter(_lines(shell, read, names, "", levels)), None)
    if re.search(known()["starts"]["pattern"], text):
        return Line(0, text, port_of(text))
    return _called(whole, read, names, folder, levels) if levels else None


_ASSIGNMENT = re.compile(r"\w+=.*", re.DOTALL)
KEYWORDS = {"exec", "command", "if", "then", "else", "do", "while", "until", "!", "{"}


def _unwrapped(words: Sequence[str]) -> Sequence[str]:
    """Without assignments and the keywords and wrappers that stand before a command."""
    wrappers = {"sudo", *identity.known()["wrappers"]["run_one"]}
    # One that stands alone is a setting, of a Quadlet or of a command that is kept for later.
    while len(words) > 1:
        if _ASSIGNMENT.fullmatch(words[0]) or words[0] in KEYWORDS:
            words = words[1:]
        elif PurePosixPath(words[0]).name in wrappers:
            words = words[_options(words) :]
        else:
            break
    return words


def _options(words: Sequence[str]) -> int:
    """Where a wrapper's command begins; what follows an option is its value, unless it is a path or known as a command
    (and no user's name)."""

    def commands(word: str) -> bool:
        name = PurePosixPath(word).name
        known_names = (*known()["questions"]["names"], *known()["starters"]["names"])
        return name in known_names or bool(identity.SHELL.fullmatch(name) or identity.PYTHON.fullmatch(name))

    at = 1
    while at < len(words) - 1:
        word, before = words[at], words[at - 1]
        whose = before in ("-u", "-g", "--user", "--group")
        value = before.startswith("-") and "/" not in word and (whose or not commands(word))
        if not (word.startswith("-") or value or (identity.ARGUMENT.fullmatch(word) and not commands(word))):
            break
        at += 1
    return at


def _starter(words: Sequence[str], names: Collection[str]) -> Optional[Line]:
    """A command that starts a unit or a container which starts SGLang."""
    verbs = set(known()["starters"]["verbs"])
    named = [word for word in words if word in names or f"{word}.service" in names]
    return Line(0, " ".join(words)) if named and verbs & set(words) else None


def _called(words: Sequence[str], read: Read, names: Collection[str], folder: str, levels: int) -> Optional[Line]:
    paths = [word for word in words if "/" in word or word.endswith(tuple(known()["script"]["suffixes"]))]
    if "compose" in words or any(word.endswith("docker-compose") for word in words):
        paths += (
            [f"{folder}/{name}" for name in ("compose.yaml", "compose.yml", "docker-compose.yml")] if folder else []
        )
    for path in paths:
        path = path if path.startswith("/") else str(PurePosixPath(folder or "/", path))
        text = read(path)
        for line in _lines(text, read, names, "", levels - 1) if text else ():
            return Line(0, line.text, line.port, line.by or path)
    return None


def port_of(text: str) -> Optional[int]:
    """The port that a command line asks for; None where it does not say."""
    match = re.search(r"""--port['"]?(?:[\s=,]|- )+['"]?(\d{1,5})\b""", text)
    return int(match[1]) if match else None


def _shown(line: str) -> str:
    text = redact(" ".join(hide_secrets(line.split())))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def commands_of_unit(text: str) -> str:
    """The commands that a unit's start runs, a line each, without systemd's own marks."""
    lines = []
    for _, line in _logical(text):
        match = re.match(r"\s*Exec(?:Start|StartPre|StartPost|Reload|StopPost)\s*=\s*[-@:+!|]*(.*)", line)
        if match:
            lines.append(match[1])
    return "\n".join(lines)


@dataclass(frozen=True)
class Service:
    """One service of a Compose file that runs SGLang. restart: its policy, "" for none."""

    name: str
    restart: str
    text: str
    port: Optional[int]


def compose_services(text: str) -> List[Service]:
    """The services of a Compose file that run SGLang: read by its indentation, as a host has no reader of YAML."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    found, blocks, inside, depth = [], {}, False, 0  # type: ignore[var-annotated]
    block: List[str] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not indent:
            inside, depth = line.startswith("services:"), 0
        elif inside:
            depth = depth or indent
            if indent == depth:
                block = blocks.setdefault(line.strip().rstrip(":").strip("'\""), [])
            block.append(line)
    for name, block in blocks.items():
        whole = "\n".join(block)
        hit = re.search(known()["starts"]["pattern"], whole)
        if hit:
            restart = re.search(r"""^\s+(?:restart|condition):\s*['"]?([\w-]+)""", whole, re.MULTILINE)
            policy = restart[1] if restart and restart[1] not in ("no", "none") else ""
            shown = next(line for line in block if re.search(known()["starts"]["pattern"], line))
            found.append(Service(name, policy, _shown(shown.strip()), port_of(whole)))
    return found


# Places.


def look(ours: Collection[str], root: Path = ROOT) -> Found:
    """Everything on the host that could start SGLang. ours: Kernelswap's own units; root: another folder in tests."""
    return _Look(frozenset(ours), root).found()


class _Look:
    """One look over a host: what was found, looked at, and could not be."""

    def __init__(self, ours: Collection[str], root: Path) -> None:
        self.ours, self.root = ours, root
        self.paths: List[StartPath] = []
        self.looked: List[str] = []
        self.unknown: List[Tuple[str, str]] = []
        self.names: Set[str] = set(ours)  # units and containers whose start starts SGLang

    def found(self) -> Found:
        self._containers()
        self._units()
        self._user_units()
        self._files()
        self._compose()
        return Found(tuple(self.paths), tuple(self.looked), tuple(self.unknown))

    def _place(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root))

    def _glob(self, pattern: str) -> List[Path]:
        try:
            return sorted(self.root.glob(pattern))
        except OSError as error:
            self.unknown.append((f"/{pattern}", f"{error.strerror}"))
            return []

    def _text(self, path: Path) -> str:
        """A file's text, "" where there is none; what is closed to us is told."""
        try:
            if not path.is_file() or path.stat().st_size > known()["script"]["bytes"]:
                return ""
            return path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            self.unknown.append((self._place(path), f"{error.strerror}"))
            return ""

    def _script(self, path: str) -> Optional[str]:
        """The text of what a command calls, where that is a script."""
        place = self.root / path.lstrip("/")
        with contextlib.suppress(OSError, ValueError):
            if place.is_file() and place.stat().st_size <= known()["script"]["bytes"]:
                data = place.read_bytes()
                text = b"\0" not in data and os.access(place, os.X_OK)
                if text or data.startswith(b"#!") or place.suffix in known()["script"]["suffixes"]:
                    return data.decode("utf-8", "replace")
        return None

    def _lines(self, text: str, skip: str = "") -> List[Line]:
        return lines_of(text, self._script, self.names, skip)

    def _add(self, kind: str, where: str, how: str, line: Line) -> None:
        text = f"{line.text} (in {line.by})" if line.by else line.text
        self.paths.append(StartPath(kind, where, how, text, line.port))

    # Units of the system.

    def _unit_texts(self, folders: Iterable[Path]) -> Iterator[Tuple[str, Path, str]]:
        """Name, place and text of every service, what is laid over it included; the first folder that has it wins."""
        known_folders = [folder for folder in folders if folder.is_dir()]
        dropped: Dict[str, str] = {}
        for folder in known_folders:
            for path in sorted(folder.glob("*.service.d/*.conf")):
                name = path.parent.name[: -len(".d")]
                dropped[name] = f"{dropped.get(name, '')}\n{self._text(path)}"
        seen: Set[str] = set()
        for folder in known_folders:
            for path in sorted(folder.glob("*.service")):
                real = str(path.resolve())
                if path.name not in seen and real not in seen:
                    seen |= {path.name, real}
                    yield path.name, path, f"{self._text(path)}\n{dropped.get(path.name, '')}"

    def _units(self) -> None:
        folders = [self.root / folder for folder in known()["units"]["system"]]
        self.looked.append("systemd units and what starts them")
        found: Dict[str, Tuple[Path, List[Line]]] = {}
        for name, path, text in self._unit_texts(folders):
            if name in self.ours or name.startswith("kernelswap-"):
                continue
            lines = self._lines(commands_of_unit(text))
            for each in self._instances(name, folders) if lines else ():
                found[each] = path, lines
        try:
            states = units.starts(found) if found else {}
        except units.UnitError as error:
            self.unknown.append(("systemctl show", str(error)))
            return
        self.names |= set(found)
        for name, (path, lines) in found.items():
            if states[name]:
                self._add("hand-made-unit", f"{name} ({self._place(path)})", str(states[name]), lines[0])

    @staticmethod
    def _instances(name: str, folders: Sequence[Path]) -> List[str]:
        """The name, or of a template those of its instances that are wanted."""
        if "@." not in name:
            return [name]
        pattern = f"*.wants/{name.replace('@.', '@*.')}"
        return sorted({path.name for folder in folders for path in folder.glob(pattern) if path.name != name})

    # Units of users, whose own systemd cannot be asked from here.

    def _user_units(self) -> None:
        table = known()["units"]
        shared = [self.root / folder for folder in table["user"]]
        self._units_of("every user", shared, [])
        for home in self._homes():
            self._units_of(home.name, [home / folder for folder in table["home"]], shared)
        self.looked.append("units of users (/etc/systemd/user, ~/.config/systemd/user)")

    def _homes(self) -> List[Path]:
        return [path for pattern in ("root", "home/*") for path in self._glob(pattern) if path.is_dir()]

    def _units_of(self, user: str, folders: Sequence[Path], shared: Sequence[Path]) -> None:
        try:
            for name, path, text in self._unit_texts(folders):
                lines = self._lines(commands_of_unit(text))
                wanted = [name, f"{name[: -len('.service')]}.timer"]
                by = [
                    link.parent.name[: -len(".wants")]
                    for folder in (*folders, *shared)
                    for each in wanted
                    for link in folder.glob(f"*.wants/{each}")
                ]
                if lines and by:
                    lingers = (self.root / "var/lib/systemd/linger" / user).exists()
                    when = "at boot" if lingers else "at login"
                    self._add("user-unit", self._place(path), f"unit of {user}, {when}, by {by[0]}", lines[0])
        except OSError as error:
            self.unknown.append((f"units of {user}", f"{error.strerror}"))

    # Files of lines.

    def _files(self) -> None:
        for entry in known()["files"]:
            for path in self._glob(entry["glob"]):
                if entry.get("executable") and not os.access(path, os.X_OK):
                    continue
                lines = self._lines(self._text(path), entry.get("skip", ""))
                for line in lines:
                    self._add(entry["kind"], f"{self._place(path)}:{line.number}", entry["kind"], line)
        self.looked += ["cron (crontabs, cron.d, cron.*ly, at)", "rc.local and init scripts", "supervisord", "Quadlets"]

    # Compose files.

    def _compose(self) -> None:
        rules = known()["projects"]
        until, left = time.monotonic() + rules["seconds"], rules["count"]
        for pattern in rules["folders"]:
            for top in self._glob(pattern):
                for folder, names in self._walk(top, rules["depth"], set(rules["skip"])):
                    left -= 1
                    if left < 0 or time.monotonic() > until:
                        self.unknown.append(
                            (self._place(folder), "too many folders: Compose files beyond it were not sought")
                        )
                        return
                    for name in names:
                        if re.fullmatch(rules["compose"], name):
                            self._compose_file(folder / name)
        places = ", ".join(f"/{pattern}" for pattern in rules["folders"])
        self.looked.append(f"Compose files ({places}, {rules['depth']} levels deep)")

    def _walk(self, top: Path, depth: int, skip: Collection[str]) -> Iterator[Tuple[Path, List[str]]]:
        """Every folder down to a depth with the names of its files; links and SGLang's own source tree are left out."""
        try:
            with os.scandir(top) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except FileNotFoundError:  # it went while we looked
            return
        except OSError as error:
            self.unknown.append((self._place(top), f"{error.strerror}"))
            return
        yield top, [entry.name for entry in found if not entry.is_dir(follow_symlinks=False)]
        if (top / "python/sglang").is_dir():
            return
        for entry in found if depth else ():
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in skip:
                yield from self._walk(top / entry.name, depth - 1, skip)

    def _compose_file(self, path: Path) -> None:
        for service in compose_services(self._text(path)):
            how = f"restart: {service.restart}" if service.restart else "no restart policy: `compose up` starts it"
            line = Line(0, service.text, service.port)
            self._add("compose", f"{self._place(path)}, service {service.name}", how, line)

    # Containers.

    def _containers(self) -> None:
        for answer in (*self._docker(), *self._podman()):
            config, state = answer.get("Config") or {}, answer.get("State") or {}
            words = [config.get("Image") or "", *(config.get("Entrypoint") or []), *(config.get("Cmd") or [])]
            text = " ".join(map(str, words))
            if not re.search(known()["starts"]["pattern"], text):
                continue
            name = str(answer.get("Name", "")).lstrip("/")
            self.names.add(name)
            policy = ((answer.get("HostConfig") or {}).get("RestartPolicy") or {}).get("Name") or "no"
            running = bool(state.get("Running"))
            if running or policy not in containers.NO:
                how = f"restart policy {policy}{', running' if running else ''}"
                self._add("container", f"container {name}", how, Line(0, _shown(text), port_of(text)))

    def _docker(self) -> Iterator[Dict[str, Any]]:
        """From Docker's own files: they tell what it starts at its next start, whether it runs now or not."""
        store = self.root / "var/lib/docker"
        with contextlib.suppress(OSError, ValueError):
            moved = json.loads((self.root / "etc/docker/daemon.json").read_text()).get("data-root")
            store = self.root / str(moved).lstrip("/") if moved else store
        if not store.is_dir():
            return
        self.looked.append(f"Docker's containers ({self._place(store)})")
        for path in sorted(store.glob("containers/*/config.v2.json")):
            try:
                answer = json.loads(path.read_text())
                answer["HostConfig"] = json.loads((path.parent / "hostconfig.json").read_text())
                yield answer
            except (OSError, ValueError) as error:
                self.unknown.append((self._place(path), str(error)))

    def _podman(self) -> Sequence[Dict[str, Any]]:
        """Root's own containers; of other users only those that run are seen, as processes."""
        if self.root != ROOT or not Path("/var/lib/containers/storage").is_dir():
            return []
        try:
            answers = containers.all_of("podman")
        except ContainerError as error:
            self.unknown.append(("podman", str(error)))
            return []
        self.looked.append("Podman's containers (root's)")
        return answers
