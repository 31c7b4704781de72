"""How a swap ended, in words: what the agent says at the end, and the history later."""

from __future__ import annotations

from typing import List

from kernelswap.protocol import Report


def headline(report: Report) -> str:
    """The end in one line."""
    release, seconds = report.request.release, f"{report.ended - report.started:.1f} s"
    if report.outcome == "committed":
        return f"committed {release} in {seconds}"
    if report.outcome == "unchanged":
        return f"unchanged: {release} serves already"
    if report.outcome == "rolled-back":
        serves = report.detail or f"{report.serving} serves again, verified"
        return f"ROLLED BACK from {release} in {seconds}; {serves}"
    if report.outcome == "refused":
        return f"REFUSED {release}, nothing was touched"
    return f"DOWN after {seconds}, from {release}: {report.detail}"


def details(report: Report) -> List[str]:
    """Of a swap that failed: where, at which step, why, the evidence, and the next command to type; a line each.

    Where there are several faults, each has its own line below the cause, with its way out.
    """
    cause, request = report.cause, report.request
    if cause is None:
        return []
    host = f"host {request.host}, " if request.host else ""
    step = f", step {report.failed_step}" if report.failed_step else ""
    why = [f"cause: {cause.what}", f"try: {what_to_try(report)}"]
    if cause.faults:
        why = [f"cause: {cause.brief}:", *(f"  {fault}" for fault in cause.faults)]
    return [
        f"where: {host}instance {request.instance}{step}",
        *why,
        f"see: {cause.where}",
        f"evidence: {report.evidence}",
        f"next: {next_command(report)}",
    ]


def what_to_try(report: Report) -> str:
    """What helps, whether the same release may be tried again as it is, and what that takes; "" if nothing failed."""
    cause = report.cause
    if cause is None:
        return ""
    again = "" if report.outcome == "refused" else f"; {cause.again}"
    barred = report.bars and " --force" not in report.request.command
    return f"{cause.todo}{again}{'; it is barred: change the profile, or add --force' if barred else ''}"


def next_command(report: Report) -> str:
    """What to type once that is done."""
    return report.request.command or "the same command again"


def text(report: Report) -> str:
    """All of it, a line each."""
    return "\n  ".join([headline(report), *details(report)])
