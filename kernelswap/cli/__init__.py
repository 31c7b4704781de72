"""The `kernelswap` command. It only looks; pyinfra changes hosts."""

from __future__ import annotations

from importlib import import_module
from keyword import iskeyword

import click

from kernelswap import __version__

# command -> its one-line help. Its module kernelswap.cli.<command> (with a _ after a keyword) has a click command named
# `command` and is imported only when it is asked for: --help stays quick.
COMMANDS = {
    "check": "Check models, profiles and an inventory; report every fault at once.",
    "diff": "Compare two profiles, releases or running servers, flag by flag.",
    "diagnose": "Say what limits a server, from samples of its GPUs.",
    "explain": "Say why a server failed, from its log.",
    "history": "Show the swaps that hosts remember.",
    "import": "Turn an existing launch line into a model and a profile.",
    "render": "Show the unit and the command line of a server.",
    "report": "Write what happened in a swap and what was measured, as one page.",
    "status": "Show what hosts serve and whether it is what the inventory says.",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"kernelswap.cli.{cmd_name}{'_' * iskeyword(cmd_name)}").command
        assert isinstance(command, click.Command)  # noqa: S101 - a programmer's mistake, not a user's
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kernelswap")
def main() -> None:
    """Look at what Kernelswap would do and what it did. `pyinfra INVENTORY deploy.py --profile NAME` does it."""
