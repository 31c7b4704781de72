"""The values that cross between the controller and the agent on a host, and how they become JSON.

Both sides import this module, so it keeps to the standard library and Python 3.9. All values are frozen; `encode` and
`decode` are exact inverses. `decode` ignores keys that it does not know, so that an older agent reads a newer file.

Times are seconds since the epoch (UTC); durations are seconds; memory is MiB; throughput is output tokens per second.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
from dataclasses import dataclass, field
from typing import (
    Any,
    Callable,
    Dict,
    Mapping,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

CONFIG_ROOT = "/etc/kernelswap"  # releases, the known-good link, the host's key
TRAFFIC_FILE = "traffic.json"  # below CONFIG_ROOT/INSTANCE, see Traffic
PLAN_FILE = "plan.json"  # a release's Plan, in its folder
STATE_ROOT = "/var/lib/kernelswap"  # journal, lock, history, evidence
PYTHON = "/usr/bin/python3"  # the host's, which runs the agent; an engine has its own
AGENT_PATH = "/usr/local/lib/kernelswap/agent.pyz"
METRICS_LINK = CONFIG_ROOT + "/metrics"  # leads to the folder of the textfile collector, see agent/metrics.py
DRIFT_UNITS = ("kernelswap-drift.service", "kernelswap-drift.timer")
RUN_ROOT = "/run/kernelswap"  # what a reboot may forget
KEY_PATH = CONFIG_ROOT + "/key"  # 32 random bytes as hex; keys the digest of secrets, see render.py
ROUTER_UNIT = "sglang-router.service"
ROUTER_KEY = CONFIG_ROOT + "/router.key"  # no instance is called that
ENGINE_MODULE = "sglang.launch_server"
DIRTY = 3  # the guard's exit code for a host that it saw not to be clean; Python's own are 1 and 2


def keyed_digest(key: str, text: str) -> str:
    """A digest by which both sides recognise a text that holds secrets, without revealing anything of it."""
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def glance_bytecode(source: bytes) -> str:
    """The file beside the agent's that holds the glance as bytecode."""
    return f"glance-{hashlib.sha256(source).hexdigest()[:16]}.pyc"


def unit_name(instance: str) -> str:
    """The systemd unit of an instance; it keeps this name whatever the profile."""
    return f"sglang-{instance}.service"


def gpu_indices(instance: str) -> str:
    """The file by which the guard tells a unit its GPUs' indices of today, see agent/gpus.py."""
    return f"{RUN_ROOT}/{instance}/gpus.env"


@dataclass(frozen=True)
class Answer:
    """A question whose answer is known. expect: a regular expression searched in the answer."""

    prompt: str
    expect: str
    max_tokens: int = 64


@dataclass(frozen=True)
class Smoke:
    """garbled: the share of texts that may look garbled where no known-good says how many do."""

    garbled: float = 0.5


@dataclass(frozen=True)
class Throughput:
    """How SGLang's own serving benchmark measures a server, and what it must reach.

    concurrency: the highest; lower: the others, in order. requests: of a run at the highest. repetitions: runs of each
    at first; as many again, twice, where they are not enough to tell. floor: output tokens per second at the highest
    concurrency; floors: at others, by concurrency. regression: the share by which it may be slower than the known-good;
    None is no limit. inconclusive: what happens where that cannot be told, `commit` or `rollback`. baseline: `stored`
    takes what the known-good was committed with, `fresh` measures it again.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    requests: int
    floor: Optional[float] = None
    lower: Tuple[int, ...] = ()
    floors: Dict[str, float] = field(default_factory=dict)
    repetitions: int = 3
    regression: Optional[float] = 0.05
    inconclusive: str = "commit"
    baseline: str = "stored"

    @property
    def ladder(self) -> Tuple[int, ...]:
        return (*self.lower, self.concurrency)

    def requests_at(self, concurrency: int) -> int:
        """Of a run, so that each is as many times its concurrency."""
        return max(concurrency, -(-self.requests * concurrency // self.concurrency))

    def floor_at(self, concurrency: int) -> Optional[float]:
        return self.floor if concurrency == self.concurrency else self.floors.get(str(concurrency))


@dataclass(frozen=True)
class DriftLimits:
    """How far a release may be from the known-good: the noise times noise_multiple, or these if they are wider.

    The figures are those of measured.Drift; the defaults lie above what sound kernels differ by, see
    docs/answer-drift.md. A single token has no limit: where a router was near a tie, it may differ by anything.
    prompts: a file on the host with a JSON list of texts; "" is our own. policy: `rollback`, or `note` where a
    difference is only told.
    """

    noise_multiple: float = 5.0
    equal_tokens: float = 0.5
    mean_logprob: float = 0.1
    worst_prompt: float = 0.5
    kl: float = 0.05
    prompts: str = ""
    policy: str = "rollback"


@dataclass(frozen=True)
class Accuracy:
    """Graded questions in the manner of gsm8k, asked by SGLang's own evaluator. file: on the host, JSON lines with
    `question` and `answer`. shots: solved examples before each. floor: share of right answers, at least."""

    file: str
    questions: int = 200
    shots: int = 5
    runs: int = 3
    floor: Optional[float] = None


@dataclass(frozen=True)
class Verify:
    """What a server must do before it may be committed. min_healthy: seconds of light traffic; 0 is none."""

    answers: Tuple[Answer, ...] = ()
    smoke: Smoke = field(default_factory=Smoke)
    drift: Optional[DriftLimits] = field(default_factory=DriftLimits)
    accuracy: Optional[Accuracy] = None
    throughput: Optional[Throughput] = None
    min_healthy: float = 10

    def asked(self, how: str) -> Verify:
        """What of it is done: all that is declared, or as --verify says. quick: one short run against the floor, and no
        graded questions; full: nothing is taken from earlier swaps."""
        run = self.throughput
        if run and how == "quick":
            few = min(run.requests, 2 * run.concurrency)
            run = dataclasses.replace(run, lower=(), floors={}, requests=few, repetitions=1, regression=None)
        if run and how == "full":
            run = dataclasses.replace(run, repetitions=max(5, run.repetitions), baseline="fresh")
        return dataclasses.replace(self, throughput=run, accuracy=None if how == "quick" else self.accuracy)


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of the steps, in seconds. `ready` moves on while the server's log shows progress; `nvml` is that of one
    question to the GPUs' driver, which itself waits 45 s for a GPU that has hung; `soak` is added to min_healthy."""

    preflight: float = 120
    stop: float = 60
    clean: float = 120
    ready: float = 1800
    smoke: float = 300
    drift: float = 600
    accuracy: float = 3600
    throughput: float = 1200
    soak: float = 300
    nvml: float = 60


@dataclass(frozen=True)
class Router:
    """A router that sends an instance its users. key: the one that it asks of whoever calls it; "": it asks none."""

    url: str
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Drain:
    """How users leave a server before it stops.

    deadline: seconds in which running requests may end. then: what happens where some have not, `proceed` (the stop
    itself lets them end, see `timeouts.stop`) or `fail` (nothing is stopped). unreachable: what happens where a router
    does not answer, `fail` or `proceed`.
    """

    deadline: float = 30.0  # as the controller writes it
    then: str = "proceed"
    unreachable: str = "fail"


@dataclass(frozen=True)
class Hook:
    """Who is told of a moment of a swap: a command, as its words, or a webhook, as its URL. timeout: seconds."""

    command: Tuple[str, ...] = ()
    webhook: str = field(default="", repr=False)
    timeout: float = 30.0


@dataclass(frozen=True)
class Traffic:
    """Where the users of an instance come from, and who else is told that they come and go. It holds secrets.

    It belongs to the instance and to no release: a rollback takes users away and brings them back as it is said today.
    address: the host's, as its routers reach it. hooks: by moment, `drain`, `open` or `result`.
    """

    address: str = ""
    routers: Tuple[Router, ...] = ()
    drain: Drain = field(default_factory=Drain)
    hooks: Dict[str, Hook] = field(default_factory=dict)


@dataclass(frozen=True)
class Requires:
    """What the hardware of a host must be. architecture: any of these, such as "sm120", of each GPU; empty: any.
    memory: MiB of each GPU, at least. driver: NVIDIA's version, at least; "" is any."""

    architecture: Tuple[str, ...] = ()
    memory: int = 0
    driver: str = ""


@dataclass(frozen=True)
class Retention:
    """How much an instance keeps. releases: on the host; swaps: the newest, with their reports and evidence."""

    releases: int = 10
    swaps: int = 50


@dataclass(frozen=True)
class Plan:
    """All that the agent must know to start, judge and stop one release. Holds no secret.

    argv: the words after the interpreter, as the unit's ExecStart has them except for the words that pass secrets
    (`--config ...`). environment: of the unit. gpus: the UUIDs of the GPUs or MIG devices that the instance may use (a
    preview has the inventory's indices); empty means every GPU of the host. gpu_count: how many it needs; 0 where the
    model declares none.
    flags: the declared SGLang flags as strings, by canonical name. secret_flags: names only. end_foreign: whether
    what is no SGLang and is on the GPUs or the port may be ended. engine_version: of the SGLang that the host must
    have; "" is any. digests: SHA-256 of the release's other files by name, by which a torn one is known; of none that
    holds secrets.
    """

    instance: str
    release: str
    profile: str
    model: str
    python: str
    argv: Tuple[str, ...]
    environment: Dict[str, str]
    user: str
    model_path: str
    served_name: str
    address: str
    port: int
    gpus: Tuple[str, ...] = ()
    gpu_count: int = 0
    schedulers: int = 1
    flags: Dict[str, str] = field(default_factory=dict)
    secret_flags: Tuple[str, ...] = ()
    expose: str = "verified"
    memory_margin: int = 1024
    disk_free: int = 1024
    end_foreign: bool = False
    engine_version: str = ""
    requires: Requires = field(default_factory=Requires)
    verify: Verify = field(default_factory=Verify)
    timeouts: Timeouts = field(default_factory=Timeouts)
    retention: Retention = field(default_factory=Retention)
    digests: Dict[str, str] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        return unit_name(self.instance)


@dataclass(frozen=True)
class Resolved:
    """What the SGLang of a host made of a release's command line: its arguments by name (`moe_runner_backend`), each
    as JSON, with what every `auto` became. version: SGLang's. served: as /server_info said once it ran, not only as
    the preflight had foreseen. Holds no secret."""

    release: str
    version: str
    values: Dict[str, str]
    served: bool = False


@dataclass(frozen=True)
class Request:
    """One asked-for swap. action: `converge` or `rollback`; release: the name of the release to end on.

    host: its name in the inventory; command: what was typed, without secrets. verify: `quick`, `full`, or "" for what
    the model declares.
    """

    swap: str
    instance: str
    action: str
    release: str
    who: str
    reason: str = ""
    force: bool = False
    adopt: bool = False
    host: str = ""
    command: str = ""
    verify: str = ""

    def same_goal(self, other: Request) -> bool:
        return (self.instance, self.action, self.release) == (other.instance, other.action, other.release)


@dataclass(frozen=True)
class HostFault:
    """What on a host stands against a swap, seen before anything is touched, and the way out. errors.Fault is one in
    what people wrote."""

    what: str
    todo: str

    def __str__(self) -> str:
        return f"{self.what}: {self.todo}"


@dataclass(frozen=True)
class Cause:
    """Why a step failed. what: one line; where: the file or command that shows more; todo: what to try.

    signature: the known fault's id, or "unknown". blame: `release` bars the release, `host` does not. retry: the same
    release may work on a second try as it is. line: the 1-based line of the log that says it. faults: where there is
    more than one, each by itself; `what` has all of them.
    """

    what: str
    where: str
    todo: str
    signature: str = "unknown"
    blame: str = "host"
    retry: bool = False
    line: Optional[int] = None
    faults: Tuple[HostFault, ...] = ()

    @property
    def brief(self) -> str:
        """What, for a place near which the faults are told each by itself."""
        return f"{len(self.faults)} faults" if self.faults else self.what

    @property
    def again(self) -> str:
        """Whether another try helps, in words."""
        if self.retry:
            return "the same release may work if tried again"
        if self.signature == "unknown":
            return "whether another try helps is not known"
        if self.blame == "host":
            return "the same release may work once the host is in order"
        return "the same release fails again as it is"


@dataclass(frozen=True)
class Event:
    """One line of a swap's progress. kind: begin, end, note, progress, failed or result."""

    at: float
    step: str
    kind: str
    text: str = ""
    seconds: Optional[float] = None


@dataclass(frozen=True)
class StepResult:
    """One step of a swap: numbers are what it measured, e.g. {"output_tok_s": 225.0}."""

    name: str
    seconds: float
    ok: bool
    detail: str = ""
    numbers: Dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """How a swap ended; also one line of the history.

    outcome: `committed`; `rolled-back` (what served before answers again, see docs/reference.md); `down` (loudly: read
    `detail`); `refused` (nothing was touched); `unchanged` (it served already). previous: what served before; serving:
    the release that answers now, if any. notes: what stands in no way and is worth knowing, a line each.
    """

    request: Request
    outcome: str
    started: float
    ended: float
    previous: Optional[str] = None
    serving: Optional[str] = None
    cause: Optional[Cause] = None
    detail: str = ""
    evidence: str = ""
    steps: Tuple[StepResult, ...] = ()
    notes: Tuple[str, ...] = ()

    @property
    def failed_step(self) -> str:
        """The step that failed first; "" if none did."""
        return next((step.name for step in self.steps if not step.ok), "")

    @property
    def bars(self) -> bool:
        """Whether this end bars the release from being tried again without force."""
        return self.outcome in ("rolled-back", "down") and self.cause is not None and self.cause.blame == "release"


@dataclass(frozen=True)
class Running:
    """A swap that has not ended. active: whether its agent lives; else its journal waits to be closed."""

    request: Request
    since: float
    step: str
    active: bool


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG device of it, as NVML reports it; None where NVML does not know.

    index: NVML's, in the order of PCI addresses; a MIG device has that of its GPU, and its GPU's UUID as `parent`.
    driver: NVIDIA's version, of the host. pci: as the kernel log has it, 0000:01:00. mig: it is divided
    into MIG devices, and offers these instead of itself. error: why it could not be read; what is not known of it then
    has its default. memory in MiB, power in W, clocks in MHz, temperature in degrees Celsius.
    """

    index: int
    uuid: str = ""
    name: str = ""
    capability: str = ""
    memory_total: Optional[int] = None
    memory_used: Optional[int] = None
    utilization: Optional[int] = None
    power: Optional[float] = None
    power_limit: Optional[float] = None
    sm_clock: Optional[int] = None
    temperature: Optional[int] = None
    pids: Tuple[int, ...] = ()
    driver: str = ""
    pci: str = ""
    mig: bool = False
    parent: str = ""
    error: str = ""


@dataclass(frozen=True)
class Server:
    """An SGLang server process that was found on the host. unit: the systemd service it belongs to, if any.

    container: the container it runs in, for people; "" outside of any.
    """

    pid: int
    started: float
    user: str
    argv: Tuple[str, ...]
    unit: Optional[str] = None
    port: Optional[int] = None
    container: str = ""


@dataclass(frozen=True)
class InstanceState:
    """What a host knows of one instance.

    known_good: the release that was committed last. unit_intact: /etc holds exactly that release's unit, enabled,
    and nothing of a candidate is left. unit_since: when it began to run; a glance tells when it began to start, and no
    main_pid. history: the newest reports; barred and rollback_target follow from all of it. releases: staged release ->
    file name -> SHA-256 (secrets only by name, with an empty hash). plan: of the known-good release. health: `ok`,
    `unhealthy: <why>` or "" (not asked). traffic: the
    digest of its Traffic under the host's key, "" if it has none; member: the state of the unit that keeps the
    instance in its routers.
    """

    instance: str
    known_good: Optional[str] = None
    unit_state: str = "absent"
    unit_since: Optional[float] = None
    main_pid: Optional[int] = None
    unit_intact: bool = False
    health: str = ""
    releases: Dict[str, Dict[str, str]] = field(default_factory=dict)
    plan: Optional[Plan] = None
    running: Optional[Running] = None
    history: Tuple[Report, ...] = ()
    barred: Tuple[str, ...] = ()
    rollback_target: Optional[str] = None
    traffic: str = ""
    member: str = ""


@dataclass(frozen=True)
class RouterState:
    """The router of a host. unit: SHA-256 of its unit's file; key: digest of its key under the host's, "" if it has
    none; state: of the unit. workers: the URLs that it lists; None where `problem` tells why it did not say."""

    unit: str = ""
    key: str = ""
    state: str = "absent"
    workers: Optional[Tuple[str, ...]] = None
    problem: str = ""


@dataclass(frozen=True)
class HostState:
    """Everything that a decision about a host needs, read in one remote command.

    agent: BLAKE2b of the agent's file. key: see KEY_PATH; empty if none. users: names of the users asked about that
    exist. recover_enabled: instances whose recover unit is enabled. servers: SGLang processes outside our units.
    gpu_error: why the GPUs could not be read. metrics: the folder that metrics are written to, "" if none is.
    drift_units: SHA-256 of the units that look for drift; "" where they are missing or not enabled. member_unit: that
    of the unit that keeps instances in their routers. router: if asked for.
    """

    agent: str
    key: str
    users: Tuple[str, ...] = ()
    recover_unit: str = ""
    recover_enabled: Tuple[str, ...] = ()
    instances: Tuple[InstanceState, ...] = ()
    servers: Tuple[Server, ...] = ()
    gpus: Tuple[Gpu, ...] = ()
    gpu_error: str = ""
    metrics: str = ""
    drift_units: str = ""
    member_unit: str = ""
    router: Optional[RouterState] = None


@dataclass(frozen=True)
class Finding:
    """Something on a host that is not as it should be, without secrets.

    kind: see docs/reference.md, `status --drift`. where: a file, unit, process or container. instance: "" is the whole
    host. detail: what differs from host to host, such as a process id. unknown: it could not be told; `found` says why.
    """

    kind: str
    where: str
    expected: str
    found: str
    todo: str
    instance: str = ""
    detail: str = ""
    unknown: bool = False


@dataclass(frozen=True)
class HostDrift:
    """What a host sees of itself, read in one remote command. looked: where it looked for other ways to a server."""

    state: HostState
    findings: Tuple[Finding, ...] = ()
    looked: Tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What a host has kept of one swap.

    report: None where not exactly one swap has the id that was asked for, or where that one has not ended. swaps:
    those to choose from then, the newest last. unfinished: swaps that still run. files: name -> text; rows: name ->
    how many rows the host has, of files that are not whole here. plans, resolved: of the releases before and after.
    """

    report: Optional[Report] = None
    swaps: Tuple[Report, ...] = ()
    unfinished: Tuple[Request, ...] = ()
    files: Dict[str, str] = field(default_factory=dict)
    rows: Dict[str, int] = field(default_factory=dict)
    plans: Tuple[Plan, ...] = ()
    resolved: Tuple[Resolved, ...] = ()


@dataclass(frozen=True)
class Releases:
    """What an instance has staged. previous: the release that a rollback goes to. resolved: as far as it is known."""

    instance: str
    known_good: Optional[str] = None
    previous: Optional[str] = None
    plans: Tuple[Plan, ...] = ()
    resolved: Tuple[Resolved, ...] = ()


@dataclass(frozen=True)
class LiveServer:
    """An SGLang server as it runs now, without its secrets. release: the one that its unit was written for; "" outside
    our units. python: its interpreter, "" if unknown. environment: what it was started with, less what systemd and
    sessions add. resolved: what its /server_info says; None where `problem` tells why not."""

    server: Server
    release: str = ""
    python: str = ""
    environment: Dict[str, str] = field(default_factory=dict)
    resolved: Optional[Resolved] = None
    problem: str = ""


@dataclass(frozen=True)
class HostReleases:
    """All that a comparison of servers needs of a host, read in one remote command; servers and gpus if asked for."""

    instances: Tuple[Releases, ...] = ()
    servers: Tuple[LiveServer, ...] = ()
    gpus: Tuple[Gpu, ...] = ()


T = TypeVar("T")


def encode(value: Any) -> str:
    """One line of JSON for any value of this module."""
    text = json.dumps(dataclasses.asdict(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    # Half a surrogate pair, as a server may answer it, is no UTF-8; escaped it is JSON.
    return text.encode("utf-8", "backslashreplace").decode()


def decode(kind: Type[T], text: str) -> T:
    """The value that `encode` wrote. Raises ValueError if the text is no JSON or not of that form."""
    try:
        value: T = _build(kind, json.loads(text))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{kind.__name__}: {error}") from None
    return value


def _build(kind: Any, value: Any) -> Any:
    reader = _reader(kind)
    return reader(value) if reader else value


Reader = Callable[[Any], Any]


@functools.cache
def _reader(kind: Any) -> Optional[Reader]:
    """What makes a value of a type out of JSON; None where JSON's own value is it. To find out costs far more than to
    do it, and a fleet's answers hold a hundred thousand values."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Union:
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return inner and (lambda value: None if value is None else inner(value))
    if origin is tuple:
        return _tuple_of(_reader(args[0]))
    if origin is dict:
        return _dict_of(_reader(args[1]))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return functools.partial(_read_fields, kind)
    return None


def _tuple_of(read: Optional[Reader]) -> Reader:
    return tuple if read is None else lambda values: tuple(map(read, values))


def _dict_of(read: Optional[Reader]) -> Reader:
    return dict if read is None else lambda values: {key: read(value) for key, value in values.items()}


def _read_fields(kind: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{kind.__name__}: expected an object, got {type(value).__name__}")
    fields = _fields(kind)
    return kind(**{name: read(value[name]) if read else value[name] for name, read in fields if name in value})


@functools.cache
def _fields(kind: Any) -> Tuple[Tuple[str, Optional[Reader]], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _reader(hints[field.name])) for field in dataclasses.fields(kind))
