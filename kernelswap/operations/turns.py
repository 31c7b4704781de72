"""Whose turn it is in a rollout, who has ended how, and what happens when it stops.

pyinfra runs the swap operation on all hosts side by side (by default), host by host (`--serial`), in batches
(`--parallel`) or each host for itself (`--no-wait`), and hears of a failed host only when the operation is over. So
each host waits here for the waves before its own, and asks here whether the rollout goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gevent  # type: ignore[import-untyped]
from gevent.pool import Pool  # type: ignore[import-untyped]
from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import BaseStateCallback, State
from pyinfra.context import ctx_host

from kernelswap.host_names import listed, many, natural
from kernelswap.rollout import Rollout, again

POLL = 0.25  # seconds
PATIENCE = 5.0  # seconds without any host of an earlier wave at work: pyinfra then goes through them in another order

COMMITTED, FAILED, LOST, NOT_ATTEMPTED = "committed", "failed", "lost", "not attempted"
REVERTED, NOT_REVERTED = "reverted", "not reverted"


@dataclass(frozen=True)
class End:
    """How a host's part has ended. why: in words, of all but a commit. back: swaps back what was committed, and tells
    whether that went well; None where there is nothing to go back to."""

    how: str
    why: str = ""
    back: Callable[[str], bool] | None = None


def _unless_failed(end: End, how: str) -> str:
    """One of several servers of a host may have failed after others were committed."""
    return how if end.how == COMMITTED else end.how


@dataclass(eq=False)
class Turns:
    """A rollout under way.

    waves: of hosts that swap; the rest of `hosts` have nothing to swap. failed: hosts that failed before it began, and
    why; ignored: the same of hosts that count for nothing. words: the command that was typed.
    """

    state: State
    rollout: Rollout
    hosts: Sequence[Host]
    waves: Sequence[Sequence[str]]
    failed: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()
    ends: dict[str, End] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    stopped: str = ""  # why; "" while the rollout goes on
    opened: set[int] = field(default_factory=set)
    last_end: float = 0.0  # by time.monotonic

    def __post_init__(self) -> None:
        self.wave_of = {name: number for number, wave in enumerate(self.waves) for name in wave}
        self.by_name = {host.name: host for host in self.hosts}

    def attach(self) -> None:
        """Let pyinfra go through its hosts in the order of the waves, and tell us of failures and of the end."""
        order = [name for wave in self.waves for name in wave]
        active = InOrder(self.state.active_hosts, order, self.state)
        self.state.active_hosts = active
        self.state.add_callback_handler(_Listener(self, active))  # type: ignore[no-untyped-call]

    def wait(self, host: Host) -> str:
        """Returns when it is the host's turn: "", or why it must not swap any more."""
        wave = self.wave_of[host.name]
        before = [self.by_name[name] for earlier in self.waves[:wave] for name in earlier]
        idle = 0.0
        if host.name in self.ends:  # --retry
            return "its turn is over; another try is another run"
        self.react()
        while not self.stopped:
            if all(map(self._is_over, before)):
                if self._opens(wave):
                    self.begun.add(host.name)
                    return ""
            elif any(each.executing_op_hash for each in before if not self._is_over(each)):
                idle = 0.0
            elif (idle := idle + POLL) > PATIENCE:
                left = [each.name for each in before if not self._is_over(each)]
                return self._skip(host, f"{listed(left)} of an earlier wave had no turn yet")
            gevent.sleep(POLL)
        return self._skip(host, "the rollout has stopped")

    def _skip(self, host: Host, why: str) -> str:
        self.ends[host.name] = End(NOT_ATTEMPTED, why)
        self.react()
        return why

    def _opens(self, wave: int) -> bool:
        """Whether the pause before a wave is over; all waves before it are."""
        if wave in self.opened:
            return True
        if self.last_end and time.monotonic() < self.last_end + self.rollout.pause:
            return False
        self.opened.add(wave)
        if len(self.wave_of) > 1:
            logger.info(f"--> Wave {wave + 1} of {len(self.waves)}: {', '.join(self.waves[wave])}")
        return True

    def end(self, host: Host, end: End) -> None:
        self.ends[host.name] = end
        self.last_end = time.monotonic()
        self.react()

    def react(self) -> None:
        """Whenever a host has failed or ended: stop the rollout if it must, and then take back what is to be."""
        if not self._stops() or self.rollout.on_stop != "revert":
            return
        todo = {name: end for name, end in self.ends.items() if end.back}
        self.ends |= {
            name: replace(end, how=_unless_failed(end, NOT_REVERTED), back=None) for name, end in todo.items()
        }
        pool = Pool(self.state.config.PARALLEL)
        for name, end in todo.items():
            pool.spawn(self._take_back, self.by_name[name], end)
        pool.join()

    def _take_back(self, host: Host, end: End) -> None:
        with ctx_host.use(host):
            well = bool(end.back and end.back(f"the rollout has stopped: {self.stopped}"))
        how = _unless_failed(end, REVERTED if well else NOT_REVERTED)
        what = "" if how == REVERTED else f"what it had committed went back{'' if well else ' NOT, see above'}"
        self.ends[host.name] = End(how, "; ".join(filter(None, (end.why, what))))

    def _stops(self) -> bool:
        if not self.stopped:
            failed = self.failures()
            self.stopped = self.rollout.stop(failed) or self._fail_percent(failed)
            if self.stopped and len(self.hosts) > 1:
                logger.error(f"--> The rollout stops: {self.stopped}")
        return bool(self.stopped)

    def _fail_percent(self, failed: Collection[str]) -> str:
        """--fail-percent, which pyinfra itself looks at between operations only. Without -y it asks instead."""
        most = self.state.config.FAIL_PERCENT
        share = 100 * len(failed) / max(1, len(self.hosts))
        if most is None or self.state.should_raise_failed_hosts or share <= most:
            return ""
        return f"{share:.0f}% of the hosts failed ({listed(failed)}), and --fail-percent is {most}"

    def close(self) -> None:
        """The run is over; where it was cut short, no host may begin any more."""
        if not self.stopped and not all(name in self.ends for name in self.wave_of):
            self.stopped = "the run has ended before its time"

    def failures(self) -> dict[str, str]:
        """The hosts that count as failed, and why."""
        ends = {name: end.why for name, end in self.ends.items() if end.how in (FAILED, LOST)}
        others = {host.name: "an operation before its swap failed" for host in self.hosts if self._dropped(host)}
        return {**others, **self.failed, **ends}

    def _dropped(self, host: Host) -> bool:
        """Whether pyinfra has given it up without our doing."""
        if host.name in self.ends or host.name in self.ignored:
            return False
        return host in self.state.failed_hosts or self.state.results[host].error_ops > 0

    def _is_over(self, host: Host) -> bool:
        return host.name in self.ends or self._dropped(host)

    def summary(self) -> Iterator[str]:
        """What is to be known of hosts that did not end on their goal, and what to type next; nothing if all did.

        A host alone has told it itself, unless it is still at work.
        """
        failures = self.failures()
        open_ = [name for name in self.wave_of if name not in self.ends and name not in failures]
        running = [name for name in open_ if name in self.begun]
        waiting = [*(name for name in open_ if name not in self.begun), *self._that(NOT_ATTEMPTED)]
        alone = len(self.hosts) == 1
        if not (open_ or (not alone and (failures or self.ignored or self.stopped))):
            return
        yield f"--> The rollout has stopped: {self.stopped}" if self.stopped else "--> Not every host is on its goal:"
        reverts = self.stopped and self.rollout.on_stop == "revert"
        stay = "committed, with nothing to go back to" if reverts else "committed"
        yield from self._row(stay, self._that(COMMITTED))
        yield from self._row("went back", self._that(REVERTED))
        for name in self._that(NOT_REVERTED):
            yield f"NOT BACK: {name}: {self.ends[name].why}"
        for name in sorted(failures, key=natural):
            yield f"failed: {name}: {failures[name]}"
        for name, why in self.ignored.items():
            yield f"unreachable: {name}: {why}"
        yield from self._row("still under way on the host", running)
        yield from self._row("not attempted", waiting)
        more = {*running, *waiting, *self._that(LOST), *self._that(REVERTED)}
        if more:
            yield f"to go on: {again(self.words, [name for name in self.wave_of if name in more])}"
        if failures:
            yield "failed hosts: correct the cause first; a release that is barred on a host needs a change, or --force"

    def _that(self, how: str) -> list[str]:
        return [name for name in self.wave_of if name in self.ends and self.ends[name].how == how]

    def _row(self, what: str, names: Sequence[str]) -> Iterator[str]:
        if names:
            yield f"{what}: {many(len(names), 'host')}: {', '.join(names)}"


class InOrder(set[Host]):
    """pyinfra's active hosts, gone through in the order of the waves, so that who is started first is whose turn is
    first. While an operation runs, without the hosts that it has nothing for: each would only be called skipped."""

    def __init__(self, hosts: Collection[Host], order: Sequence[str], state: State) -> None:
        super().__init__(hosts)
        self.rank = {name: number for number, name in enumerate(order)}
        self.state = state
        self.operation: str | None = None

    def __iter__(self) -> Iterator[Host]:
        wanted = [h for h in super().__iter__() if self.operation is None or self.operation in self.state.ops[h]]
        return iter(sorted(wanted, key=lambda host: self.rank.get(host.name, len(self.rank))))


class _Listener(BaseStateCallback):
    """Called by pyinfra with its state first."""

    def __init__(self, turns: Turns, active: InOrder) -> None:
        self.turns = turns
        self.active = active
        self.told = False

    def operation_start(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        self.active.operation = op_hash

    def operation_end(self, state: State, op_hash: str) -> None:  # type: ignore[override]
        self.active.operation = None

    def operation_host_error(self, state: State, host: Host, *_: Any) -> None:  # type: ignore[override]
        if state.results[host].error_ops:
            state.failed_hosts.add(host)  # with --no-wait pyinfra forgets it, and ends with exit code 0
        self.turns.react()

    def host_disconnect(self, state: State, host: Host) -> None:  # type: ignore[override]
        if state.is_executing and not self.told:
            self.told = True
            self.turns.close()
            for line in self.turns.summary():
                logger.warning(line)
