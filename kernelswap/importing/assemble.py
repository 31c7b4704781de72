"""A launch line as the keys of a model and a profile."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kernelswap import flags as spelling
from kernelswap import sglang
from kernelswap.agent.redaction import redact
from kernelswap.importing import flagwords
from kernelswap.importing.flagwords import Flag
from kernelswap.importing.launch import Launch
from kernelswap.importing.words import Source, Word
from kernelswap.layers import environment_problems

MODELS = "/srv/models"  # where the shipped models lie
_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LISTS = (
    "LD_LIBRARY_PATH",
    "LIBRARY_PATH",
    "CPATH",
    "PYTHONPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LD_PRELOAD",
)
_DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONNOUSERSITE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
_ALWAYS_PASSED = ("NVIDIA_DRIVER_CAPABILITIES", "TERM", "DEBIAN_FRONTEND", "HOME", "USER", "SHELL", "PWD", "LANG")


@dataclass
class Server:
    """What a launch line says, each value with its line. Whether a flag is the model's or the profile's is decided by
    `knowledge.of_profile`."""

    line: int
    keys: dict[str, tuple[Any, int]] = field(default_factory=dict)
    flags: dict[str, tuple[Any, int]] = field(default_factory=dict)
    environment: dict[str, tuple[str, int]] = field(default_factory=dict)
    name: str = ""


def server(launch: Launch, source: Source, path: str | None) -> Server:
    """What is served and how. What cannot be known is refused in `source`."""
    result = Server(launch.line)
    release = _release(launch, result)
    flags = {flag.name: flag for flag in flagwords.flags(launch.words, source, release)}
    _refuse_others(flags, source)
    _model(result, launch, flags, source, path)
    _address(result, launch, flags, source)
    _engine(result, launch, source)
    for name in spelling.SECRETS:
        if name in flags:
            _secret(result, flags.pop(name), source)
    environment = dict(_environment(launch, source))
    _gpus(result, launch, flags, environment, source)
    result.environment = {name: (word.text, word.line) for name, word in environment.items()}
    for flag in flags.values():
        value = _value(flag, launch, source)
        if value is not None:
            result.flags[flag.name] = (value, flag.word.line)
    return result


def _release(launch: Launch, result: Server) -> sglang.Release:
    """The SGLang that the line was written for, as the container's image tells; else the newest."""
    image = launch.container.image if launch.container else ""
    match = re.search(r"sglang[^:]*:v?(\d+\.\d+\.\d+)(?![\d.]|\.?post|rc)", image)
    if match is None or match[1] not in sglang.versions() or launch.container is None:
        return sglang.newest()
    result.keys["engine"] = ({"version": match[1]}, launch.container.line)
    return sglang.release(match[1])


def _refuse_others(flags: dict[str, Flag], source: Source) -> None:
    """What Kernelswap cannot serve, by name; what makes no difference on one host goes."""
    if "config" in flags:
        flag = flags.pop("config")
        what = f"`{_written(flag)}`: more flags stand in that file, which cannot be seen here"
        source.refuse(flag.word.line, what, "write them into the launch line")
    if _text(flags, "nnodes") in (None, "1"):
        for name in ("nnodes", "node-rank", "dist-init-addr"):
            if name in flags:
                flag = flags.pop(name)
                source.find(flag.word.line, f"`{_written(flag)}` makes no difference on one host", "it was left out")
    if "ssl-keyfile-password" in flags:
        flag = flags.pop("ssl-keyfile-password")
        what = "`--ssl-keyfile-password` is beyond what Kernelswap supports"
        source.refuse(flag.word.line, what, spelling.OWNED[flag.name])
    for name in sorted(spelling.REFUSED.keys() - {"base-gpu-id", "gpu-id-step"}):
        if name in flags and _text(flags, name) != "null":
            flag = flags.pop(name)
            source.refuse(
                flag.word.line, f"`{_written(flag)}` is beyond what Kernelswap supports", spelling.REFUSED[name]
            )


def _written(flag: Flag) -> str:
    return " ".join([f"--{flag.name}", *(word.text for word in flag.values)])


def _text(flags: dict[str, Flag], name: str) -> str | None:
    flag = flags.get(name)
    return flag.values[0].text if flag and flag.values else None


def _model(result: Server, launch: Launch, flags: dict[str, Flag], source: Source, path: str | None) -> None:
    flag = flags.pop("model-path", None)
    served = flags.pop("served-model-name", None)
    word = flag.values[0] if flag and flag.values else None
    line = word.line if word else launch.line
    if path is not None:
        result.keys["path"] = (path, line)
    elif word is None:
        source.refuse(line, "names no model", "give --path /FOLDER, the model's folder on the host")
    elif word.unknown:
        _refuse_unknown(word, "--model-path", source, "--path /FOLDER")
    else:
        found = _folder(word, launch, source)
        if found is not None:
            result.keys["path"] = (found, line)
    if served:
        _known(served, source)
        result.keys["served-name"] = (served.values[0].text, served.word.line)
    elif word is not None and not word.unknown:
        # SGLang's own default, and what clients ask for today.
        result.keys["served-name"] = (word.text, line)
    name = result.keys.get("served-name", ("", 0))[0]
    result.name = str(name or (path or "").rstrip("/").rpartition("/")[2])


def _folder(word: Word, launch: Launch, source: Source) -> str | None:
    """The model's folder on the host."""
    text = word.text
    if launch.container and text.startswith("/"):
        outside = launch.container.on_host(word)
        if outside is None:
            source.refuse(
                word.line,
                f"the model's folder {text} lies in the container",
                "give --path /FOLDER, where it lies on the host",
            )
        elif outside.unknown or not outside.text.startswith("/"):
            source.refuse(
                word.line,
                f"the model's folder {text} is `{outside.text}` on the host, which depends on who calls",
                "give --path /FOLDER",
            )
        else:
            if outside.text != text:
                source.find(word.line, f"{text} is a folder of the container", f"the host's, {outside.text}, was taken")
            return outside.text
        return None
    if text.startswith("/"):
        return text
    if "://" in text:
        what = f"the model is loaded from {text} at every start, which a swap cannot rely on"
        source.refuse(word.line, what, "copy it to the host once, and give --path /FOLDER")
        return None
    local = launch.folder is not None and re.match(r"(models?|weights|checkpoints|ckpts?|data)/", text)
    if not local and _is_hub_name(text):
        folder = f"{MODELS}/{text.partition('/')[2]}"
        what = f"{text} is downloaded by its name when the server starts, which a swap cannot rely on"
        todo = f"download it once on the host: hf download {text} --local-dir {folder} (or say where it is with --path)"
        source.find(word.line, what, todo)
        return folder
    if launch.folder and launch.folder.startswith("/"):
        return posixpath.normpath(posixpath.join(launch.folder, text))
    source.refuse(word.line, f"`{text}` is a relative path, and its folder cannot be known", "give --path /FOLDER")
    return None


def _is_hub_name(text: str) -> bool:
    """Whether it names a repository of the Hugging Face hub, rather than a folder."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", text) is not None and not text.endswith((".gguf", ".json"))


def _address(result: Server, launch: Launch, flags: dict[str, Flag], source: Source) -> None:
    host, port = flags.pop("host", None), flags.pop("port", None)
    for flag in (host, port):
        if flag:
            _known(flag, source)
    number = port.values[0].text if port else "30000"
    address = host.values[0].text if host else "127.0.0.1"
    line = port.word.line if port else launch.line
    box = launch.container
    if box and not box.host_network:
        published = box.published(number)
        if published is None:
            source.find(
                box.line,
                f"port {number} of the container is not published",
                "set `host:` and `port:` to where clients shall reach it",
            )
        else:
            word = next(each for each in box.ports if each.text.removesuffix("/tcp").endswith(f":{number}"))
            if published[1] != number:
                source.find(
                    word.line, f"the container's port {number} is the host's {published[1]}", "the host's was taken"
                )
            address, number, line = published[0], published[1], word.line
            host = None
            if re.search(r"\$", address + number):
                source.refuse(word.line, f"`{word.text}` is not known", "write the port out, or give --set NAME=VALUE")
    if address.endswith("127.0.0.1") and not host and not box:
        source.find(
            launch.line,
            "without --host SGLang listens on 127.0.0.1 alone",
            "host: 127.0.0.1 was taken; set `host: 0.0.0.0` for clients of other hosts",
        )
    if not number.isdigit():
        if port and not port.values[0].unknown:
            source.refuse(line, f"--port `{number}` is no number", "write it out")
        return
    result.keys["host"] = (address, host.word.line if host else line)
    result.keys["port"] = (int(number), line)


def _engine(result: Server, launch: Launch, source: Source) -> None:
    if launch.user:
        name = launch.user.text
        if name == "root" or name.isdigit() or launch.user.unknown:
            source.find(
                launch.user.line,
                f"the server runs as `{name}`",
                "a user of its own is safer: `user:` is sglang by default, and must be able to read the model",
            )
        else:
            result.keys["user"] = (name, launch.user.line)
    if launch.container:
        image = launch.container.image or "the container"
        source.find(
            launch.container.line,
            f"SGLang comes with {image}",
            "install the same release on the host, and set `engine: python:` to its interpreter",
        )
        return
    word = launch.python
    if word is None:
        if launch.label != "flags":
            source.find(
                launch.line,
                "which Python runs SGLang depends on PATH",
                "set `engine: python:` to it (/opt/sglang/bin/python by default)",
            )
        return
    text = word.text
    if not text.startswith("/") and "/" in text and launch.folder and launch.folder.startswith("/"):
        text = posixpath.normpath(posixpath.join(launch.folder, text))
    if word.unknown or not text.startswith("/"):
        source.find(
            word.line,
            f"which Python `{word.text}` is depends on PATH",
            "set `engine: python:` to it (/opt/sglang/bin/python by default)",
        )
    else:
        result.keys["engine"] = ({"python": text}, word.line)
        if text.startswith(("/home/", "/root/")):
            source.find(
                word.line,
                f"{text} lies in a home folder, which the unit's user can hardly read",
                "install SGLang outside of home folders, e.g. /opt/sglang",
            )


def _secret(result: Server, flag: Flag, source: Source) -> None:
    word = flag.values[0]
    match = re.fullmatch(r"\$\{?([A-Za-z_]\w*)\}?", word.unknown[0]) if word.unknown else None
    name = match[1] if match else f"SGLANG_{flag.name.replace('-', '_').upper()}"
    secrets = result.keys.get("secrets", ({}, flag.word.line))[0]
    result.keys["secrets"] = ({**secrets, flag.name: {"env": name}}, flag.word.line)
    if not match:
        what = f"--{flag.name} is a secret in clear: whoever may list processes reads it"
        source.find(word.line, what, f"change it, then export {name} where you run pyinfra")
    else:
        source.find(
            word.line,
            f"--{flag.name} is read from the variable {name}",
            f"export {name} where you run pyinfra, or name a file: secrets: {{{flag.name}: {{file: PATH}}}}",
        )


def _environment(launch: Launch, source: Source) -> Iterator[tuple[str, Word]]:
    for name, word in launch.environment.items():
        if name in _ALWAYS_PASSED or _DEFAULTS.get(name) == word.text:
            continue
        problems = list(environment_problems(name, word.text or "x"))
        if any("secret" in what for what, _ in problems) or (
            not word.unknown and redact(f"{name}={word.text}") != f"{name}={word.text}"
        ):
            what = f"{name} is a secret" + ("" if word.unknown else " in clear")
            todo = "it was left out: a server of a local folder needs none; else let it read a file (HF_TOKEN_PATH)"
            source.find(word.line, what, todo if word.unknown else todo + "; change it")
            continue
        known = _listed(name, word, source) if word.unknown else word
        if known.unknown and name.endswith("_VISIBLE_DEVICES"):
            source.find(word.line, f"{name} holds {_shown(known)}, which cannot be known", "choose GPUs with `gpus:`")
            continue
        if known.unknown:
            source.find(
                word.line,
                f"{name} holds {_shown(known)}, which cannot be known",
                "it was left out; set it under `environment:` if the server needs it",
            )
            continue
        if launch.container and known.text.startswith("/") and (outside := launch.container.on_host(known)):
            known = outside
            if known.unknown or not known.text.startswith("/"):
                source.find(
                    word.line,
                    f"{name} names a folder of the container, `{known.text}` on the host",
                    "it was left out; set it under `environment:` if the server needs it",
                )
                continue
        yield name, known


def _listed(name: str, word: Word, source: Source) -> Word:
    """`X=/more:$X`: what is added to a list of folders; a unit starts with an empty one."""
    own = (f"${name}", f"${{{name}}}")
    if (name in _LISTS or name == "PATH") and set(word.unknown) <= set(own):
        parts = [part for part in word.text.split(":") if part and part not in own]
        if name == "PATH":
            parts.append(_STANDARD_PATH)
        todo = "what is added was taken alone" if name != "PATH" else "it was put before a service's own PATH"
        source.find(word.line, f"{name} adds to what the shell has", todo)
        return replace(word, text=":".join(parts), unknown=())
    return word


def _gpus(result: Server, launch: Launch, flags: dict[str, Flag], environment: dict[str, Word], source: Source) -> None:
    box = launch.container
    seen = list(box.devices) if box and box.devices else None
    line = box.line if box else launch.line
    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        word = environment.pop(name, None)
        if word is None or word.text in ("all", "void", "none") or not word.text:
            continue
        line = word.line
        wanted = [each.strip() for each in word.text.split(",") if each.strip()]
        if (
            seen is not None
            and name == "CUDA_VISIBLE_DEVICES"
            and all(each.isdigit() and int(each) < len(seen) for each in wanted)
        ):
            wanted = [seen[int(each)] for each in wanted]
        seen = wanted
    environment.pop("CUDA_DEVICE_ORDER", None)
    base, step = _text(flags, "base-gpu-id"), _text(flags, "gpu-id-step")
    needed = spelling.schedulers({name: flag.values[0].text if flag.values else True for name, flag in flags.items()})
    if (base or step) and (base or "0").isdigit() and (step or "1").isdigit():
        flag = flags.pop("base-gpu-id", None) or flags["gpu-id-step"]
        flags.pop("gpu-id-step", None)
        indices = [int(base or 0) + number * int(step or 1) for number in range(needed)]
        line = flag.word.line
        if seen is None or all(index < len(seen) for index in indices):
            seen = [seen[index] if seen else str(index) for index in indices]
            source.find(line, "--base-gpu-id and --gpu-id-step choose GPUs", f"gpus: [{', '.join(seen)}] was taken")
        else:
            source.refuse(
                line, f"--base-gpu-id asks for GPUs beyond the {len(seen)} that are visible", "correct one of them"
            )
    if seen is not None:
        if all(each.isdigit() for each in seen):
            result.keys["gpus"] = ([int(each) for each in seen], line)
        else:
            result.keys["gpus"] = (list(seen), line)
    elif box and box.count:
        result.keys["gpus"] = (box.count, line)


def _known(flag: Flag, source: Source) -> bool:
    for word in flag.values:
        if word.unknown:
            _refuse_unknown(word, f"--{flag.name}", source)
            return False
    return True


def _refuse_unknown(word: Word, flag: str, source: Source, also: str = "") -> None:
    names = [match[1] for each in word.unknown for match in [re.fullmatch(r"\$\{?(\w+)\}?", each)] if match]
    way = [also] * bool(also) + [f"--set {name}=VALUE" for name in names]
    todo = f"give {' or '.join(way)}" if way else "write the value out"
    source.refuse(word.line, f"{flag}: {_shown(word)} cannot be known", todo)


def _shown(word: Word) -> str:
    return ", ".join(f"`{each}`" for each in dict.fromkeys(word.unknown))


def _value(flag: Flag, launch: Launch, source: Source) -> Any:
    """A flag's value as YAML holds it; None if it cannot be known."""
    if not _known(flag, source):
        return None
    words = [_outside(flag, word, launch, source) for word in flag.values]
    kept = [word.text for word in words if word is not None]
    if any(redact(text) != text for text in kept):
        what = f"--{flag.name} holds a secret in clear"
        source.refuse(flag.word.line, what, "take it out and change it; a server can read a file (HF_TOKEN_PATH)")
        return None
    if len(kept) < len(words):
        return None
    if not kept:
        return True
    return kept if len(kept) > 1 else kept[0]


def _outside(flag: Flag, word: Word, launch: Launch, source: Source) -> Word | None:
    """A path of the container as the host's; a relative one as it is."""
    if re.match(r"\.{1,2}/", word.text):
        if not launch.folder or not launch.folder.startswith("/"):
            source.refuse(
                word.line,
                f"--{flag.name}: `{word.text}` is a relative path, and its folder cannot be known",
                "write the absolute path",
            )
            return None
        word = replace(word, text=posixpath.normpath(posixpath.join(launch.folder, word.text)))
    if flag.name in ("speculative-draft-model-path", "tokenizer-path") and _is_hub_name(word.text):
        what = f"--{flag.name} {word.text} is downloaded by its name when the server starts"
        source.find(
            word.line,
            what,
            f"hf download {word.text} --local-dir {MODELS}/{word.text.partition('/')[2]}, and write that folder",
        )
    box = launch.container
    if not box or not re.match(r"/[^/\s]", word.text) or word.text.startswith("/v1"):
        return word
    outside = box.on_host(word)
    if outside is None:
        source.find(
            word.line, f"--{flag.name}: {word.text} lies in the image", "copy it to the host, and correct the path"
        )
        return word
    if outside.unknown or not outside.text.startswith("/"):
        source.refuse(
            word.line,
            f"--{flag.name}: {word.text} is `{outside.text}` on the host, which depends on who calls",
            "write an absolute path into the mount",
        )
        return None
    if outside.text != word.text:
        source.find(
            word.line,
            f"--{flag.name}: {word.text} is a path of the container",
            f"the host's, {outside.text}, was taken",
        )
    return outside


def model_name(result: Server) -> str:
    """After what clients ask for; after the model's folder where that is a path."""
    name = result.name
    if name.startswith("/") and "path" in result.keys:
        name = str(result.keys["path"][0])
    parts = [part for part in name.split("/") if part]
    # Folders of a download or a container say nothing alone.
    while len(parts) > 1 and re.fullmatch(r"main|models?|weights|snapshots|latest|v?\d+|[0-9a-f]{40}", parts[-1]):
        parts.pop()
    return _slug(parts[-1]) if parts and _slug(parts[-1]) else "model"


def profile_name(result: Server) -> str:
    """After the kernels that it chooses."""
    for flag in (
        "moe-runner-backend",
        "attention-backend",
        "decode-attention-backend",
        "fp4-gemm-backend",
        "fp8-gemm-backend",
    ):
        if flag in result.flags and isinstance(result.flags[flag][0], str):
            return _slug(result.flags[flag][0]) or "imported"
    return "imported"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:40]
