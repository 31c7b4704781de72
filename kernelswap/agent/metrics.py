"""What Prometheus is told of a host: text files for node_exporter's textfile collector, each replaced whole.

They are written where METRICS_LINK leads, and nowhere where there is none. `instance` is Prometheus's own label, so an
instance of ours is `sglang_instance`. Names and units: docs/reference.md.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from kernelswap.agent import files, host
from kernelswap.agent.host import Folders
from kernelswap.ledger import Tally
from kernelswap.protocol import METRICS_LINK, Finding, HostDrift, Plan, Report

OUTCOMES = ("committed", "rolled-back", "down", "refused", "unchanged")
PREFIX = "kernelswap"
Labels = Tuple[Tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """One family. kind: gauge or counter; samples: labels -> value."""

    name: str
    kind: str
    help: str
    samples: Tuple[Tuple[Labels, float], ...]


def text(metrics: Iterable[Metric]) -> str:
    """Prometheus's text format, version 0.0.4."""
    lines: List[str] = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {_plain(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in metric.samples:
            named = ",".join(f'{name}="{_escaped(word)}"' for name, word in labels)
            lines.append(f"{metric.name}{{{named}}} {value!r}" if named else f"{metric.name} {value!r}")
    return "".join(f"{line}\n" for line in lines)


def _plain(words: str) -> str:
    return words.replace("\\", "\\\\").replace("\n", "\\n")


def _escaped(word: str) -> str:
    # Half a surrogate pair is no UTF-8, and one such label would cost the collector the whole file.
    return _plain(word.encode("utf-8", "replace").decode()).replace('"', '\\"')


def of_instance(
    instance: str, known_good: Optional[str], plan: Optional[Plan], ended: Tally, last: Optional[Report]
) -> List[Metric]:
    """What an instance serves and how its swaps ended. last: the newest of them."""
    labels: Labels = (("sglang_instance", instance),)
    release = (
        ((*labels, ("release", known_good), ("profile", plan.profile), ("model", plan.model)),)
        if known_good and plan
        else ()
    )
    found = [
        Metric(f"{PREFIX}_release_info", "gauge", "The committed release.", tuple((each, 1.0) for each in release)),
        Metric(f"{PREFIX}_swaps_total", "counter", "Swaps that have ended, by how.",
               tuple(((*labels, ("outcome", outcome)), float(ended.outcomes.get(outcome, 0))) for outcome in OUTCOMES)),
        Metric(f"{PREFIX}_clean_host_failures_total", "counter",
               "Swaps in which the host could not be proved clean before a start.", ((labels, float(ended.unclean)),)),
    ]  # fmt: skip
    if last:
        found += [
            Metric(f"{PREFIX}_last_swap_outcome", "gauge", "1 for how the last swap ended, 0 for the others.",
                   tuple(((*labels, ("outcome", name)), float(name == last.outcome)) for name in OUTCOMES)),
            Metric(f"{PREFIX}_last_swap_timestamp_seconds", "gauge", "When the last swap ended.",
                   ((labels, last.ended),)),
            Metric(f"{PREFIX}_last_swap_duration_seconds", "gauge", "How long the last swap took.",
                   ((labels, max(0.0, last.ended - last.started)),)),
        ]  # fmt: skip
    return found


def of_drift(instances: Iterable[str], findings: Sequence[Finding], at: float) -> List[Metric]:
    """What a look for drift found. at: when, epoch seconds. A finding of the whole host has an empty instance."""

    def counted(unknown: bool) -> Mapping[str, int]:
        return Counter(finding.instance for finding in findings if finding.unknown is unknown)

    names = sorted({"", *instances, *(finding.instance for finding in findings)})
    told: Dict[bool, Mapping[str, int]] = {unknown: counted(unknown) for unknown in (False, True)}
    return [
        Metric(f"{PREFIX}_drift_findings", "gauge", "Differences between the host and what was committed.",
               tuple(((("sglang_instance", name),), float(told[False].get(name, 0))) for name in names)),
        Metric(f"{PREFIX}_drift_unknown", "gauge", "What a look for drift could not tell.",
               tuple(((("sglang_instance", name),), float(told[True].get(name, 0))) for name in names)),
        Metric(f"{PREFIX}_drift_last_look_timestamp_seconds", "gauge", "When drift was looked for.", (((), at),)),
    ]  # fmt: skip


def write(folders: Folders) -> None:
    """Renew an instance's file. What stands in the way loses the metrics, and nothing else."""
    folder = _folder(folders.root)
    if folder is None:
        return
    with contextlib.suppress(OSError):
        release = host.known_good(folders)
        plan = host.plan_or_none(folders, release)
        history = host.history(folders)
        last = history[-1] if history else None
        told = of_instance(folders.instance, release, plan, host.tally(folders, history), last)
        files.write(folder / f"{PREFIX}-{folders.instance}.prom", text(told))


def write_drift(seen: HostDrift, root: Path = Path("/")) -> None:
    """Renew the file about drift. Raises OSError: whoever asked for it wants to know."""
    folder = _folder(root)
    if folder:
        instances = [state.instance for state in seen.state.instances]
        files.write(folder / f"{PREFIX}-drift.prom", text(of_drift(instances, seen.findings, time.time())))


def _folder(root: Path) -> Optional[Path]:
    link = root / METRICS_LINK.lstrip("/")
    return link if link.is_dir() else None
