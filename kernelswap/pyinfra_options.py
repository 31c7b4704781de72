"""Kernelswap's own options of the `pyinfra` command: `pyinfra INVENTORY deploy.py --profile trtllm`.

pyinfra has no hook for options. It patches the standard library with gevent first of all, and gevent then calls every
entry point in `gevent.plugins.monkey.did_patch_all`; `install` is ours. Each option becomes `--data`, so that nothing
in a deploy depends on this module: `--data profile=trtllm` does the same where it could not be installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPTIONS = {
    "profile": "Kernelswap: the profile to serve, instead of each host's declared one.",
    "rollback": "Kernelswap: go back to the commit before the current one.",
    "reason": "Kernelswap: why; kept in each host's history.",
    "force": "Kernelswap: try a release again that failed by its own fault.",
    "adopt": "Kernelswap: take over servers that no systemd unit owns.",
    "verify": "Kernelswap: quick (one short run, no graded questions) or full, instead of what the model declares.",
}
FLAGS = frozenset({"rollback", "force", "adopt"})
METAVARS = {"profile": "NAME", "reason": "TEXT", "verify": "quick|full"}


def install(_event: object) -> None:
    """Add the options, if it is pyinfra's command that has just patched the library."""
    if "pyinfra_cli" not in sys.modules:
        return
    try:
        from pyinfra_cli.cli import cli  # type: ignore[import-untyped]
    except ImportError:
        return
    extend(cli)


def extend(command: Any) -> None:
    """Add the options to a click command that takes `--data`; again is nothing."""
    import click

    known = {param.name for param in command.params}
    if command.callback is None or "data" not in known or known & OPTIONS.keys():
        return
    for name, help_text in OPTIONS.items():
        is_flag = name in FLAGS
        option = click.Option(
            [f"--{name}"],
            is_flag=is_flag,
            default=False if is_flag else None,
            metavar=METAVARS.get(name),
            help=help_text,
        )
        command.params.append(option)
    command.callback = _as_data(command.callback)


def _as_data(callback: Callable[..., Any]) -> Callable[..., Any]:
    import click

    def wrapped(*args: Any, data: tuple[str, ...] = (), **kwargs: Any) -> Any:
        asked = {name: kwargs.pop(name, None) for name in OPTIONS}
        if asked["profile"] is not None and asked["rollback"]:
            raise click.UsageError("--profile and --rollback are two goals; give one")
        inventory = str(kwargs.get("inventory") or "")
        if inventory.endswith(".py") and not Path(inventory).is_file():
            # pyinfra takes it for a host's name, finds none, does nothing and ends well.
            raise click.UsageError(f"{inventory}: no such inventory file; correct its path")
        # As JSON, because pyinfra reads the values of --data as JSON where it can: a profile may be named 8.
        ours = tuple(f"{name}={json.dumps(value)}" for name, value in asked.items() if value not in (None, False))
        try:
            return callback(*args, data=(*data, *ours), **kwargs)
        except Exception as error:
            if not isinstance(getattr(error, "exception", None), EOFError):
                raise
            what = "pyinfra asks whether to go on, and nobody is here to answer"
            raise click.ClickException(f"{what}: add -y; with --dry it changes nothing all the same") from None

    return wrapped
