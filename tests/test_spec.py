"""Layers laid over each other, and the faults that only show then."""

from pathlib import Path
from typing import Any

import pytest

from kernelswap import flags
from kernelswap.errors import ConfigError
from kernelswap.library import Library, load_library
from kernelswap.protocol import (
    Accuracy,
    Answer,
    Drain,
    DriftLimits,
    Gpu,
    Hook,
    Retention,
    Router,
    Throughput,
    Timeouts,
    Traffic,
)
from kernelswap.render import NO_TRAFFIC, traffic_text
from kernelswap.servers import Secret, needs_pins, pin
from kernelswap.spec import host_specs, server_spec

GOOD = Path(__file__).parent / "profiles" / "good" / "inventory"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library(GOOD)


def faults(library: Library, data: dict[str, Any], **more: Any) -> str:
    with pytest.raises(ConfigError) as error:
        host_specs(library, data, "inv.py: h1", **more)
    return str(error.value)


def test_later_layers_win(library: Library) -> None:
    spec = server_spec(library, "main", "big", "fast")
    assert flags.display(spec.flags) == {
        "json-model-override-args": '{"only":"this"}',
        "chat-template": "override-of-common",
        "tp-size": "2",
        "allowed-media-domains": "a b",
    }
    assert spec.environment == {"A": "fast", "B": "big"}
    assert spec.verify.answers == (Answer("a", "b"),)
    assert spec.verify.throughput == Throughput(4, 32, 16, 20, floor=20.5)
    assert spec.timeouts == Timeouts(ready=77)
    assert (spec.user, spec.served_name, spec.expose) == ("serving", "big", "ready")
    assert (spec.gpus, spec.gpu_count, spec.schedulers) == ((), 2, 2)


def test_a_ladder_and_its_floors(library: Library) -> None:
    def run(**change: Any) -> Throughput | None:
        return server_spec(library, "main", "big", "fast", {"verify": {"throughput": change}}).verify.throughput

    floors = {8: 40, 1: 5}
    assert run(concurrency=[8, 1, 4], floor=floors) == Throughput(8, 32, 16, 20, 40, lower=(1, 4), floors={"1": 5})
    assert run(concurrency=[1, 8]) == Throughput(8, 32, 16, 20, 20.5, lower=(1,)), "one number is the highest's"
    assert run(floor=None, regression=None) == Throughput(4, 32, 16, 20, regression=None)
    with pytest.raises(ConfigError) as error:
        run(concurrency=[1, 8], floor={4: 9})
    assert str(error.value) == (
        "host data: verify/throughput/floor: is for 4 requests at once, which `concurrency` does not have; "
        "change one of them"
    )


def test_how_to_verify_may_stand_beside_a_host_and_what_may_not(library: Library) -> None:
    data = {"model": "big", "profile": "fast"}
    assert host_specs(library, {**data, "verify": "quick"})
    with pytest.raises(ConfigError, match="verify: belongs to an instance"):
        host_specs(library, {**data, "verify": {"throughput": None}})


def test_an_override_for_a_model_wins_over_its_profile(library: Library) -> None:
    spec = server_spec(library, "main", "big", "quick")
    assert "allowed-media-domains" not in spec.flags
    assert spec.environment == {"B": "big"}
    assert spec.verify.answers == ()
    assert spec.verify.throughput is None


def test_how_much_a_host_keeps(library: Library) -> None:
    assert server_spec(library, "main", "big", "fast").retention == Retention(releases=10, swaps=50)
    given = {"retention": {"releases": 3}}
    assert server_spec(library, "main", "big", "fast", given).retention == Retention(releases=3, swaps=50)


def test_how_far_answers_may_drift(library: Library) -> None:
    drift = {"noise-multiple": 2, "equal-tokens": 0.75, "mean-logprob": 0.25, "worst-prompt": 1.5, "kl": 1}
    accuracy = {"file": "/q.jsonl", "questions": 50, "shots": 2, "runs": 4, "floor": 1}
    verify = {"drift": {**drift, "prompts": "/p.json", "policy": "note"}, "accuracy": accuracy}
    spec = server_spec(library, "main", "big", "quick", {"verify": verify})
    assert spec.verify.drift == DriftLimits(2.0, 0.75, 0.25, 1.5, 1.0, "/p.json", "note")
    assert spec.verify.accuracy == Accuracy("/q.jsonl", 50, 2, 4, 1.0)
    spec = server_spec(library, "main", "big", "quick")
    assert (spec.verify.drift, spec.verify.accuracy) == (DriftLimits(), None)
    assert server_spec(library, "main", "big", "quick", {"verify": {"drift": None}}).verify.drift is None


def test_host_data_wins_over_all(library: Library) -> None:
    overrides = {
        "port": 31000,
        "gpus": [4, 5],
        "flags": {"chat-template": "host", "json-model-override-args": None, "mem-fraction-static": 0.5},
        "environment": {"A": "host"},
        "secrets": {"api-key": {"env": "KEY"}},
    }
    spec = server_spec(library, "left", "big", "fast", overrides)
    assert flags.display(spec.flags) == {
        "chat-template": "host",
        "mem-fraction-static": "0.5",
        "tp-size": "2",
        "allowed-media-domains": "a b",
    }
    assert (spec.port, spec.gpus, spec.gpu_count) == (31000, ("4", "5"), 2)
    assert spec.environment["A"] == "host"
    assert spec.secrets == {"api-key": Secret(env="KEY")}


def test_all_gpus_means_as_many_as_the_schedulers(library: Library) -> None:
    assert server_spec(library, "main", "big", "fast", {"gpus": "all"}).gpu_count == 2


def test_an_incomplete_model_is_a_fault_of_its_file(library: Library) -> None:
    with pytest.raises(ConfigError, match=r"models/base\.yaml: path: is missing"):
        server_spec(library, "main", "base", "fast")


def test_too_few_gpus_name_the_layer_that_gave_them(library: Library) -> None:
    with pytest.raises(ConfigError, match=r"models/base\.yaml:3: gpus: gives 2 GPUs, .* asks for 4"):
        server_spec(library, "main", "big", "fast", {"flags": {"tp-size": 4}})
    with pytest.raises(ConfigError, match=r"^inv: gpus: gives 1 GPU, "):
        server_spec(library, "main", "big", "fast", {"gpus": [7]}, "inv")


def test_unknown_names_suggest_the_nearest(library: Library) -> None:
    assert faults(library, {"model": "bigg", "profile": "fsat"}) == (
        "inv.py: h1: model: there is no model `bigg`; did you mean `big`?\n"
        "inv.py: h1: profile: there is no profile `fsat`; did you mean `fast`?"
    )


@pytest.mark.parametrize("name", ["", "Main", "-a", "a_b", "a/b", "a" * 33, "a b"])
def test_instance_names(library: Library, name: str) -> None:
    assert "cannot name an instance" in faults(library, {"model": "big", "profile": "fast", "instances": {name: {}}})


def test_one_instance_is_called_main(library: Library) -> None:
    (spec,) = host_specs(library, {"model": "big", "profile": "fast", "ssh_user": "ops"})
    assert (spec.instance, spec.profile) == ("main", "fast")


def test_the_command_line_replaces_every_profile(library: Library) -> None:
    data = {
        "model": "big",
        "instances": {"a": {"profile": "fast", "gpus": [0, 1]}, "b": {"port": 1, "gpus": [2, 3]}},
    }
    assert [spec.profile for spec in host_specs(library, data, profile="quick")] == ["quick", "quick"]
    assert faults(library, data) == "inv.py: h1: instances/b/profile: is missing; set `profile`"


def test_instances_share_neither_port_nor_gpu(library: Library) -> None:
    uniform = "use indices for all, or UUIDs for all"
    instances = {
        "a": {"gpus": [0, 1]},
        "b": {"gpus": [1, 2]},
        "c": {"port": 3},
        "d": {"port": 4, "gpus": ["GPU-a", "GPU-b"]},
    }
    assert faults(library, {"model": "big", "profile": "fast", "instances": instances}) == (
        "inv.py: h1: instances/b/port: is 30000, as of instance a; choose another port\n"
        "inv.py: h1: instances/b/gpus: has GPU 1, as instance a; give each instance its own\n"
        "inv.py: h1: instances/c/gpus: may share GPUs with instance a; list the GPUs of each instance, e.g. [0, 1]\n"
        "inv.py: h1: instances/c/gpus: may share GPUs with instance b; list the GPUs of each instance, e.g. [0, 1]\n"
        f"inv.py: h1: instances/d/gpus: cannot be compared with the GPUs of instance a; {uniform}\n"
        f"inv.py: h1: instances/d/gpus: cannot be compared with the GPUs of instance b; {uniform}\n"
        "inv.py: h1: instances/d/gpus: may share GPUs with instance c; list the GPUs of each instance, e.g. [0, 1]"
    )


def test_cpu_servers_share_no_gpus(library: Library) -> None:
    shipped = load_library(ROOT / "inventory")
    data = {"model": "tiny", "profile": "torch-native", "instances": {"a": {}, "b": {"port": 30001}}}
    assert len(host_specs(shipped, data)) == 2


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ({}, "inv.py: h1: model: is missing; set `model`\ninv.py: h1: profile: is missing; set `profile`"),
        ({"instances": []}, "inv.py: h1: instances: is not a dict of instances; write {name: {...}}"),
        (
            {"instances": {"a": 5}},
            "inv.py: h1: instances/a: is not a dict; write {model: ..., profile: ..., port: ..., gpus: ...}",
        ),
    ],
)
def test_shapes_of_host_data(library: Library, data: dict[str, Any], fault: str) -> None:
    assert faults(library, data) == fault


def test_faults_in_host_data_name_their_place(library: Library) -> None:
    instances = {"a": {"prot": 1, "flags": {"tp_size": 8}}, "b": {"port": "1", "retry": "x", "flags": {"x": {1, 2}}}}
    assert faults(library, {"model": "big", "profile": "fast", "instances": instances}) == (
        "inv.py: h1: instances/a/prot: unknown key; did you mean `port`?\n"
        "inv.py: h1: instances/a/flags/tp_size: is not spelled as Kernelswap spells flags; write `tp-size`\n"
        "inv.py: h1: instances/b/port: is not a whole number; write a number without quotes\n"
        "inv.py: h1: instances/b/retry: unknown key; use one of: address, disk-free, drain, end-foreign, engine, "
        "environment, expose, flags, gpus, hooks, host, memory-margin, path, port, requires, retention, routers, "
        "secrets, served-name, timeouts, user, verify\n"
        "inv.py: h1: instances/b/flags/x: is a set; use text, a number, true, null, a list or a map"
    )


def test_trtllm_over_tiny_keeps_what_the_cpu_needs() -> None:
    spec = server_spec(load_library(ROOT / "inventory"), "main", "tiny", "trtllm")
    shown = flags.display(spec.flags)
    assert shown["moe-runner-backend"] == "flashinfer_trtllm"
    assert (shown["device"], shown["attention-backend"], shown["sampling-backend"]) == (
        "cpu",
        "torch_native",
        "pytorch",
    )


@pytest.mark.parametrize("folder", ["node", "/", "/a b", "/a/", 7, True, "/a\n"])
def test_metrics_go_to_a_folder(library: Library, folder: Any) -> None:
    data = {"model": "big", "profile": "fast"}
    assert host_specs(library, {**data, "metrics": "/var/lib/prometheus/node-exporter"})
    with pytest.raises(ConfigError, match=r"metrics: .* is no absolute path without blanks; name the folder"):
        host_specs(library, {**data, "metrics": folder})


def test_keys_next_to_a_host_that_would_be_ignored_are_faults(library: Library) -> None:
    data = {"model": "m", "profile": "p", "port": 30001, "instance": {}, "ssh_user": "ops", "user": "me"}
    with pytest.raises(ConfigError) as caught:
        host_specs(library, data, "inventory/gpu.py: h1")
    texts = [str(fault) for fault in caught.value.faults]
    assert any("inventory/gpu.py: h1: port: belongs to an instance" in text for text in texts)
    assert any("instance: is not a key of a host; did you mean `instances`?" in text for text in texts)
    assert not any("user" in text for text in texts)


def test_gpus_named_by_index_are_pinned_by_uuid(library: Library) -> None:
    there = (Gpu(0, "GPU-a"), Gpu(1, "GPU-b"), Gpu(1, "MIG-1", parent="GPU-b"))
    by_index = server_spec(library, "main", "big", "fast", {"gpus": [1, 0]})
    assert needs_pins(by_index)
    assert pin(by_index, there).gpus == ("GPU-b", "GPU-a")
    by_uuid = server_spec(library, "main", "big", "fast", {"gpus": ["GPU-x", "MIG-1"]})
    assert not needs_pins(by_uuid)
    assert pin(by_uuid, ()) == by_uuid


def test_where_users_come_from_is_said_once_for_all_servers_of_a_host(library: Library) -> None:
    data = {
        "model": "big",
        "profile": "fast",
        "ssh_hostname": "10.0.0.5",
        "routers": ["http://r1:30000/", {"url": "http://r2:30000", "key": {"env": "RK"}}],
        "drain": {"deadline": 120, "then": "fail"},
        "hooks": {"drain": {"command": ["/bin/true", "a b"]}, "result": {"webhook": {"env": "URL"}, "timeout": 3}},
        "instances": {
            "left": {"flags": {"device": "cpu"}},
            "right": {"flags": {"device": "cpu"}, "port": 30001, "routers": [], "hooks": {"drain": None}},
        },
    }
    left, right = host_specs(library, data)
    hooks = {"drain": Hook(("/bin/true", "a b")), "result": Hook(timeout=3)}
    routers = (Router("http://r1:30000"), Router("http://r2:30000"))
    assert left.traffic == Traffic("10.0.0.5", routers, Drain(120, "fail"), hooks)
    assert left.traffic_secrets == {"routers/1/key": Secret("RK"), "hooks/result/webhook": Secret("URL")}
    assert right.traffic == Traffic("", (), Drain(120, "fail"), {"result": Hook(timeout=3)})


@pytest.mark.parametrize(
    ("data", "address"),
    [
        ({}, "gpu-01"),
        ({"ssh_hostname": "10.0.0.5"}, "10.0.0.5"),
        ({"ssh_hostname": "10.0.0.5", "instances": {"main": {"host": "10.1.0.5"}}}, "10.1.0.5"),
        ({"ssh_hostname": "10.0.0.5", "address": "10.2.0.5"}, "10.2.0.5"),
        ({"address": "10.2.0.5", "instances": {"main": {"address": "GPU.internal"}}}, "gpu.internal"),
    ],
)
def test_how_routers_reach_a_host(library: Library, data: dict[str, Any], address: str) -> None:
    base = {"model": "big", "profile": "fast", "routers": ["http://r1:30000"]}
    (spec,) = host_specs(library, {**base, **data}, name="gpu-01")
    assert spec.traffic.address == address


def test_faults_of_traffic_name_their_place(library: Library) -> None:
    base = {"model": "big", "profile": "fast"}
    assert faults(library, {**base, "routers": ["r1"], "drain": {"then": "kill"}}) == (
        "inv.py: h1: routers/0/url: is not the URL of a router; write http://ADDRESS:PORT, and nothing after it\n"
        "inv.py: h1: drain/then: is not one of the choices; use proceed or fail"
    )
    lonely = {"instances": {"main": {"host": "127.0.0.1"}}, "routers": ["http://r1:30000"]}
    assert faults(library, {**base, **lonely}) == (
        "inv.py: h1: instances/main/host: is 127.0.0.1, and its routers are elsewhere; listen on 0.0.0.0"
    )
    beside = {**base, **lonely, "routers": ["http://127.0.0.1:8000"]}
    assert host_specs(library, beside)[0].traffic.address == "127.0.0.1"


def test_a_host_that_only_has_a_router_serves_nothing(library: Library) -> None:
    assert host_specs(library, {"router": {}, "profile": "fast"}) == ()
    assert len(host_specs(library, {"router": {}, "model": "big", "profile": "fast"})) == 1


def test_a_host_that_says_nothing_of_traffic_is_told_nothing(library: Library) -> None:
    (spec,) = host_specs(library, {"model": "big", "profile": "fast"}, name="gpu-01")
    assert traffic_text(spec, {}) == NO_TRAFFIC
