from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.connectors.util import make_unix_command

from kernelswap import root


def test_what_goes_through_standard_input_is_not_shown() -> None:
    hidden = root.Unshown("opensesame\n")
    assert "opensesame" not in f"{[hidden]} {hidden!r}"
    assert hidden.encode() == b"opensesame\n"


def test_pyinfra_runs_commands_in_the_shell_that_sudo_starts() -> None:
    command = make_unix_command(StringCommand("echo", "'a b'"), _sudo=False, _shell_executable=root.SUDO)
    assert command.get_raw_value() == "sudo -S -k -p '' -H sh -c 'echo '\"'\"'a b'\"'\"''"
