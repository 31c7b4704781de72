"""The smoke and the soak with the lab's stand-in for SGLang; tests/lab/test_broken.py has the real one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kernelswap.agent import server
from kernelswap.agent.client import Choice, Client, Reply
from kernelswap.agent.verify import health, smoke, soak
from kernelswap.protocol import Answer, Plan, Throughput, Timeouts, Verify

PLAN = Plan(
    "main", "b-2", "b", "m", "/p", (), {}, "root", "/m", "m", "127.0.0.1", 30000,
    verify=Verify(answers=(Answer("What is 2+2?", r"\b4\b"),), min_healthy=0.1), timeouts=Timeouts(smoke=30, soak=30),
)  # fmt: skip
Start = Callable[[str], Client]


@pytest.fixture(autouse=True)
def quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "faults", lambda *_others: [])


def test_a_sound_server(start: Start) -> None:
    client = start("")
    seen, numbers = smoke.check(PLAN, client, 0)
    assert "1 known answer(s) right, 0 of 16 texts look garbled" in seen
    assert "no grammar backend" in seen
    assert numbers == {"garbled": 0.0}
    seen, numbers = soak.check(PLAN, client, 0)
    assert numbers["requests"] >= soak.REQUESTS
    assert seen.startswith(f"{numbers['requests']:.0f} requests, ")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage", ["answer to 'What is 2+2?'", "burst: 'What is 2+2?'"]),
        ("nan", ["tokens: ", "burst: ", "long prompt: "]),
    ],
)
def test_all_faults_at_once(fault: str, words: list[str], start: Start) -> None:
    with pytest.raises(server.Failed) as failure:
        smoke.check(PLAN, start(fault), 0)
    assert [word for word in words if word not in failure.value.cause.what] == []
    assert failure.value.cause.blame == "release"


def test_a_slow_server_is_not_asked_for_ever(start: Start) -> None:
    begin = time.monotonic()
    with pytest.raises(server.Failed, match=r"not done in time: during .*: raise timeouts.smoke"):
        smoke.check(replace(PLAN, timeouts=Timeouts(smoke=1)), start("never-generates"), 0)
    assert time.monotonic() - begin < 10


def test_a_server_that_hangs_after_a_while(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "PATIENCE", 0.5)
    client = start("hangs-after:100")
    with pytest.raises(server.Failed, match=r"request \d+: POST /generate: timed out") as failure:
        soak.check(PLAN, client, 0)
    assert failure.value.cause.signature == "soak"


class Scripted:
    """Gives texts from a list, plain and streamed, and tells no tokens."""

    def __init__(self, plain: list[str], stream: str, choices: list[Choice] | None = None) -> None:
        self.texts, self.streamed, self.choices = plain, stream, choices or []
        self.asked = smoke.Asked(Client("http://127.0.0.1:1", "m"), time.monotonic() + 9)

    def plain(self, *_others: object) -> Reply:
        return Reply(self.texts.pop(0), cut=False)

    def stream(self, *_others: object) -> Reply:
        return Reply(self.streamed, cut=False)

    def faults(self) -> list[str]:
        return smoke._check_stream(self.asked, self.plain, self.stream, lambda *_others: self.choices)


@pytest.mark.parametrize(
    ("plain", "stream", "words"),
    [
        (["a", "a"], "a", ""),
        (["cold", "a"], "a", ""),  # the first fills the prefix cache; another kernel shape is no fault
        (["a", "a", "a", "a", "a"], "b", "streamed 'b', and answered 'a' without"),
        (["a", "a", "b", "a", "b"], "b", ""),  # a near tie
        (["a", "a", "c", "d", "e"], "b", "asked again, answered 'a', 'c', and streamed 'b'"),
        (["", ""], "", "the text is empty"),
        (["a", "a"], "", "the stream is empty"),
    ],
)
def test_plain_and_streamed(plain: list[str], stream: str, words: str) -> None:
    assert smoke._some(*Scripted(plain, stream).faults()) == ([words] if words else [])


CHOICES = [
    Choice(" The", ((-0.1, " The"), (-3.0, " A"))),
    Choice(" river", ((-0.7, " river"), (-0.9, " riv"), (-1.6, " lake"))),
    Choice(" runs", ((-0.6, " runs"), (-1.0, " flows"), (-1.09, "."))),
]


@pytest.mark.parametrize(
    ("stream", "sound"),
    [
        (" The river flows on", True),  # 0.4 nats
        (" The river. And", True),
        ("The  river flows", True),  # blanks aside
        (" The rivulet", True),  # it begins as the chosen one, and is another
        (" The lake", False),  # 0.9 nats
        (" The river", False),  # it lacks some
        (" A river runs", False),
        (" The river \ufffdruns", False),
        (" river runs", False),
    ],
)
def test_a_stream_that_takes_the_other_of_two_likely_tokens(stream: str, sound: bool) -> None:
    said = " The river runs"
    assert (Scripted([said] * 5, stream, CHOICES).faults() == []) is sound
    assert Scripted([said] * 5, stream).faults() != [], "where nothing tells how likely they were"


def test_a_thought_that_was_cut_says_so() -> None:
    class Thinks(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"reasoning_content": "Hm"}, "finish_reason": "length"}]}')

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Thinks) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        asked = smoke.Asked(Client(f"http://127.0.0.1:{http.server_port}", "m"), time.monotonic() + 9)
        (fault,) = smoke.check_answer(asked, Answer("2+2", r"\b4\b", 64))
        assert "got 'Hm' (cut at max-tokens 64" in fault
        assert smoke.check_answer(asked, Answer("2+2", "Hm", 64)) == []
        http.shutdown()


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({"chunked_prefill_size": 8192, "context_length": 131072, "max_total_num_tokens": 470000}, 10240),
        ({"chunked_prefill_size": 2048, "context_length": None}, 2560),
        ({"chunked_prefill_size": -1}, 2048),
        ({}, 2048),
        ({"chunked_prefill_size": 32768}, 16384),
        ({"chunked_prefill_size": 8192, "max_req_input_len": 2042}, 1614),
    ],
)
def test_the_long_prompt(info: dict[str, int], tokens: int) -> None:
    assert smoke.long_prompt(info) == tokens


@pytest.mark.parametrize(
    ("text", "cut", "right"),
    [
        ('{"city": "東京", "large": true}', False, True),
        ('{"city": "東京",\n "large": \n\n\n', True, True),
        ('{"city": "東京", "large": ', False, False),
        ('{"city": "Berlin", "large": true}', False, False),
        ('{"city": "Paris"}', False, False),
        ('{"city": "Paris", "large": 1}', False, False),
        ('{"city": "Paris", "large": true, "more": 1}', False, False),
        ("[]", False, False),
        ("", False, False),
    ],
)
def test_an_answer_in_json(text: str, cut: bool, right: bool) -> None:
    assert (smoke.json_fault(text, cut) == "") == right


@pytest.mark.parametrize(
    ("flags", "concurrency", "width"),
    [({}, None, 8), ({"max-running-requests": "4"}, None, 4), ({"max-running-requests": "4"}, 16, 16), ({}, 512, 64)],
)
def test_the_burst(flags: dict[str, str], concurrency: int | None, width: int) -> None:
    run = Throughput(concurrency, 1, 1, 1) if concurrency else None
    assert smoke.burst(replace(PLAN, flags=flags, verify=Verify(throughput=run))) == width
