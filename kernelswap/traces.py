"""What was sampled of GPUs and of the server, and what the benchmark said, read from files of many makers.

GPU samples come as CSV: our own, that of `nvidia-smi --query-gpu ... --format=csv` and of `nvidia-smi dmon`, or any
whose columns have names that knowledge/diagnosis.json knows. What is not known is None, never 0. Both the controller
and the agent import this module.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from kernelswap.agent import knowledge

# The columns of gpu.csv are nvidia-smi's where it has one, so that whoever reads its files reads ours.
GPU_COLUMNS = {
    "time": "time",
    "phase": "phase",
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "utilization": "utilization.gpu [%]",
    "memory_utilization": "utilization.memory [%]",
    "power": "power.draw [W]",
    "power_limit": "enforced.power.limit [W]",
    "sm_clock": "clocks.sm [MHz]",
    "sm_clock_max": "clocks.max.sm [MHz]",
    "memory_clock": "clocks.mem [MHz]",
    "memory_clock_max": "clocks.max.mem [MHz]",
    "reasons": "clocks_event_reasons.active",
    "memory_used": "memory.used [MiB]",
    "memory_total": "memory.total [MiB]",
    "pcie_rx": "pcie.rx [MB/s]",
    "pcie_tx": "pcie.tx [MB/s]",
    "pcie_gen": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "temperature": "temperature.gpu",
}
SERVER_COLUMNS = (
    "time", "phase", "running", "queued", "token_usage", "cache_hit_rate", "gen_throughput", "spec_accept_length",
)  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One GPU at one moment. gpu: what tells it from the others, its index or UUID.

    time: seconds, of the epoch or of the file's own beginning. Utilisation in %, power in W, clocks in MHz, memory in
    MiB, PCIe in MB/s, temperature in degrees Celsius; reasons: NVML's bits of why the clocks are not higher.
    """

    time: float
    gpu: str
    phase: str = ""
    name: str = ""
    utilization: Optional[float] = None
    memory_utilization: Optional[float] = None
    power: Optional[float] = None
    power_limit: Optional[float] = None
    sm_clock: Optional[float] = None
    sm_clock_max: Optional[float] = None
    memory_clock: Optional[float] = None
    memory_clock_max: Optional[float] = None
    reasons: Optional[int] = None
    memory_used: Optional[float] = None
    memory_total: Optional[float] = None
    pcie_rx: Optional[float] = None
    pcie_tx: Optional[float] = None
    pcie_gen: Optional[float] = None
    pcie_width: Optional[float] = None
    temperature: Optional[float] = None


@dataclass(frozen=True)
class ServerSample:
    """SGLang's own counters at one moment. token_usage, cache_hit_rate: shares; gen_throughput: tokens per second."""

    time: float
    phase: str = ""
    running: Optional[float] = None
    queued: Optional[float] = None
    token_usage: Optional[float] = None
    cache_hit_rate: Optional[float] = None
    gen_throughput: Optional[float] = None
    spec_accept_length: Optional[float] = None


@dataclass(frozen=True)
class Bench:
    """What a run of the benchmark says, as far as it helps to read the GPUs.

    concurrency: requests at once; requests: asked for; completed: of them; tokens: of all requests; ttft, itl, e2e:
    medians in ms; accept_length: tokens per step of speculative decoding; started, ended: seconds of the epoch.
    """

    output_tok_s: Optional[float] = None
    concurrency: Optional[float] = None
    requests: Optional[float] = None
    completed: Optional[float] = None
    input_tokens: Optional[float] = None
    output_tokens: Optional[float] = None
    ttft: Optional[float] = None
    itl: Optional[float] = None
    e2e: Optional[float] = None
    accept_length: Optional[float] = None
    phase: str = ""
    started: Optional[float] = None
    ended: Optional[float] = None


@dataclass(frozen=True)
class Trace:
    """What a file of samples holds. server: where the same file has the server's counters. notes: what is wrong with
    the file and what was made of it, a line each."""

    samples: Tuple[Sample, ...] = ()
    server: Tuple[ServerSample, ...] = ()
    notes: Tuple[str, ...] = ()


class Unreadable(ValueError):
    """The file holds nothing of what it should; the text says what is missing."""


def read_gpus(text: str) -> Trace:
    """The samples of a CSV file. Raises Unreadable where no column is known, or no row can be read."""
    rows = _rows(text)
    header = next(rows, None)
    columns = _columns(header or [])
    if not set(columns) & _MEASURES:
        found = ", ".join(header or []) or "an empty file"
        raise Unreadable(
            f"no column of a GPU's utilisation, power or clocks: {found[:200]}: a first line must name them, "
            "as that of `nvidia-smi --format=csv` without `noheader`"
        )
    table = [row for row in rows if row != header]
    cells = {field: [row[at] if at < len(row) else "" for row in table] for field, (at, _) in columns.items()}
    values = {field: _numbers(field, columns[field][1], cells[field]) for field in cells if field not in _WORDS}
    values["reasons"] = _all_reasons(header or [], table, cells.get("reasons"))
    times = _times(cells.get("time"), cells.get("index") or cells.get("uuid"), len(table))
    samples: List[Sample] = []
    server: Dict[float, ServerSample] = {}
    for number, at in enumerate(times):
        row = {field: column[number] for field, column in values.items()}
        if at is None or all(value is None for value in row.values()):
            continue
        words = {field: cells[field][number].strip() for field in _WORDS if field in cells}
        gpu = words.get("index") or words.get("uuid") or "0"
        seen = {field: row.pop(field, None) for field in ("running", "queued", "token_usage", "gen_throughput")}
        phase = words.get("phase", "")
        if any(value is not None for value in seen.values()):
            server[at] = ServerSample(at, phase, **seen)
        samples.append(Sample(at, gpu, phase, words.get("name", ""), **row))  # type: ignore[arg-type]
    if not table:
        raise Unreadable("a header and no row below it: did the sampler run?")
    if all(at is None for at in times):
        raise Unreadable(f"no time can be read, as {cells['time'][0][:40]!r}: seconds or ISO 8601 are")
    if not samples:
        raise Unreadable(f"{len(table)} rows and no number in them, as {', '.join(table[0])[:200]}: sample again")
    return Trace(tuple(samples), tuple(server.values()), tuple(_notes(columns, cells, samples, len(table))))


def read_server(text: str) -> Tuple[ServerSample, ...]:
    """The samples of a metrics.csv. Raises Unreadable."""
    rows = _rows(text)
    header = next(rows, [])
    known = {field: at for field, (at, _) in _columns(header).items()}
    where = {name: header.index(name) if name in header else known.get(name) for name in SERVER_COLUMNS}
    if all(where[name] is None for name in SERVER_COLUMNS[2:]):
        raise Unreadable(f"none of the columns {', '.join(SERVER_COLUMNS[2:])}")
    found = []
    for row in rows:
        named = {name: row[at] for name, at in where.items() if at is not None and at < len(row)}
        at = _time(named.get("time", ""))
        values = {name: _number(named.get(name, "")) for name in SERVER_COLUMNS[2:]}
        if at is not None:
            found.append(ServerSample(at, named.get("phase", ""), **values))
    return tuple(found)


def read_bench(text: str) -> Tuple[Bench, ...]:
    """The runs that SGLang's benchmark wrote, one JSON object a line or one for the whole file; lines that are none
    are left out. Raises Unreadable if no line is one."""
    found = [_bench(item) for item in _objects(text) if isinstance(item, dict)]
    runs = tuple(run for run in found if run != Bench())
    if text.strip() and not runs:
        raise Unreadable("no line is a result of the benchmark: a JSON object with `output_throughput`")
    return runs


def _objects(text: str) -> Iterator[Any]:
    try:
        whole = _parsed(text)
        yield from whole if isinstance(whole, list) else [whole]
        return
    except (ValueError, RecursionError):
        pass
    for line in text.splitlines():
        try:
            yield _parsed(line)
        except (ValueError, RecursionError):
            continue


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=float)  # an integer that no float holds is infinite


def _bench(values: Dict[str, Any]) -> Bench:
    def first(*names: str) -> Optional[float]:
        for name in names:
            value = values.get(name)
            if isinstance(value, float) and 0 <= value < math.inf:
                return value
        return None

    return Bench(
        output_tok_s=first("output_throughput", "output_tok_s", "output_token_throughput"),
        concurrency=first("max_concurrency", "concurrency"),
        requests=first("num_prompts", "requests"),
        completed=first("completed"),
        input_tokens=first("total_input_tokens", "total_input"),
        output_tokens=first("total_output_tokens", "total_output"),
        ttft=first("median_ttft_ms", "mean_ttft_ms"),
        itl=first("median_itl_ms", "mean_itl_ms", "median_tpot_ms"),
        e2e=first("median_e2e_latency_ms", "mean_e2e_latency_ms", "median_e2el_ms"),
        accept_length=first("accept_length"),
        phase=str(values.get("phase") or ""),
        started=first("started"),
        ended=first("ended"),
    )


# Reading a table of any maker.

_MEASURES = {"utilization", "power", "sm_clock", "reasons"}
_WORDS = ("time", "phase", "index", "uuid", "name")
_UNIT = re.compile(r"[\[(]([^\])]*)[\])]")
_FACTORS = {  # what a unit is of the one that we use
    "power": {"mw": 1e-3, "kw": 1e3},
    "power_limit": {"mw": 1e-3, "kw": 1e3},
    "memory_used": {"b": 2**-20, "bytes": 2**-20, "kib": 2**-10, "gib": 2**10, "gb": 1e9 / 2**20, "mb": 1e6 / 2**20},
    "memory_total": {"b": 2**-20, "bytes": 2**-20, "kib": 2**-10, "gib": 2**10, "gb": 1e9 / 2**20, "mb": 1e6 / 2**20},
    "pcie_rx": {"b/s": 1e-6, "kb/s": 1e-3, "kib/s": 1.024e-3, "mib/s": 1.048576, "gb/s": 1e3, "gib/s": 1073.741824},
    "pcie_tx": {"b/s": 1e-6, "kb/s": 1e-3, "kib/s": 1.024e-3, "mib/s": 1.048576, "gb/s": 1e3, "gib/s": 1073.741824},
    "sm_clock": {"ghz": 1e3, "hz": 1e-6},
    "memory_clock": {"ghz": 1e3, "hz": 1e-6},
    "sm_clock_max": {"ghz": 1e3, "hz": 1e-6},
    "memory_clock_max": {"ghz": 1e3, "hz": 1e-6},
}
# Where no unit is given: (a median above this, is in a smaller unit by this factor). No PCIe link carries 200 GB/s.
_TOO_MUCH = {
    "power": (5e3, 1e-3),
    "power_limit": (5e3, 1e-3),
    "memory_used": (1e8, 2**-20),
    "memory_total": (1e8, 2**-20),
    "pcie_rx": (2e5, 1e-3),
    "pcie_tx": (2e5, 1e-3),
}


def _rows(text: str) -> Iterator[List[str]]:
    """The cells of each line, whatever parts them; comments are left out, but for one that is the header."""
    lines = [line for line in text.lstrip("\ufeff").splitlines() if line.strip()]
    named = [line for line in lines if not line.startswith("#")]
    # dmon's header begins with #, and so does its second line, of units.
    commented = next((line[1:] for line in lines if line.startswith("#") and len(_columns(_split(line[1:]))) > 2), None)
    # What a shell or nvidia-smi says before its table is no header.
    start = next((at for at, line in enumerate(named[:20]) if set(_columns(_split(line))) & _MEASURES), 0)
    lines = [commented, *named] if commented else named[start:]
    mark = _delimiter(lines[0]) if lines else ""
    for line in lines:
        yield _split(line, mark)


def _delimiter(line: str) -> str:
    return max(",;\t|", key=line.count) if any(mark in line for mark in ",;\t|") else " "


def _split(line: str, mark: str = "") -> List[str]:
    mark = mark or _delimiter(line)
    words = line.split() if mark == " " else next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])
    if mark not in ", ":  # a decimal comma
        words = [re.sub(r"(?<=\d),(?=\d+\s*\D*$)", ".", word) for word in words]
    return [word.strip() for word in words]


@lru_cache(maxsize=1)
def _aliases() -> Dict[str, List[str]]:
    """What people call each field, the likeliest first."""
    names: Dict[str, List[str]] = json.loads(knowledge.read("diagnosis.json"))["columns"]["names"]
    return names


def _columns(header: Sequence[str]) -> Dict[str, Tuple[int, str]]:
    """Where each field that is known stands, and in which unit; of several columns for one, that of the first name."""
    names = [_key(cell) for cell in header]
    units = [match[1].strip().lower() if match else "" for match in map(_UNIT.search, header)]
    whole = {name: at for at, name in reversed(list(enumerate(names)))}
    bare = {_TAIL.sub("", name): at for at, name in reversed(list(enumerate(names)))}
    found: Dict[str, Tuple[int, str]] = {}
    for field, aliases in _aliases().items():
        at = next((where[alias] for alias in aliases for where in (whole, bare) if alias in where), None)
        if at is not None:
            found[field] = (at, units[at] or _unit_in(names[at]))
    return found


def _key(cell: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", _UNIT.sub("", cell).lower()).strip("_")


_TAIL = re.compile(r"_(kb|mb|gb|b)_?(?:ps|s)$|_(mw|w|gib|mib|kib|bytes|mhz|ghz|pct|percent|c)$")


def _unit_in(name: str) -> str:
    """The unit that a name ends with: pcie_rx_kb_s, power_mw."""
    tail = _TAIL.search(name)
    return "" if not tail else f"{tail[1]}/s" if tail[1] else tail[2]


_NUMBER = re.compile(r"^[-+]?(?:0x[0-9a-f]+|[0-9]*\.?[0-9]+(?:e[-+]?[0-9]+)?)\s*([%a-z/]*)$", re.IGNORECASE)


@lru_cache(maxsize=2**16)
def _number(cell: str) -> Optional[float]:
    """The number of a cell, with or without its unit; None for what is none, as `[N/A]`."""
    match = _NUMBER.match(cell.strip())
    if not match:
        return None
    text = cell.strip()[: match.start(1)].strip() if match[1] else cell.strip()
    value = float(int(text, 16)) if text.lower().startswith("0x") else float(text)
    return value if math.isfinite(value) else None


def _numbers(field: str, unit: str, cells: Sequence[str]) -> List[Optional[float]]:
    values = [_number(cell) for cell in cells]
    known = [value for value in values if value is not None]
    in_cell = next((match[1].lower() for match in map(_NUMBER.match, (cell.strip() for cell in cells)) if match), "")
    factor = _FACTORS.get(field, {}).get(unit or in_cell, 1.0)
    limit, smaller = _TOO_MUCH.get(field, (math.inf, 1.0))
    if factor == 1.0 and not (unit or in_cell) and known and statistics.median(known) > limit:
        factor = smaller
    # A share instead of a percentage: nobody samples a GPU that is 0.37 % busy and never more than 1 %.
    if field.endswith("utilization") and known and max(known) <= 1 and any(value % 1 for value in known):
        factor = 100.0
    # What cannot be, as -1 W or 4294967295 %, is how some say that they do not know.
    most = 110 if field.endswith("utilization") else 1e15
    return [None if value is None or not 0 <= value * factor <= most else value * factor for value in values]


def _all_reasons(header: Sequence[str], table: Sequence[Sequence[str]], cells: Optional[Sequence[str]]) -> List[Any]:
    """The bits of each row: from one column of bits or words, or from one column for each reason."""
    names = _reason_names()
    if cells is not None:
        return [_reasons(cell, names) for cell in cells]
    apart = {}
    for at, cell in enumerate(header):
        key = re.sub(r"^clocks_(?:event|throttle)_reasons_", "", _key(cell))
        if key != _key(cell) and key in names:
            apart[at] = names[key]
    found: List[Optional[int]] = []
    for row in table:
        said = {bit: row[at].strip().lower() for at, bit in apart.items() if at < len(row)}
        known = {bit for bit, word in said.items() if word in ("active", "not active", "1", "0")}
        found.append(sum(bit for bit in known if said[bit] in ("active", "1")) if known else None)
    return found


def _reason_names() -> Dict[str, int]:
    names: Dict[str, int] = json.loads(knowledge.read("diagnosis.json"))["reasons"]["names"]
    return names


def _reasons(cell: str, names: Dict[str, int]) -> Optional[int]:
    number = _number(cell)
    if number is not None:
        return int(number)
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cell).lower())
    text = "".join(words)
    bits = sum(bit for name, bit in names.items() if name.replace("_", "") in text)
    # "none" and "not active" are known to be nothing; N/A and an empty cell are not known.
    return bits or (0 if text in ("none", "notactive", "active", "ok", "no") else None)


_FORMATS = (
    "%Y/%m/%d %H:%M:%S.%f",
    "%Y/%m/%d %H:%M:%S",
    "%d/%m/%Y %H:%M:%S",
    "%H:%M:%S.%f",
    "%H:%M:%S",
    "%Y%m%d %H:%M:%S",
)


def _times(cells: Optional[Sequence[str]], gpus: Optional[Sequence[str]], count: int) -> List[Optional[float]]:
    """When each row was sampled, in seconds. Without a column of times, rounds are counted as seconds."""
    if cells is None:
        seen: Dict[str, int] = {}
        rounds: List[Optional[float]] = []
        for gpu in gpus or [""] * count:
            rounds.append(float(seen.get(gpu, 0)))
            seen[gpu] = seen.get(gpu, 0) + 1
        return rounds
    found = _days([_time(cell) for cell in cells])
    known = [at for at in found if at is not None]
    scale = next((1 / unit for unit in (1e9, 1e6, 1e3) if known and min(known) > 1e8 * unit), 1.0)
    return [None if at is None else at * scale for at in found]


def _days(times: List[Optional[float]]) -> List[Optional[float]]:
    """Times of day, which lie in 1900, go on after midnight."""
    days, last = 0.0, -math.inf
    found: List[Optional[float]] = []
    for at in times:
        if at is not None and at < 0:
            days += 86400 if at < last - 43200 else 0
            last = at
        found.append(at + days if at is not None else None)
    return found


def _time(cell: str) -> Optional[float]:
    text = cell.strip().strip('"')
    number = _number(text)
    if number is not None:
        return number
    try:
        at = datetime.fromisoformat(re.sub(r"Z$", "+00:00", re.sub(r"(\.\d{6})\d+|(\.\d{1,5})(?!\d)", _micro, text)))
        return at.timestamp()
    except ValueError:
        pass
    for form in _FORMATS:
        try:
            at = datetime.strptime(text, form)
        except ValueError:
            continue
        return at.replace(tzinfo=timezone.utc).timestamp() if at.year == 1900 else at.timestamp()
    return None


def _micro(match: re.Match[str]) -> str:
    """Python 3.9 reads three or six digits of a second."""
    return match[1] or match[2].ljust(7, "0")


def _notes(
    columns: Dict[str, Any], cells: Dict[str, List[str]], samples: Sequence[Sample], count: int
) -> Iterator[str]:
    if len(samples) < count:
        yield f"{count - len(samples)} of {count} rows say nothing and are left out"
    if "time" not in columns:
        yield "no column of times: each round of samples is taken as a second"
    if "index" not in columns and "uuid" not in columns:
        yield "no column of a GPU's index or UUID: all samples are taken as one GPU's"
    for field in ("utilization", "power", "power_limit", "sm_clock", "sm_clock_max", "reasons"):
        if all(getattr(sample, field) is None for sample in samples):
            what = (
                f"column {GPU_COLUMNS[field]} holds no value" if field in cells else f"no column {GPU_COLUMNS[field]}"
            )
            yield f"{what}: what follows from it stays unknown"
