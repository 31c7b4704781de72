"""What was sampled of GPUs and of the server, and what the benchmark said, read from files of many makers.

GPU samples come as CSV: our own, that of `nvidia-smi --query-gpu ... --format=csv` and of `nvidia-smi dmon`, or any
whose columns have names that knowledge/diagnosis.json knows. What is not known is None, never 0.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

from kernelswap.agent import knowledge
from kernelswap.measured import GPU_COLUMNS, SERVER_COLUMNS


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
    utilization: float | None = None
    memory_utilization: float | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: float | None = None
    sm_clock_max: float | None = None
    memory_clock: float | None = None
    memory_clock_max: float | None = None
    reasons: int | None = None
    memory_used: float | None = None
    memory_total: float | None = None
    pcie_rx: float | None = None
    pcie_tx: float | None = None
    pcie_gen: float | None = None
    pcie_width: float | None = None
    temperature: float | None = None


@dataclass(frozen=True)
class ServerSample:
    """SGLang's own counters at one moment. token_usage, cache_hit_rate: shares; gen_throughput: tokens per second."""

    time: float
    phase: str = ""
    running: float | None = None
    queued: float | None = None
    token_usage: float | None = None
    cache_hit_rate: float | None = None
    gen_throughput: float | None = None
    spec_accept_length: float | None = None


@dataclass(frozen=True)
class Bench:
    """What a run of the benchmark says, as far as it helps to read the GPUs.

    concurrency: requests at once; requests: asked for; completed: of them; tokens: of all requests; ttft, itl, e2e:
    medians in ms; accept_length: tokens per step of speculative decoding; started, ended: seconds of the epoch.
    """

    output_tok_s: float | None = None
    concurrency: float | None = None
    requests: float | None = None
    completed: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None
    accept_length: float | None = None
    phase: str = ""
    started: float | None = None
    ended: float | None = None


@dataclass(frozen=True)
class Trace:
    """What a file holds: a file of GPU samples may have the server's counters too. notes: what is wrong with the file
    and what was made of it, a line each."""

    samples: tuple[Sample, ...] = ()
    server: tuple[ServerSample, ...] = ()
    runs: tuple[Bench, ...] = ()
    notes: tuple[str, ...] = ()


class Unreadable(ValueError):
    """The file holds nothing of what it should. what is missing, and todo: what to do about it."""

    def __init__(self, what: str, todo: str) -> None:
        super().__init__(f"{what}; {todo}")
        self.what = what
        self.todo = todo


SAMPLE = "sample with `nvidia-smi --query-gpu=timestamp,index,utilization.gpu,... --format=csv -lms 500`"


def read_gpus(text: str) -> Trace:
    """The samples of a CSV file. Raises Unreadable where no column is known, or no row can be read."""
    rows = _rows(text)
    header = next(rows, [])
    columns = _columns(header)
    if not header:
        raise Unreadable("the file is empty", SAMPLE)
    if not set(columns) & _MEASURES:
        found = f"no column of a GPU's utilisation, power or clocks, but {', '.join(header)[:200]}"
        raise Unreadable(found, "let the first line name them, as `nvidia-smi --format=csv` does without `noheader`")
    table = [row for row in rows if row != header]
    cells = {field: [row[at] if at < len(row) else "" for row in table] for field, (at, _) in columns.items()}
    values = {field: _numbers(field, columns[field][1], cells[field]) for field in cells if field not in _WORDS}
    values["reasons"] = _all_reasons(header, table, cells.get("reasons"))
    times = _times(cells.get("time"), cells.get("index") or cells.get("uuid"), len(table))
    samples: list[Sample] = []
    server: dict[float, ServerSample] = {}
    mute: dict[int, list[str]] = {}  # rows that say nothing, by number
    for number, at in enumerate(times):
        row = {field: column[number] for field, column in values.items()}
        if at is None or all(value is None for value in row.values()):
            mute[number] = table[number]
            continue
        words = {field: cells[field][number].strip() for field in _WORDS if field in cells}
        gpu = words.get("index") or words.get("uuid") or "0"
        seen = {field: row.pop(field, None) for field in ("running", "queued", "token_usage", "gen_throughput")}
        phase = words.get("phase", "")
        if any(value is not None for value in seen.values()):
            server[at] = ServerSample(at, phase, **seen)
        samples.append(Sample(at, gpu, phase, words.get("name", ""), **row))  # type: ignore[arg-type]
    if not table:
        raise Unreadable("a header and no row below it", "see why the sampler did not run, and sample again")
    if all(at is None for at in times):
        raise Unreadable(f"no time can be read, as {cells['time'][0][:40]!r}", "write seconds or ISO 8601")
    if not samples:
        raise Unreadable(f"{len(table)} rows and no number in them, as {', '.join(table[0])[:200]}", SAMPLE)
    notes = [
        *_odd_rows(list(mute.values()), len(table)),
        *_odd_columns(header, columns, cells, values, mute),
        *_gaps(samples),
        *_freed(samples),
    ]
    return Trace(tuple(samples), tuple(server.values()), notes=(*notes, *_lacks(columns, cells, samples)))


def read_server(text: str) -> Trace:
    """The samples of a metrics.csv. Raises Unreadable."""
    rows = _rows(text)
    header = next(rows, [])
    known = {field: at for field, (at, _) in _columns(header).items()}
    where = {name: header.index(name) if name in header else known.get(name) for name in SERVER_COLUMNS}
    if all(where[name] is None for name in SERVER_COLUMNS[2:]):
        what = f"none of the columns {', '.join(SERVER_COLUMNS[2:])}"
        raise Unreadable(what, "give the metrics.csv of a swap, or name its columns so")
    found = []
    for row in rows:
        named = {name: row[at] for name, at in where.items() if at is not None and at < len(row)}
        at = _time(named.get("time", ""))
        values = {name: _number(named.get(name, "")) for name in SERVER_COLUMNS[2:]}
        if at is not None:
            found.append(ServerSample(at, named.get("phase", ""), **values))
    return Trace(server=tuple(found), notes=() if found else ("no row with a time and a number",))


def read_bench(text: str) -> Trace:
    """The runs that SGLang's benchmark wrote, one JSON object a line or one for the whole file; lines that are none
    are left out. Raises Unreadable if no line is one."""
    found = [_bench(item) if isinstance(item, dict) else Bench() for item in _objects(text)]
    runs = tuple(run for run in found if run != Bench())
    if text.strip() and not runs:
        what = "no line is a result of the benchmark, a JSON object with the number `output_throughput`"
        raise Unreadable(what, "give the file that SGLang's benchmark writes with `--output-file`")
    lost = len(found) - len(runs)
    return Trace(runs=runs, notes=(f"{lost} of {len(found)} lines are no results and are left out",) if lost else ())


def _objects(text: str) -> Iterator[Any]:
    try:
        whole = _parsed(text)
        yield from whole if isinstance(whole, list) else [whole]
        return
    except (ValueError, RecursionError):
        pass
    for line in filter(str.strip, text.splitlines()):
        try:
            yield _parsed(line)
        except (ValueError, RecursionError):
            yield None


def _parsed(text: str) -> Any:
    return json.loads(text, parse_int=float)  # an integer that no float holds is infinite


def _bench(values: dict[str, Any]) -> Bench:
    def first(*names: str) -> float | None:
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


def _rows(text: str) -> Iterator[list[str]]:
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


def _split(line: str, mark: str = "") -> list[str]:
    mark = mark or _delimiter(line)
    words = line.split() if mark == " " else next(csv.reader([line], delimiter=mark, skipinitialspace=True), [])
    if mark not in ", ":  # a decimal comma
        words = [re.sub(r"(?<=\d),(?=\d+\s*\D*$)", ".", word) for word in words]
    elif mark == ",":  # thousands, in quotes
        words = [word.replace(",", "") if _THOUSANDS.match(word) else word for word in words]
    return [word.strip() for word in words]


_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?(\s*[%A-Za-z/]+)?$")


@lru_cache(maxsize=1)
def _aliases() -> dict[str, list[str]]:
    """What people call each field, the likeliest first."""
    names: dict[str, list[str]] = json.loads(knowledge.read("diagnosis.json"))["columns"]["names"]
    return names


def _columns(header: Sequence[str]) -> dict[str, tuple[int, str]]:
    """Where each field that is known stands, and in which unit; of several columns for one, that of the first name."""
    names = [_key(cell) for cell in header]
    units = [match[1].strip().lower() if match else "" for match in map(_UNIT.search, header)]
    whole = {name: at for at, name in reversed(list(enumerate(names)))}
    bare = {_TAIL.sub("", name): at for at, name in reversed(list(enumerate(names)))}
    found: dict[str, tuple[int, str]] = {}
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
def _number(cell: str) -> float | None:
    """The number of a cell, with or without its unit; None for what is none, as `[N/A]`."""
    match = _NUMBER.match(cell.strip())
    if not match:
        return None
    text = cell.strip()[: match.start(1)].strip() if match[1] else cell.strip()
    value = float(int(text, 16)) if text.lower().startswith("0x") else float(text)
    return value if math.isfinite(value) else None


def _numbers(field: str, unit: str, cells: Sequence[str]) -> list[float | None]:
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
    # What cannot be, as -1 W, 0 W or 4294967295 %, is how some say that they do not know.
    least, most = (1e-9 if field == "power" else 0), (110 if field.endswith("utilization") else 1e15)
    return [None if value is None or not least <= value * factor <= most else value * factor for value in values]


def _all_reasons(header: Sequence[str], table: Sequence[Sequence[str]], cells: Sequence[str] | None) -> list[Any]:
    """The bits of each row: from one column of bits or words, or from one column for each reason."""
    names = _reason_names()
    if cells is not None:
        return [_reasons(cell, names) for cell in cells]
    apart = {}
    for at, cell in enumerate(header):
        key = re.sub(r"^clocks_(?:event|throttle)_reasons_", "", _key(cell))
        if key != _key(cell) and key in names:
            apart[at] = names[key]
    found: list[int | None] = []
    for row in table:
        said = {bit: row[at].strip().lower() for at, bit in apart.items() if at < len(row)}
        known = {bit for bit, word in said.items() if word in ("active", "not active", "1", "0")}
        found.append(sum(bit for bit in known if said[bit] in ("active", "1")) if known else None)
    return found


def _reason_names() -> dict[str, int]:
    names: dict[str, int] = json.loads(knowledge.read("diagnosis.json"))["reasons"]["names"]
    return names


def _reasons(cell: str, names: dict[str, int]) -> int | None:
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


def _times(cells: Sequence[str] | None, gpus: Sequence[str] | None, count: int) -> list[float | None]:
    """When each row was sampled, in seconds. Without a column of times, rounds are counted as seconds."""
    if cells is None:
        seen: dict[str, int] = {}
        rounds: list[float | None] = []
        for gpu in gpus or [""] * count:
            rounds.append(float(seen.get(gpu, 0)))
            seen[gpu] = seen.get(gpu, 0) + 1
        return rounds
    found = _days([_time(cell) for cell in cells])
    known = [at for at in found if at is not None]
    scale = next((1 / unit for unit in (1e9, 1e6, 1e3) if known and min(known) > 1e8 * unit), 1.0)
    return [None if at is None else at * scale for at in found]


def _days(times: list[float | None]) -> list[float | None]:
    """Times of day, which lie in 1900, go on after midnight."""
    days, last = 0.0, -math.inf
    found: list[float | None] = []
    for at in times:
        if at is not None and at < 0:
            days += 86400 if at < last - 43200 else 0
            last = at
        found.append(at + days if at is not None else None)
    return found


def _time(cell: str) -> float | None:
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
        return at.replace(tzinfo=UTC).timestamp() if at.year == 1900 else at.timestamp()
    return None


def _micro(match: re.Match[str]) -> str:
    """Python 3.9 reads three or six digits of a second."""
    return match[1] or match[2].ljust(7, "0")


LOST = 5.0  # seconds without a sample of one GPU that others have
_NOTHING = {"", "-", "n/a", "[n/a]", "na", "nan", "none", "null", "[not supported]", "not supported", "not available"}


def _odd_rows(mute: Sequence[Sequence[str]], count: int) -> Iterator[str]:
    if mute:
        shown = ", ".join(max(mute, key=lambda row: sum(cell.lower() not in _NOTHING for cell in row)))
        yield f"{len(mute)} of {count} rows say nothing and are left out, as {shown[:120]!r}"


def _odd_columns(
    header: Sequence[str],
    columns: dict[str, tuple[int, str]],
    cells: dict[str, list[str]],
    values: dict[str, list[float | None]],
    mute: Container[int],
) -> Iterator[str]:
    """Columns that are there twice, and cells that are no figure and do not say so, but of the rows `mute`."""
    for field, (at, _) in columns.items():
        twins = [cell for cell in header if _key(cell) == _key(header[at])]
        if len(twins) > 1:
            yield f"column {header[at]} is there {len(twins)} times: the first one counts"
        if field in _WORDS:
            continue
        odd = [
            cell
            for number, (cell, value) in enumerate(zip(cells[field], values[field], strict=True))
            if value is None and number not in mute and cell.lower() not in _NOTHING
        ]
        if odd:
            of = f"{len(odd)} of {len(cells[field])} cells"
            yield f"column {header[at]}: {of} are no possible figure, as {odd[0][:40]!r}"


def by_gpu(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The samples of each GPU, in their order."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.gpu, []).append(sample)
    return found


def patience(samples: Sequence[Sample], least: float) -> float:
    """How long there may be nothing before it tells something: four of the usual steps between samples, and `least`."""
    times = sorted({sample.time for sample in samples})
    return max(least, 4 * statistics.median([after - before for before, after in pairwise(times)] or [0.0]))


def _gaps(samples: Sequence[Sample]) -> Iterator[str]:
    """GPUs that some time was not sampled, as when one is lost."""
    times = {gpu: [sample.time for sample in found] for gpu, found in by_gpu(samples).items()}
    begin, end = min(map(min, times.values())), max(map(max, times.values()))
    longest = patience(samples, LOST)
    for gpu, known in times.items():
        edges = sorted([begin, *known, end])
        before, after = max(pairwise(edges), key=lambda pair: pair[1] - pair[0], default=(begin, end))
        others = any(before < at < after for name, found in times.items() if name != gpu for at in found)
        if after - before > longest and others:
            span = f"from {before - begin:.0f} s to {after - begin:.0f} s"
            yield f"GPU {gpu} has no samples {span}, others have: was it lost?"
    numbers = sorted(int(gpu) for gpu in times if gpu.isdecimal() and len(gpu) < 4)
    missing = sorted(set(range(numbers[0], numbers[-1])) - set(numbers)) if numbers else []
    if missing:
        there = f"{numbers[0]} and {numbers[-1]}"
        yield f"no samples of GPU {', '.join(map(str, missing))}, though there are of {there}"


def _freed(samples: Sequence[Sample]) -> Iterator[str]:
    """Memory that was freed for good."""
    begin, apart, freed = min(sample.time for sample in samples), by_gpu(samples), []
    for found in apart.values():
        used = sorted((sample.time, sample.memory_used) for sample in found if sample.memory_used is not None)
        most = max((value for _, value in used), default=0.0)
        last = next((at for at, value in reversed(used) if value >= 0.5 * most), None)
        if used and most and last != used[-1][0] and all(value < 0.1 * most for at, value in used if at > (last or 0)):
            freed.append(last or begin)
    if freed:
        whose = "all GPUs" if len(freed) == len(apart) else f"{len(freed)} of {len(apart)} GPUs"
        at = f"{min(freed) - begin:.0f} s after the first sample"
        yield f"the memory of {whose} was freed {at}: the server ended there"


def _lacks(columns: dict[str, Any], cells: dict[str, list[str]], samples: Sequence[Sample]) -> Iterator[str]:
    if "time" not in columns:
        yield "no column of times: each round of samples is taken as a second"
    if "index" not in columns and "uuid" not in columns:
        yield "no column of a GPU's index or UUID: all samples are taken as one GPU's"
    for field in ("utilization", "power", "power_limit", "sm_clock", "sm_clock_max", "reasons"):
        if all(getattr(sample, field) is None for sample in samples):
            name = GPU_COLUMNS[field]
            what = f"column {name} holds no value" if field in cells else f"no column {name}"
            yield f"{what}: what follows from it stays unknown"
