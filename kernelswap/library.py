"""The models and profiles of an inventory folder: read, and put together by what each extends.

A file is checked alone here, and every fault of every file is reported at once; what several of them make together is
checked in spec.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelswap.errors import ConfigError, Fault
from kernelswap.layers import Layer, check
from kernelswap.schema import ModelFile, ProfileFile
from kernelswap.wording import nearest
from kernelswap.yamlfile import Document, read

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Library:
    """The models and profiles of an inventory folder, each as its layers: what it extends first, itself last."""

    root: Path
    models: Mapping[str, tuple[Layer, ...]]
    profiles: Mapping[str, tuple[Layer, ...]]
    extended: frozenset[str]  # "models/name" or "profiles/name" that others extend; they need not be complete

    def profile_layers(self, profile: str, model: str) -> tuple[Layer, ...]:
        """A profile's own layers, then its overrides for one model."""
        chain = self.profiles[profile]
        whole = tuple(Layer(layer.source, _without(layer.value, "models")) for layer in chain)
        return whole + tuple(
            Layer(layer.source, layer.value["models"][model], ("models", model))
            for layer in chain
            if model in layer.value.get("models", {})
        )


def load_library(root: Path) -> Library:
    """Reads `<root>/models/*.yaml` and `<root>/profiles/*.yaml`. Raises ConfigError with all their faults."""
    library, faults = read_library(root)
    if faults:
        raise ConfigError(faults)
    return library


def read_library(root: Path) -> tuple[Library, Sequence[Fault]]:
    """The models and profiles without a fault, and the faults of the others."""
    faults: list[Fault] = []
    models = _read_folder(root / "models", faults)
    profiles = _read_folder(root / "profiles", faults)
    broken: set[str] = set()
    for documents, schema in ((models, ModelFile), (profiles, ProfileFile)):
        for document in documents.values():
            found = list(document.faults)
            if document.value is not None:
                document.value = _tidy(document.value)
                found += check(schema, Layer(document, document.value))
            if found:
                broken.add(document.path)
            faults += found
    for document in profiles.values():
        faults += _unknown_models(document, models)
    extended: set[str] = set()
    chains = {
        "models": _chains("model", models, "profile", profiles, extended, faults),
        "profiles": _chains("profile", profiles, "model", models, extended, faults),
    }
    sound = {
        kind: {name: chain for name, chain in found.items() if not any(layer.where(()) in broken for layer in chain)}
        for kind, found in chains.items()
    }
    library = Library(root, sound["models"], sound["profiles"], frozenset(extended))
    return library, sorted(faults, key=_place)


def _read_folder(folder: Path, faults: list[Fault]) -> dict[str, Document]:
    if not folder.is_dir():
        faults.append(Fault(str(folder), "is not a folder", "create it; models and profiles live below the inventory"))
        return {}
    documents: dict[str, Document] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix not in (".yaml", ".yml"):
            continue
        if path.suffix == ".yml":
            faults.append(Fault(str(path), "has the ending .yml and is not read", f"rename it to {path.stem}.yaml"))
            continue
        if not NAME.fullmatch(path.stem):
            faults.append(
                Fault(str(path), "its name cannot name a release", "use lower-case letters, digits, dots and dashes")
            )
        documents[path.stem] = read(path)
    return documents


_MAPS = ("flags", "environment", "engine", "requires", "verify", "timeouts", "secrets", "drain", "hooks", "models")


def _tidy(value: dict[str, Any]) -> dict[str, Any]:
    """Without the maps that were left empty (`flags:` and nothing below it)."""
    tidy = {key: item for key, item in value.items() if not (item is None and key in _MAPS)}
    if isinstance(tidy.get("models"), dict):
        tidy["models"] = {k: _tidy(v) if isinstance(v, dict) else v or {} for k, v in tidy["models"].items()}
    return tidy


def _without(value: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def _unknown_models(document: Document, models: Mapping[str, Document]) -> Iterator[Fault]:
    overrides = (document.value or {}).get("models")
    for name in overrides if isinstance(overrides, dict) else ():
        if name not in models:
            yield Fault(document.where(("models", name)), "is not a model", nearest(name, models))


def _chains(
    kind: str,
    documents: Mapping[str, Document],
    other_kind: str,
    others: Mapping[str, Document],
    extended: set[str],
    faults: list[Fault],
) -> dict[str, tuple[Layer, ...]]:
    chains = {}
    for name in documents:
        chain = [name]
        while isinstance(parent := (documents[chain[0]].value or {}).get("extends"), str):
            where = documents[chain[0]].where(("extends",))
            if parent in chain:
                if parent == name:
                    circle = " -> ".join([*reversed(chain), parent])
                    faults.append(Fault(where, f"extends itself: {circle}", "break the circle"))
                break
            if parent not in documents:
                if len(chain) == 1:
                    todo = nearest(parent, set(documents) - {name})
                    if parent in others:
                        todo = f"it is a {other_kind}; a {kind} extends a {kind}"
                    faults.append(Fault(where, f"there is no {kind} `{parent}`", todo))
                break
            extended.add(f"{kind}s/{parent}")
            chain.insert(0, parent)
        chains[name] = tuple(Layer(documents[item], _without(documents[item].value or {}, "extends")) for item in chain)
    return chains


def _place(fault: Fault) -> tuple[str, int, str]:
    """Files by name, lines by number."""
    match = re.match(r"(.*?):([0-9]+)(?=:|$)", fault.where)
    return (match[1], int(match[2]), fault.where) if match else (fault.where, 0, "")
