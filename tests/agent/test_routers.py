from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from router import FakeRouter

from kernelswap.agent import network, routers
from kernelswap.agent.routers import Member, RouterError, Unreachable
from kernelswap.protocol import Router

US = "http://10.0.0.5:30000"
OTHER = "http://10.0.0.6:30000"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "LIMIT", 3.0)
    monkeypatch.setattr(network, "own_addresses", lambda: ["127.0.0.0/8", "::1/128", "10.0.0.5", "fd00::5"])


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    router = FakeRouter(OTHER, US)
    yield router
    router.close()


def member(router: FakeRouter, key: str = "") -> Member:
    return Member(Router(router.url, key), "10.0.0.5", 30000)


def test_out_and_in_again(router: FakeRouter) -> None:
    us = member(router)
    assert us.leave()
    assert list(router.workers) == [OTHER]
    assert not us.leave(), "it was out"
    us.join()
    assert sorted(router.workers) == [US, OTHER]
    us.join()
    assert router.entries == [{"url": US}], "what is listed is not put in again"


def test_only_a_router_that_asks_for_a_key_gets_the_servers(router: FakeRouter) -> None:
    router.key = "rk"
    with pytest.raises(RouterError, match="refuses our key: see `key` of `routers`"):
        member(router).listed()
    member(router, "rk").leave()
    member(router, "rk").join("sk")
    router.key = ""
    open_to_all = member(router)
    open_to_all.leave()
    open_to_all.join("sk")
    assert router.entries == [{"url": US, "api_key": "sk"}, {"url": US}]


@pytest.mark.parametrize(
    ("url", "ours"),
    [
        (US, True),
        (US + "/", True),
        (US + "@1", True),  # one of its ranks, with --dp-aware
        ("http://[fd00::5]:30000", True),
        ("http://127.0.0.1:30000", True),  # of a router on this very host
        ("http://127.0.0.1:30000@0", True),
        ("http://10.0.0.5:30001", False),
        ("http://10.0.0.50:30000", False),
        ("http://no-such-host.invalid:30000", False),
        ("http://10.0.0.5:x", False),
        ("grpc://10.0.0.5", False),
        ("", False),
    ],
)
def test_which_entries_are_ours(url: str, ours: bool, router: FakeRouter) -> None:
    router.workers = {url: "id"}
    assert bool(member(router).listed()) is ours


def test_loopback_in_the_list_of_another_host_is_not_ours(monkeypatch: pytest.MonkeyPatch, router: FakeRouter) -> None:
    us = member(router)
    rows = [routers.Worker("id", "http://127.0.0.1:30000", True)]
    monkeypatch.setattr(routers, "workers", lambda _router: rows)
    assert us.listed() == rows
    assert dataclasses.replace(us, router=Router("http://10.0.0.9:30000")).listed() == []
    assert dataclasses.replace(us, router=Router("http://10.0.0.5:8000")).listed() == rows


def test_a_router_that_keeps_it_is_told_from_one_that_does_not_answer(router: FakeRouter) -> None:
    router.stuck = True
    with pytest.raises(RouterError, match=f"still lists {US}: take it out by hand"):
        member(router).leave()
    router.close()
    with pytest.raises(Unreachable, match=f"router {router.url} does not answer: "):
        member(router).leave()


@pytest.mark.parametrize(("attribute", "how"), [("healthy", "takes it for unhealthy"), ("deaf", "does not list it")])
def test_in_is_only_what_the_list_says(
    attribute: str, how: str, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "AGAIN", 0.3)
    us = member(router)
    us.leave()
    setattr(router, attribute, attribute == "deaf")
    with pytest.raises(RouterError, match=f"{how} after 1 s: see that it reaches {US}/health"):
        us.join(limit=1)
    assert len(router.entries) > (attribute == "deaf"), "one that forgets is asked again"


@pytest.mark.parametrize("answer", ["<html>hello</html>", "[]", "{}", '{"workers": 3}', '{"workers": [{"id": 1}]}'])
def test_something_else_is_no_router(answer: str, router: FakeRouter) -> None:
    router.nonsense = answer
    with pytest.raises(RouterError, match=r"does not answer as an sglang-router of 0\.3 or later does"):
        member(router).listed()
