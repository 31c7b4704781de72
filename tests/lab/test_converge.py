"""From an empty host to a committed server and back, by the literal command on real hosts."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from labhost import Host, Lab
from project import PROFILES, Project, asking, count_sessions, main_pid, release, traces, unused

from kernelswap.facts.host_state import GlancedHostState, HostState

pytestmark = pytest.mark.xdist_group("converge")


@pytest.fixture
def host(lab: Lab) -> Host:
    return unused(lab)


@pytest.fixture
def project(tmp_path: Path, host: Host) -> Project:
    return Project(tmp_path, [(host, {})]).write()


def test_the_same_command_twice_changes_nothing_and_costs_one_remote_command(project: Project, host: Host) -> None:
    count_sessions(host)
    first, asked = asking(host, lambda: project.deploy("--profile", "plain", "-y"))
    assert first.code == 0
    assert "committed plain-" in first
    assert asked == 5  # the question, the agent with its key and unit, its user, stage, swap
    pid, left = main_pid(host), traces(host)

    second, asked = asking(host, lambda: project.deploy("--profile", "plain", "-y"))
    assert second.code == 0
    assert "main: unchanged: plain-" in second
    assert "Starting operation" not in second
    assert asked == 1
    assert main_pid(host) == pid
    assert traces(host) == left

    question = {"instances": ["main"], "users": ["sglang"]}
    glance = host.output(GlancedHostState().command(**question).get_raw_value())
    seen, told = (GlancedHostState().process([text]) for text in (glance, inspected(host, question)))
    assert glance.startswith("glance ")
    assert seen
    assert told
    (ours,), (its,) = seen.instances, told.instances
    assert (ours.unit_since or 0) == pytest.approx(its.unit_since, abs=5)  # one since it starts, one since it runs
    its = replace(its, unit_since=ours.unit_since, main_pid=None)
    assert seen == replace(told, instances=(its,)), "what is seen at a glance is what the agent says"

    changed, asked = asking(host, lambda: project.deploy("--profile", "triton", "-y"))
    assert "committed triton-" in changed
    assert asked == 3  # the question, stage, swap
    assert project.deploy("--profile", "plain", "-y").code == 0
    pid = main_pid(host)

    by_data = project.deploy("--data", "profile=plain", "-y")
    declared = project.deploy("-y")
    assert "main: unchanged: plain-" in by_data
    assert "main: unchanged: plain-" in declared
    assert main_pid(host) == pid

    # A limit makes no other server: it is renewed in place.
    project.profile("plain", f"{PROFILES['plain']}\ntimeouts: {{ready: 61}}")
    renewed = project.deploy("-y")
    assert "timeouts.ready: 60.0 -> 61.0" in renewed
    assert main_pid(host) == pid
    assert json.loads(host.output("cat /etc/kernelswap/main/known-good/plan.json"))["timeouts"]["ready"] == 61
    assert "Starting operation" not in project.deploy("-y")


def inspected(host: Host, question: Mapping[str, Sequence[str]]) -> str:
    return host.output(HostState().command(**question).get_raw_value())


def test_dry_touches_nothing_and_shows_what_would_change(project: Project, host: Host) -> None:
    empty = traces(host)
    first = project.deploy("--dry", "--diff")
    assert first.code == 0
    assert "main: swap: nothing committed yet -> plain-" in first
    assert traces(host) == empty

    project.deploy("-y")
    left = traces(host)
    dry = project.deploy("--dry", "--diff", "--profile", "crash")
    assert dry.code == 0
    assert "moe-runner-backend: auto -> flashinfer_trtllm" in dry
    assert "environment STANDIN_FAULT: (unset) -> crash-at-load" in dry
    assert traces(host) == left


def test_a_crash_is_rolled_back_barred_and_tried_again_only_by_force(project: Project, host: Host) -> None:
    project.deploy("--profile", "plain", "-y")
    good = release(host)

    crash = project.deploy("--profile", "crash", "--reason", "faster", "-y")
    assert crash.code == 1
    assert "no kernel image is available" in crash
    assert f"{good} serves again" in crash
    assert release(host) == good

    pid = main_pid(host)
    barred = project.deploy("--profile", "crash", "-y")
    assert barred.code == 1
    assert "is barred: swap " in barred
    assert "no kernel image is available" in barred
    assert "--force" in barred
    assert project.deploy("--profile", "crash", "--dry").code == 1
    assert main_pid(host) == pid

    forced = project.deploy("--profile", "crash", "--force", "-y")
    assert forced.code == 1
    assert "rolled back" in forced.output.lower()
    assert release(host) == good

    told = project.kernelswap("history", host.name, "--inventory", "inventory/hosts.py")
    assert told.code == 0
    for words in ("rolled-back", "faster", "no kernel image is available", good):
        assert words in told
    status = project.kernelswap("status", "inventory/hosts.py", "--json")
    assert status.code == 0
    assert json.loads(status.output)[0]["state"]["instances"][0]["known_good"] == good


def test_rollback_goes_to_the_commit_before_and_no_further_than_there_is_one(project: Project, host: Host) -> None:
    nothing = project.deploy("--rollback", "-y")
    assert nothing.code == 1
    assert "nothing to go back to" in nothing
    releases = []
    for profile in ("plain", "triton", "cutlass"):
        assert project.deploy("--profile", profile, "-y").code == 0
        releases.append(release(host))
    for target in (releases[1], releases[0]):
        back = project.deploy("--rollback", "--reason", "slower", "-y")
        assert back.code == 0
        assert release(host) == target
    end = project.deploy("--rollback", "-y")
    assert end.code == 1
    assert "nothing to go back to" in end
    assert release(host) == releases[0]


def test_a_way_back_does_not_depend_on_the_profiles(project: Project, host: Host) -> None:
    project.deploy("--profile", "plain", "-y")
    good = release(host)
    project.deploy("--profile", "triton", "-y")
    project.profile("plain", "flags: [broken")
    assert project.deploy("-y").code == 1
    assert project.deploy("--rollback", "-y").code == 0
    assert release(host) == good


def test_faults_end_the_run_before_anything_is_touched(project: Project, host: Host) -> None:
    empty = traces(host)
    unknown = project.deploy("--profile", "tritn", "-y")
    assert unknown.code == 1
    assert "there is no profile `tritn`; did you mean `triton`?" in unknown
    project.profile("triton", "flags: {moe_runner: x}\nport: many")
    faults = project.deploy("--profile", "triton", "-y")
    assert faults.code == 1
    assert "profiles/triton.yaml:1: " in faults
    assert "profiles/triton.yaml:2: " in faults
    assert traces(host) == empty


def test_a_second_asker_follows_another_goal_waits_and_a_lost_connection_loses_nothing(
    project: Project, host: Host
) -> None:
    project.deploy("--profile", "plain", "-y")
    first = subprocess.Popen(project.words("--profile", "slow", "-y"), cwd=project.folder, stdout=subprocess.DEVNULL)
    while '"step":"ready"' not in host.output("cat /var/lib/kernelswap/main/journal.json 2>/dev/null || true"):
        time.sleep(0.3)
    other = project.deploy("--profile", "triton", "-y")
    assert other.code == 1
    assert "another swap is running: converge to slow-" in other
    first.kill()
    first.wait()
    same = project.deploy("--profile", "slow", "-y")
    assert same.code == 0
    assert "main: follow: already running: converge to slow-" in same
    assert "committed slow-" in same
    assert release(host).startswith("slow-")
    history = host.output("wc -l </var/lib/kernelswap/main/history.jsonl")
    assert int(history) == 2


def test_a_server_from_a_shell_is_named_and_taken_over_only_when_asked(project: Project, host: Host) -> None:
    words = "/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --port 30000"
    # In a scope, as a login session is.
    host.output(f"PYTHONPATH=/opt/standin systemd-run --scope {words} >/dev/null 2>&1 </dev/null & sleep 2")
    pid = host.output("pgrep -o -f '[s]glang.launch_server'")
    refused = project.deploy("-y")
    assert refused.code == 1
    assert f"pid {pid} of root since " in refused
    assert words in refused
    assert "--adopt" in refused
    assert host.output(f"test -d /proc/{pid} && echo alive") == "alive"
    adopted = project.deploy("--adopt", "-y")
    assert adopted.code == 0
    assert host.output(f"test -d /proc/{pid} || echo gone") == "gone"


def test_a_secret_shows_nowhere(project: Project, host: Host) -> None:
    (project.folder / "inventory" / "hosts.py").write_text(
        (project.folder / "inventory" / "hosts.py")
        .read_text()
        .replace(
            "'profile': 'plain'", "'profile': 'plain', 'instances': {'main': {'secrets': {'api-key': {'env': 'KEY'}}}}"
        )
    )
    shown = project.deploy("-y", "--diff", "-vvv", "--debug", KEY="opensesame-1")
    assert shown.code == 0
    assert "opensesame-1" not in shown
    secret = host.output("stat -c '%a %U' /etc/kernelswap/main/known-good/secrets.yaml")
    assert secret == "600 root"
    changed = project.deploy("-y", "--diff", "-vvv", KEY="opensesame-2")
    assert changed.code == 0
    assert "the unit's text or a secret's value" in changed
    assert "opensesame" not in changed
    # What SGLang itself logs at its start is the business of logging.json, which the stand-in does not read.
    assert "opensesame" not in host.output("journalctl -b -u 'kernelswap-*'; grep -r . /var/lib/kernelswap")


# What only mentions sglang, started by others.
SLEEP = "import time; time.sleep(900)"
BYSTANDERS = {
    "a log watched": "touch /tmp/sglang.log; tail -f /tmp/sglang.log",
    "an editor": f"exec -a vim python3 -c '{SLEEP}' sglang.md",
    "another user's python": f"exec runuser -u nobody -- python3 -c '{SLEEP}' -m sglang.launch_server --port 30000",
}


def test_an_adopted_server_comes_back_as_it_was_and_bystanders_live_on(project: Project, host: Host) -> None:
    words = "/usr/bin/python3 -m sglang.launch_server --model-path /srv/models/tiny --port 30000"
    settings = "PYTHONPATH=/opt/standin NOTE='a \"b\" $c'"
    host.run(f"cd /var/tmp; {settings} nohup {words} >/tmp/sglang.log 2>&1 </dev/null & sleep 2", user="ops")
    for number, command in enumerate(BYSTANDERS.values()):
        host.write(f"/root/{number}.sh", command)
        host.run(f"nohup bash /root/{number}.sh >/dev/null 2>&1 </dev/null & sleep 0.5")
    bystanders = host.output("pgrep -f '^tail -f /tmp/sglang.log|^vim |^python3 -c import time|^runuser'").split()
    assert len(bystanders) == 4
    session = subprocess.Popen([*host.ssh("ops"), "sleep 900; echo sglang"], stdin=subprocess.DEVNULL)

    crash = project.deploy("--adopt", "--profile", "crash", "-y")
    assert crash.code == 1
    assert "serves again" in crash
    assert host.output("curl -s -f http://127.0.0.1:30000/health && echo ok") == "ok"
    pid = host.output("pgrep -o -u ops -f '^/usr/bin/python3 -m sglang.launch_server'")
    assert host.output(f"tr '\\0' ' ' </proc/{pid}/cmdline").strip() == words
    assert host.output(f"readlink /proc/{pid}/cwd") == "/var/tmp"
    assert 'NOTE=a "b" $c' in host.output(f"tr '\\0' '\\n' </proc/{pid}/environ").splitlines()

    assert project.deploy("--adopt", "-y").code == 0
    assert release(host).startswith("plain-")
    assert host.output(f"test -d /proc/{pid} || echo gone") == "gone"
    assert host.output(f"for pid in {' '.join(bystanders)}; do test -d /proc/$pid || echo $pid; done") == ""
    assert session.poll() is None
    session.kill()
    session.wait()
