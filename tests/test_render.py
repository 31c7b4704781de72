"""Rendering: systemd must hand the server exactly the words and variables of the plan, and no one a secret.

`unquote` and `expand` below say again, independently, what systemd does with a line; tests/lab/test_quoting.py asks
the real one.
"""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelswap.errors import ConfigError
from kernelswap.library import load_library
from kernelswap.protocol import AGENT_PATH, DIRTY, Hook, Plan, Retention, Router, Timeouts, Traffic, Verify, decode
from kernelswap.render import (
    NO_TRAFFIC,
    Hidden,
    Release,
    assignment,
    fill,
    preview,
    render,
    resolve_secrets,
    traffic_text,
    word,
)
from kernelswap.servers import Secret, ServerSpec
from kernelswap.spec import server_spec

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "templates"
KEY = "00" * 32
SPEC = ServerSpec("main", "m", "p", "/srv/m", "m", "0.0.0.0", 30000, "sglang", "/opt/sglang/bin/python")
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
HOSTILE = [
    "",
    " ",
    '{"a": "b c", "d": [1, "\\""]}',
    "%n %h %% %",
    "$HOME ${X} $$ $",
    'it\'s "quoted"',
    "back\\slash\\",
    "line\nbreak\r\n\ttab",
    "\x01\x1b\x7f",
    "東京 é \U0001f600",
    "\ufeff\ufffe\uffff\ufdd0\x85\u2028",
    ";",
    "#",
    "-x",
    "@x",
    "+x",
    "!x",
    "!!x",
    ":x",
    "|",
    "~",
    "x" * 10_000,
]


def unquote(line: str) -> list[str]:
    """systemd's splitting of a line into words: quotes anywhere at a word's start, C escapes within."""
    words, position = [], 0
    while position < len(line):
        if line[position] in " \t":
            position += 1
            continue
        quote = line[position] if line[position] in "\"'" else ""
        position += len(quote)
        current = bytearray()
        while True:
            if position == len(line):
                assert not quote, "unbalanced quote"
                break
            character = line[position]
            if character == quote or (not quote and character in " \t"):
                position += 1
                break
            assert quote or character not in "\"'", "a quote inside a bare word"
            assert character not in "\n\r\0", "a control character ends the line"
            if character == "\\":
                escaped = line[position + 1]
                if escaped == "x":
                    current.append(int(line[position + 2 : position + 4], 16))
                    position += 4
                else:
                    current += {"n": b"\n", "t": b"\t", "\\": b"\\", '"': b'"'}[escaped]
                    position += 2
            else:
                current += character.encode()
                position += 1
        assert position == len(line) or not quote or line[position] in " \t", "text after a closing quote"
        words.append(current.decode())
    return words


def specifiers(text: str) -> str:
    assert not re.search(r"%(?!%)", text.replace("%%", "")), f"a specifier is left in {text!r}"
    return text.replace("%%", "%")


def expand(text: str) -> str:
    assert "$" not in text.replace("$$", ""), f"a variable is left in {text!r}"
    return text.replace("$$", "$")


def exec_words(line: str) -> list[str]:
    return [expand(specifiers(item)) for item in unquote(line)]


def directives(unit: str) -> list[tuple[str, str]]:
    joined = unit.replace("\\\n", " ")
    lines = [line.strip() for line in joined.split("\n")]
    return [tuple(line.split("=", 1)) for line in lines if line and line[0] not in "#;["]  # type: ignore[misc]


def command_of(unit: str) -> list[str]:
    (line,) = [value for key, value in directives(unit) if key == "ExecStart"]
    words = unquote(line)
    if words[-2:-1] == ["--config"]:
        assert words[-1] == "${CREDENTIALS_DIRECTORY}/secrets.yaml"
        words = words[:-2]
    return [expand(specifiers(item)) for item in words]


def environment_of(unit: str) -> dict[str, str]:
    pairs = [unquote(value) for key, value in directives(unit) if key == "Environment"]
    return dict(specifiers(pair).split("=", 1) for (pair,) in pairs)


def unit_of(release: Release) -> str:
    return release.files[release.plan.unit]


def make(spec: ServerSpec = SPEC, secrets: dict[str, str] | None = None, key: str = KEY, **changes: Any) -> Release:
    return render(dataclasses.replace(spec, **changes), secrets or {}, key, TEMPLATES)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_words_come_through(text: str) -> None:
    assert exec_words(f"{word(text)} {word(text)}") == [text, text]
    assert [specifiers(item) for item in unquote(assignment(f"A={text}"))] == [f"A={text}"]


@settings(deadline=None)
@given(st.lists(TEXT, max_size=5))
def test_any_words_come_through(words: list[str]) -> None:
    assert exec_words(" ".join(map(word, words))) == words


@settings(deadline=None)
@given(TEXT)
def test_any_variable_comes_through(text: str) -> None:
    assert [specifiers(item) for item in unquote(assignment(f"A={text}"))] == [f"A={text}"]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True), TEXT | st.lists(TEXT, min_size=1), max_size=4
    )
)
def test_a_unit_runs_the_words_of_its_plan(flags: dict[str, Any]) -> None:
    release = make(
        flags=flags,
        environment={"A": "x $y %z"},
        secrets={"api-key": "k"},
        spec=dataclasses.replace(SPEC, secrets={"api-key": Secret("K")}),
    )
    assert command_of(unit_of(release)) == [release.plan.python, *release.plan.argv]
    assert environment_of(unit_of(release)) == release.plan.environment


def test_plain_words_stay_readable() -> None:
    assert word("/srv/models/x-1.5_b") == "/srv/models/x-1.5_b"
    assert word("a b") == '"a b"'


def test_the_shipped_pairs_render() -> None:
    library = load_library(ROOT / "inventory")
    for model in library.models:
        for profile in library.profiles:
            release = render(server_spec(library, "main", model, profile), {}, "", TEMPLATES)
            assert re.fullmatch(rf"{profile}-[0-9a-f]{{12}}", release.name)
            assert decode(Plan, release.files["plan.json"]) == release.plan
            assert command_of(unit_of(release)) == [release.plan.python, *release.plan.argv]
            assert "logging.json" not in release.files


def test_every_directive_is_known() -> None:
    names = {key for key, _ in directives(unit_of(make()))}
    assert not names & {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"}
    assert {"Restart", "StartLimitBurst", "KillSignal", "LimitMEMLOCK", "CacheDirectory", "ProtectHome"} <= names


def test_gpus_become_variables_and_win_no_fight() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in make().plan.environment
    chosen = make(gpus=("2", "3")).plan.environment
    assert (chosen["CUDA_DEVICE_ORDER"], chosen["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "2,3")


def test_the_guard_tells_a_unit_with_pinned_gpus_their_indices_of_today() -> None:
    assert "EnvironmentFile" not in unit_of(make())
    assert "EnvironmentFile=-/run/kernelswap/main/gpus.env\n" in unit_of(make(gpus=("GPU-a", "GPU-b")))


@pytest.mark.parametrize(("code", "starts"), [(0, True), (1, True), (DIRTY, False), (None, True)])
def test_a_unit_is_kept_down_only_by_a_guard_that_saw_dirt(code: int | None, starts: bool, tmp_path: Path) -> None:
    """code: the guard's exit code; None: there is no agent on the host."""
    script = tmp_path / "agent.pyz"
    if code is not None:
        script.write_text(f"raise SystemExit({code})")
    guard = next(value for key, value in directives(unit_of(make())) if key == "ExecStartPre" and " guard " in value)
    command = guard.removeprefix("+").replace(AGENT_PATH, str(script)).replace("$$", "$")
    assert (subprocess.run(["/bin/sh", "-c", command], check=False).returncode == 0) is starts


def test_the_users_environment_wins() -> None:
    environment = make(environment={"HOME": "/data", "NEW": "1"}).plan.environment
    assert (environment["HOME"], environment["NEW"], environment["PYTHONUNBUFFERED"]) == ("/data", "1", "1")


def test_only_gpu_servers_wake_the_driver() -> None:
    assert "nvidia-modprobe" in unit_of(make())
    assert "nvidia-modprobe" not in unit_of(make(flags={"device": "cpu"}))


@pytest.mark.parametrize(
    ("path", "protection"), [("/srv/m", "yes"), ("/home/me/m", "read-only"), ("/root/m", "read-only")]
)
def test_what_lies_in_a_home_stays_readable(path: str, protection: str) -> None:
    assert f"ProtectHome={protection}\n" in unit_of(make(path=path))


CHANGES: list[dict[str, Any]] = [
    {"path": "/srv/other"},
    {"served_name": "other"},
    {"host": "127.0.0.1"},
    {"port": 30001},
    {"user": "other"},
    {"python": "/opt/other/bin/python"},
    {"gpus": ("0",)},
    {"flags": {"a": True}},
    {"environment": {"A": "1"}},
    {"instance": "other"},
    {"model": "other"},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_whatever_changes_the_server_changes_its_digest(change: dict[str, Any]) -> None:
    assert make(**change).name != make().name


@pytest.mark.parametrize(
    "change",
    [
        {"verify": Verify()},
        {"timeouts": Timeouts(ready=5)},
        {"expose": "ready"},
        {"memory_margin": 5},
        {"disk_free": 5},
        {"end_foreign": True},
        {"retention": Retention(2, 3)},
        {"traffic": Traffic("10.0.0.5", (Router("http://r1"),)), "traffic_secrets": {"routers/0/key": Secret("RK")}},
        {"gpu_count": 8},
        {"flags": {"b": 1, "a": None}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_only_judges_the_server_does_not(change: dict[str, Any]) -> None:
    assert make(**change).name.removeprefix("p-") == make(
        flags=(change.get("flags") and {"b": 1}) or {}
    ).name.removeprefix("p-")


def test_the_digest_knows_the_secrets_and_only_the_key_makes_it_readable() -> None:
    spec = dataclasses.replace(SPEC, secrets={"api-key": Secret("K")})
    names = {make(spec, {"api-key": value}, key).name for value in ("a", "b") for key in (KEY, "11" * 32)}
    assert len(names) == 4
    assert make(spec, {"api-key": "a"}).name == make(spec, {"api-key": "a"}).name
    assert make(key="").name == make(key=KEY).name


def test_secrets_are_in_no_text_but_their_own() -> None:
    spec = dataclasses.replace(SPEC, secrets={"api-key": Secret("K")})
    release = make(spec, {"api-key": 'hunter2é"\\'})
    assert "hunter2" not in "".join(release.files.values()) + repr(release) + release.name
    assert release.secrets is not None
    assert release.secrets.reveal() == 'api-key: "hunter2é\\"\\\\"\n'
    assert release.plan.secret_flags == ("api-key",)
    assert f"LoadCredential=secrets.yaml:/etc/kernelswap/main/releases/{release.name}/secrets.yaml\n" in unit_of(
        release
    )
    config = json.loads(release.files["logging.json"])
    assert config["loggers"]["sglang.srt.entrypoints.engine"]["level"] == "WARNING"
    assert config["root"]["level"] == "INFO"
    assert release.plan.environment["SGLANG_LOGGING_CONFIG_PATH"].endswith(f"/{release.name}/logging.json")


def test_logging_keeps_the_level_that_was_asked_for() -> None:
    spec = dataclasses.replace(SPEC, secrets={"api-key": Secret("K")}, flags={"log-level": "debug"})
    config = json.loads(make(spec, {"api-key": "a"}).files["logging.json"])
    assert (config["root"]["level"], config["loggers"]["httpx"]["level"]) == ("DEBUG", "WARNING")


def test_a_preview_needs_no_secret() -> None:
    assert preview(SPEC, TEMPLATES) == make()
    shown = preview(dataclasses.replace(SPEC, secrets={"api-key": Secret("K")}), TEMPLATES)
    assert (shown.name, shown.secrets) == ("RELEASE", None)


def test_render_refuses_secrets_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="api-key"):
        make(secrets={"api-key": "a"})
    with pytest.raises(ValueError, match="the host's key"):
        make(dataclasses.replace(SPEC, secrets={"api-key": Secret("K")}), {"api-key": "a"}, key="")


def test_secrets_come_from_the_controllers_environment_or_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from-file\n")
    spec = dataclasses.replace(SPEC, secrets={"a": Secret(env="A"), "b": Secret(file=str(tmp_path / "key"))})
    assert resolve_secrets(spec, {"A": "from-env"}) == {"a": "from-env", "b": "from-file"}


def test_all_faults_of_secrets_are_reported_and_none_shows_a_value(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xe9")
    names = {"a": "-hunter2", "b": "", "c": "hunter2\x01", "d": "hunter2\nx"}
    sources = {name: Secret(env=name) for name in (*names, "e")}
    sources |= {"f": Secret(file=str(tmp_path / "none")), "g": Secret(file=str(tmp_path / "latin"))}
    with pytest.raises(ConfigError) as error:
        resolve_secrets(dataclasses.replace(SPEC, secrets=sources), names)
    assert len(error.value.faults) == 7
    assert "hunter2" not in str(error.value)
    assert "secrets/e: the variable e is not set; export e" in str(error.value)


def test_a_template_that_asks_for_too_much_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "sglang.service.j2").write_text("{{ nothing }}")
    with pytest.raises(ConfigError, match=r"sglang\.service\.j2: cannot be rendered: 'nothing' is undefined"):
        render(SPEC, {}, "", tmp_path)
    with pytest.raises(ConfigError, match="cannot be rendered"):
        render(SPEC, {}, "", tmp_path / "none")
    (tmp_path / "kernelswap-recover@.service.j2").write_bytes(b"# Ger\xe4t")
    with pytest.raises(ConfigError, match=r"recover@\.service\.j2: cannot be rendered: .*decode"):
        fill(tmp_path, "kernelswap-recover@.service.j2", {})


def test_a_unit_that_systemd_would_cut_off_is_a_fault() -> None:
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        make(flags={f"f{number}": "x" * 100_000 for number in range(11)})


def test_hidden_shows_nothing() -> None:
    assert (repr(Hidden("x")), f"{Hidden('x')}", str([Hidden("x")])) == ("<hidden>", "<hidden>", "[<hidden>]")
    assert Hidden("x") == Hidden("x") != Hidden("y")


TRAFFIC = dataclasses.replace(
    SPEC,
    traffic=Traffic("10.0.0.5", (Router("http://r1"), Router("http://r2")), hooks={"result": Hook(timeout=3)}),
    traffic_secrets={"routers/1/key": Secret("RK"), "hooks/result/webhook": Secret("URL")},
)


def test_the_secrets_of_traffic_are_in_its_file_alone() -> None:
    values = {"routers/1/key": "r0uter", "hooks/result/webhook": "https://hooks.example.net/t0k3n"}
    text = traffic_text(TRAFFIC, values)
    assert decode(Traffic, text.reveal()) == Traffic(
        "10.0.0.5",
        (Router("http://r1"), Router("http://r2", "r0uter")),
        hooks={"result": Hook(webhook="https://hooks.example.net/t0k3n", timeout=3)},
    )
    assert "r0uter" not in repr(decode(Traffic, text.reveal())) + repr(text)
    release = make(TRAFFIC, values)
    assert release.secrets is None
    assert "r0uter" not in str(release.files)
    assert traffic_text(SPEC, {}) == NO_TRAFFIC


@pytest.mark.parametrize(
    ("environ", "faults"),
    [
        (
            {},
            "host h: instance main: routers/1/key: the variable RK is not set; export RK\n"
            "host h: instance main: hooks/result/webhook: the variable URL is not set; export URL",
        ),
        (
            {"RK": "a b", "URL": "hooks.example.net/t0k3n"},
            "host h: instance main: routers/1/key: holds a space, a line break or a character outside ASCII, and "
            "SGLang would answer 500; choose another\n"
            "host h: instance main: hooks/result/webhook: is not a URL; set it to the whole URL, http:// or https://",
        ),
    ],
)
def test_faults_of_traffics_secrets(environ: dict[str, str], faults: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_secrets(TRAFFIC, environ, "host h: ")
    assert str(error.value) == faults
