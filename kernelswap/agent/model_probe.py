"""Looks at what SGLang will read of a model, without reading a weight.

Its text is given to the engine's interpreter, which runs it as the unit's user: what that user may read depends on
groups and ACLs that only the kernel knows. A question comes as JSON on standard input (see model_files.py), the answer
goes as JSON to standard output. Python 3.8, standard library.

What SGLang 0.5.23 reads: srt/model_loader/loader.py (_prepare_weights), weight_utils.py
(filter_duplicate_safetensors_files), srt/utils/hf_transformers/tokenizer.py and config.py. A safetensors file is 8
bytes with the length of a JSON header, that header with each tensor's place, and the tensors without gaps
(https://huggingface.co/docs/safetensors), so its header tells how long it must be.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import stat
import struct
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, TypeVar

THREADS = 16  # what takes time is a network's round trips
HEADER_MAX = 100_000_000  # bytes, the format's own limit
AGAIN = "download it again"

# Of each load format, the patterns of its weights; the first that finds a file counts. Others are not looked into.
PICKLES = ("*.safetensors", "*.bin", "*.pt")
SAFETENSORS = ("*.safetensors",)
WEIGHTS = {
    "auto": PICKLES,
    "bitsandbytes": PICKLES,
    "safetensors": SAFETENSORS,
    "fastsafetensors": SAFETENSORS,
    "instanttensor": SAFETENSORS,
    "runai_streamer": SAFETENSORS,
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
}
INDEXES = {
    "*.safetensors": "model.safetensors.index.json",
    "consolidated*.safetensors": "consolidated.safetensors.index.json",
    "*.bin": "pytorch_model.bin.index.json",
}
TRAINING = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")  # SGLang leaves them out
OF_NO_USE = ("*.md", "*.png", "*.jpg", "*.jpeg", "*.pdf", "LICENSE*", "*.onnx", "*.h5", "*.msgpack", "*.pth", "*.gguf")

# What SGLang and transformers parse; other JSON in the folder is anybody's.
PARSED = (
    "*config.json",
    "params.json",
    "tokenizer*.json",
    "tekken.json",
    "vocab.json",
    "*tokens*.json",
    "chat_template.json",
)

# Any of these holds a vocabulary (VOCAB_FILES_NAMES in transformers; the wider ones: models with code of their own).
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model*", "tekken.json", "*.tiktoken", "tiktoken*", "*vocab*", "spiece.model", "*.spm",
    "spm*.model", "sentencepiece*.model", "*.bpe.model",
)  # fmt: skip
WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")

T = TypeVar("T")


class Wrong(Exception):
    """What is wrong with a file, and what to do."""


class Look:
    """What was found. faults, notes: what is wrong and what to do; sizes: of the weights, in bytes by path."""

    def __init__(self) -> None:
        self.faults: List[Tuple[str, str]] = []
        self.notes: List[Tuple[str, str]] = []
        self.sizes: Dict[Path, int] = {}

    def wrong(self, what: str, todo: str) -> None:
        if (what, todo) not in self.faults:
            self.faults.append((what, todo))

    def tried(self, read: Callable[[Path], T], path: Path) -> Optional[T]:
        """What a function makes of a file; None, with the fault noted, if it is wrong."""
        try:
            return read(path)
        except Wrong as wrong:
            what, todo = wrong.args
            self.wrong(f"{path}: {what}", todo)
        return None

    # The kinds of things to look at.

    def file(self, path: Path) -> None:
        self.tried(head, path)

    def questions(self, path: Path, count: int) -> None:
        self.tried(lambda path: questions(path, count), path)

    def model(self, path: Path, load_format: str, tokenizer: bool = False, mtp: bool = False) -> None:
        if path.suffix == ".gguf":
            self.tried(gguf, path)
        elif self.entered(path):
            config = self.config(path, load_format)
            self.small_files(path)
            if tokenizer:
                self.vocabulary(path)
            names = self.weights(path, load_format) if load_format in WEIGHTS else set()
            if mtp and config and names:
                self.mtp_layer(path, config, names)

    def tokenizer(self, path: Path) -> None:
        if path.suffix == ".json":
            self.tried(json_object, path)
        elif path.suffix == ".gguf":
            self.tried(gguf, path)
        elif self.entered(path):
            self.small_files(path)
            self.vocabulary(path)

    def adapter(self, path: Path) -> None:
        if self.entered(path):
            self.tried(json_object, path / "adapter_config.json")
            files = matching(names_in(path), PICKLES)
            if not files:
                self.wrong(f"{path}: no adapter weights (adapter_model.safetensors)", AGAIN)
            for name in files:
                self.tried(self.weight_file, path / name)

    # What these have in common.

    def entered(self, path: Path) -> bool:
        try:
            next(path.iterdir(), None)
        except PermissionError:
            self.wrong(f"{blocking(path) or path}: not readable", "correct the permissions of that folder")
        except OSError as error:
            unreachable = isinstance(error, (FileNotFoundError, NotADirectoryError))
            what = "no such folder, or not reachable" if unreachable else error.strerror
            self.wrong(f"{path}: {what}", "correct the path or its permissions")
        else:
            return True
        return False

    def config(self, path: Path, load_format: str) -> Optional[Dict[str, Any]]:
        """The model's configuration; Mistral's own form has params.json instead."""
        names = ["params.json", "config.json"] if load_format == "mistral" else ["config.json", "params.json"]
        name = next((name for name in names if os.path.lexists(path / name)), "config.json")
        config = self.tried(json_object, path / name)
        if config == {}:
            self.wrong(f"{path / name}: says nothing of a model", AGAIN)
        return config

    def small_files(self, path: Path) -> None:
        """What else may be read: parsed, or only opened. Weights come later, for not all are used."""
        names = [
            name for name in names_in(path) if not name.startswith(".") and not matching([name], OF_NO_USE + PICKLES)
        ]
        names = [name for name in names if not is_folder(path / name)]
        parsed = matching(names, PARSED)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda name: self.tried(json_text if name in parsed else head, path / name), names))

    def vocabulary(self, path: Path) -> None:
        names = names_in(path)
        said = self.tried(json_object, path / "tokenizer_config.json") if "tokenizer_config.json" in names else {}
        if said is None or "auto_map" in said or said.get("tokenizer_class") in WITHOUT_VOCABULARY:
            return
        found = matching(names, VOCABULARIES)
        if not found:
            what = "no tokenizer (tokenizer.json, tokenizer.model, vocab.json with merges.txt, tekken.json, *.tiktoken)"
            self.wrong(f"{path}: {what}", "download it too, or name another one by --tokenizer-path")
        elif found == ["vocab.json"] and "merges.txt" not in names:
            self.wrong(f"{path / 'merges.txt'}: no such file, vocab.json is of no use without it", AGAIN)

    def weights(self, path: Path, load_format: str) -> Set[str]:
        """Look at each file of weights that is used; the names of all tensors."""
        index, files = weight_files(names_in(path), WEIGHTS[load_format])
        promised: Dict[str, str] = {}
        if index:
            said = self.tried(json_object, path / index)
            promised = (said or {}).get("weight_map") or {}
            if not isinstance(promised, dict) or not all(isinstance(name, str) for name in promised.values()):
                promised = {}
            if not promised:
                if said is not None:
                    self.wrong(f"{path / index}: has no weight_map", AGAIN)
                return set()
            files = sorted({*promised.values(), *matching(files, ["mtp.safetensors"])})
        if not files:
            self.wrong(f"{path}: no weights ({', '.join(WEIGHTS[load_format])})", AGAIN)
        with ThreadPoolExecutor(THREADS) as pool:
            read = pool.map(lambda name: (name, self.tried(self.weight_file, path / name)), files)
            tensors = dict(read)
        there = set().union(*filter(None, tensors.values()))
        lacking: Dict[str, List[str]] = {}
        for tensor, name in promised.items():
            if tensor not in there and tensors[name]:  # a pickle's are not known
                lacking.setdefault(name, []).append(tensor)
        for name, lost in sorted(lacking.items()):
            what = f"lacks {len(lost)} of the tensors that {index} promises, such as {lost[0]}"
            self.wrong(f"{path / name}: {what}", "download the model again, these files are of different versions")
        return there or set(promised)

    def weight_file(self, path: Path) -> Set[str]:
        """The names of its tensors, as far as its kind tells them."""
        start, self.sizes[path] = head(path)
        if os.path.lexists(f"{path}.aria2"):
            raise Wrong(f"its download has not ended, {path.name}.aria2 is there", "let it end")
        if path.suffix == ".safetensors":
            return safetensors(path)
        if start.startswith(b"PK\x03\x04") and not zipfile.is_zipfile(path):  # its directory is at its end
            raise Wrong(f"is cut off, {self.sizes[path]} bytes are there", AGAIN)
        return set()

    def mtp_layer(self, path: Path, config: Dict[str, Any], names: Set[str]) -> None:
        """Whether the layer is there with which the model drafts for itself. Models name it in many ways; of those that
        count it as one more layer, SGLang ends with "MTP speculative decoding layer 78 weights missing"."""
        inner = config.get("text_config")
        layer = (inner if isinstance(inner, dict) else config).get("num_hidden_layers")
        if not isinstance(layer, int) or any(
            re.search(rf"mtp|nextn|\blayers\.{layer}\.", name, re.I) for name in names
        ):
            return
        what = f"{path}: has no MTP layer (layers.{layer}) for --speculative-algorithm to draft with"
        known = [name for name in config.get("architectures") or [] if re.match("Deepseek|Glm4Moe|GlmMoe", str(name))]
        tell = self.wrong if known else lambda what, todo: self.notes.append((what, todo))
        tell(what, "take a checkpoint that has it, name a draft model, or give no --speculative-* flags")


def head(path: Path) -> Tuple[bytes, int]:
    """The first bytes of a file and its size. Raises Wrong if it cannot be read, or only stands for another."""
    try:
        with path.open("rb") as file:
            start, status = file.read(64), os.fstat(file.fileno())
    except OSError as error:
        raise unreadable(path, error) from None
    if start.startswith(b"version https://git-lfs"):
        raise Wrong("is a pointer of Git LFS, not the file itself", "run `git lfs pull` in that folder")
    if stat.S_ISREG(status.st_mode) and not status.st_size and path.suffix in (".safetensors", ".bin", ".model"):
        raise Wrong("is empty", AGAIN)
    return start, status.st_size


def json_text(path: Path) -> Any:
    head(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise Wrong(f"is no JSON ({error})", AGAIN) from None


def json_object(path: Path) -> Dict[str, Any]:
    found = json_text(path)
    if not isinstance(found, dict):
        raise Wrong("is no JSON object", AGAIN)
    return found


def questions(path: Path, count: int) -> None:
    """Those of verify.accuracy, which asks so many."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise Wrong(f"is no JSON lines ({error})", "correct it") from None
    if not all(isinstance(line, dict) and {"question", "answer"} <= set(line) for line in lines):
        raise Wrong("has a line without question and answer", "correct it")
    if len(lines) < count:
        raise Wrong(f"has {len(lines)} questions, verify.accuracy asks {count}", "add some, or ask fewer")


def safetensors(path: Path) -> Set[str]:
    """The names of its tensors. Raises Wrong unless the file is just as long as its header says."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(9)
            length = struct.unpack("<Q", start[:8].ljust(8, b"\0"))[0]
            if start[8:] not in (b"", b"{") or length > HEADER_MAX:
                raise Wrong("is no safetensors file", AGAIN)
            if 8 + length > size:
                raise Wrong(f"is cut off within its header, {size} bytes are there", AGAIN)
            header = json.loads(start[8:] + file.read(length - 1))
        end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise unreadable(path, error) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Wrong("has a header that cannot be read", AGAIN) from None
    whole = 8 + length + end
    if size < whole:
        raise Wrong(f"is cut off, {size} of {whole} bytes are there", AGAIN)
    if size > whole:
        raise Wrong(f"is {size - whole} bytes longer than its header says", AGAIN)
    return {name for name in header if name != "__metadata__"}


def gguf(path: Path) -> None:
    if not head(path)[0].startswith(b"GGUF"):
        raise Wrong("is no GGUF file", AGAIN)


def weight_files(names: List[str], patterns: Tuple[str, ...]) -> Tuple[str, List[str]]:
    """The index that counts, "" if none, and the files of weights that the loader finds, with those of a numbered set
    that it should find."""
    found = [pattern for pattern in patterns if matching(names, [pattern])]
    indexed = [pattern for pattern in patterns if INDEXES.get(pattern) in names]
    pattern = next(iter(found + indexed), "")
    files = matching(names, [pattern])
    if pattern in indexed:
        return INDEXES[pattern], files
    if files == ["consolidated.safetensors", "model.safetensors"]:
        files = files[1:]
    files = [name for name in files if not name.endswith(TRAINING)]
    numbered = [match for name in files if (match := re.fullmatch(r"(.*-)\d{5}-of-(\d{5})(\.\w+)", name))]
    for start, count, end in {match.groups() for match in numbered}:
        files += [f"{start}{number:05}-of-{count}{end}" for number in range(1, min(int(count), 9999) + 1)]
    return "", sorted(set(files))


def unreadable(path: Path, error: OSError) -> Wrong:
    if isinstance(error, PermissionError):
        above = blocking(path)
        return Wrong(f"not readable{f', {above} lets nobody in' if above else ''}", "correct its permissions")
    if not isinstance(error, FileNotFoundError):
        return Wrong(error.strerror or str(error), "see whether its file system is in order")
    if path.is_symlink():
        return Wrong(f"a link to nothing ({os.readlink(path)})", AGAIN)  # noqa: PTH115 - Python 3.8
    downloads = names_in(path.parent) + names_in(path.parent / ".cache/huggingface/download")
    begun = any(name.endswith(".incomplete") for name in downloads)
    return Wrong("no such file", "its download has not ended, start it again" if begun else AGAIN)


def blocking(path: Path) -> str:
    """The first folder above a path that may not be entered; "" if all may."""
    folders = list(path.parents)[::-1] + list(Path(os.path.realpath(path)).parents)[::-1]
    return next((str(folder) for folder in folders if is_folder(folder) and not os.access(folder, os.X_OK)), "")


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def names_in(path: Path) -> List[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return []


def matching(names: Iterable[str], patterns: Iterable[str]) -> List[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def main() -> None:
    wanted = json.load(sys.stdin)
    look = Look()
    for kind, path, how in wanted:
        getattr(look, kind)(Path(path), **how)
    answer = {
        "faults": look.faults,
        "notes": look.notes,
        "real": os.path.realpath(wanted[0][1]),
        "weights": sum(look.sizes.values()),
        "largest": max(look.sizes.values(), default=0),
        "headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
