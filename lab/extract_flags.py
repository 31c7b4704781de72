"""Writes the flags of an installed SGLang as its own parser knows them, for kernelswap/knowledge/sglang/.

    PYTHONPATH=lab/shim HF_HUB_OFFLINE=1 ENGINE/bin/python lab/extract_flags.py kernelswap/knowledge/sglang

A flag's name is the one after which SGLang names its value; its other spellings are aliases. Left out is what is usual:
one word of any text. `json` and `json-object` are parsed at once, `json-text` when the server starts (it may be empty),
`json-or-file` may also be the name of a file.
"""

import argparse
import datetime
import json
import re
import sys
from pathlib import Path
from typing import Any

import sglang
from sglang.srt.server_args import ServerArgs

TYPES = {
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json-object",
    "str": "str",
    "nullable_str": "str",
    "parse_cuda_graph_backend_arg": "str",
    "int": "int",
    "float": "float",
    "human_readable_int": "human_readable_int",
}
JSON_HELP = r"JSON string|in json format|^JSON config|JSON content|inline JSON object"
FILE_HELP = r"file path|'@'|file in JSON"


def name_of(action: argparse.Action) -> str:
    by_value = "--" + action.dest.replace("_", "-")
    longest = [option for option in action.option_strings if option.startswith("--")]
    return (by_value if by_value in longest else longest[0]).removeprefix("--")


def _choices(action: argparse.Action) -> list[Any] | None:
    if action.choices is None:
        return None
    return sorted(action.choices) if isinstance(action.choices, set | frozenset) else list(action.choices)


def described(action: argparse.Action) -> dict[str, Any]:
    name, kind, text = name_of(action), type(action).__name__, action.help or ""
    others = [option.lstrip("-") for option in action.option_strings if option != f"--{name}"]
    negations = [other for other in others if kind == "BooleanOptionalAction" and other.startswith("no-")]
    word = TYPES.get(getattr(action.type, "__name__", "str"))
    if word is None:
        sys.exit(f"--{name} has the type {action.type!r}: say in TYPES what it takes")
    if word == "str" and (action.default == "{}" or re.search(JSON_HELP, text)) and action.choices is None:
        word = "json-or-file" if re.search(FILE_HELP, text) else "json-text"
    if kind == "LoRAPathAction":
        word = "json-or-file"
    found = {
        "aliases": [other for other in others if other not in negations],
        "negations": negations,
        "bare": action.nargs == 0,
        "type": None if word == "str" or action.nargs == 0 else word,
        "nargs": action.nargs or None,
        "choices": _choices(action),
        "default": action.default if action.default not in (argparse.SUPPRESS, False) else None,
        "required": action.required,
        "deprecated": kind.startswith("Deprecated") or text.lower().lstrip("(").startswith("deprecated"),
        "use": getattr(action, "new_flag", None),
        "error": getattr(action, "error_message", None),
    }
    return {key: value for key, value in found.items() if value not in (None, False, [], "")}


def main() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    head = {
        "version": sglang.__version__,
        "source": f"sglang {sglang.__version__}: ServerArgs.add_cli_args",
        "date": f"{datetime.date.today()}",
    }
    flags = sorted((name_of(action), described(action)) for action in parser._actions)
    lines = [f"    {json.dumps(name)}: {json.dumps(flag)}" for name, flag in flags]
    top = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    path = Path(sys.argv[1]) / f"flags-{sglang.__version__}.json"
    path.write_text("{\n" + top + '  "flags": {\n' + ",\n".join(lines) + "\n  }\n}\n")
    print(f"{path}: {len(flags)} flags")


if __name__ == "__main__":
    main()
