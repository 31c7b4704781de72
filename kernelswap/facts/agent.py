"""Questions to the agent of a host, each one remote command: by the installed agent, or by one that comes along."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from pyinfra import logger
from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.host import Host

from kernelswap import bundle, protocol, root
from kernelswap.protocol import AGENT_PATH, PYTHON

ALONE = f"{PYTHON} -IS"  # the agent brings all that it needs: nothing of the host's is looked for
NEEDS_PYTHON = f"[ -x {PYTHON} ] || {{ echo 'kernelswap needs {PYTHON} on the host' >&2; exit 1; }}"
# An agent that fails here is replaced by ours, so what it has to say is not worth an alarm.
INSTALLED = f"{NEEDS_PYTHON}; [ ! -f {AGENT_PATH} ] || {ALONE} {AGENT_PATH} {{}} 2>/dev/null || :"
CARRIED = (
    f'{NEEDS_PYTHON}; t=$(mktemp -d) && trap \'rm -rf "$t"\' EXIT && base64 -d | gzip -d >"$t/agent.pyz" '
    f'&& {ALONE} "$t/agent.pyz" {{}}'
)
T = TypeVar("T")


class AgentFact(FactBase[T | None], Generic[T]):
    """What the host's own agent answers; None if it has none, or one that does not answer as ours does.

    With `script` CARRIED it is an agent that comes along on standard input and leaves nothing behind.
    """

    script = INSTALLED
    word: str
    answer: type[T]

    def asking(self, question: Mapping[str, Any]) -> StringCommand:
        before, after = self.script.split("{}")
        return StringCommand(f"{before}{self.word} ", QuoteString(json.dumps(question)), after, _separator="")

    def process(self, output: Iterable[str]) -> T | None:
        lines = [line for line in output if line.startswith("{")]
        try:
            return protocol.decode(self.answer, lines[-1]) if lines else None
        except ValueError:
            return None


def ask(
    host: Host,
    fact: type[AgentFact[T]],
    carried: type[AgentFact[T]],
    question: Mapping[str, Any],
    timeout: int | None = None,
) -> T | None:
    """The answer. None if the host could not be read: it is then marked as failed, and pyinfra has printed why."""
    try:
        return _ask(host, fact, carried, {**question, **({"_timeout": timeout} if timeout else {})})
    except EOFError:  # pyinfra asks for a password that sudo wants, and nobody is there to type it
        host.log_styled("sudo asks for a password: set _sudo_password", fg="red", log_func=logger.error)
        give_up(host)
        return None


def _ask(host: Host, fact: type[AgentFact[T]], carried: type[AgentFact[T]], question: Mapping[str, Any]) -> T | None:
    by = root.arguments(host)
    answer: T | None = host.get_fact(fact, **question, **by)
    if answer is not None or host in host.state.failed_hosts:
        return answer
    by["_stdin"] = [*by.get("_stdin", ()), root.Unshown(bundle.build().packed)]
    return host.get_fact(carried, **question, **by)


def give_up(host: Host) -> None:
    """Fail this host at once, as pyinfra does for a fact that fails: it counts for --fail-percent and the exit code."""
    try:
        host.state.fail_hosts({host})  # type: ignore[no-untyped-call]
    except EOFError:
        # Without -y pyinfra asks whether to go on with the other hosts. With nobody there to answer, a --dry run
        # still has its plan to show.
        return
