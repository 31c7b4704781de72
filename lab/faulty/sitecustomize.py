"""Breaks the lab's real SGLang on purpose, where a broken kernel or engine would (put this folder before the shim on
PYTHONPATH). LAB_FAULT names the fault, or is @FILE with its name, read again and again, so that one server shows all:

    nan                the logits are NaN, as after an overflow
    nan-logprobs       only the logprobs are
    corrupt-token      one token in 50 is another one than was sampled
    corrupt-logits     one choice in 50 is made from wrong logits, logprobs included
    repeat             the same token for ever
    salad              words of many scripts
    replacement        every fourth character is U+FFFD
    multibyte          characters outside ASCII become others
    empty              the text is empty
    one-token          generation stops after one token
    hang-after-100     the 101st request and all later ones are never answered
    no-generation      200 at once, with nothing in it
    canned             200 at once, with the same tokens for everyone
    stream-differs     a stream lacks some of the text

and in the weights, as a wrong loader or kernel makes them, when they are loaded (also by /update_weights_from_disk):

    permuted-expert      the rows of one projection of an expert no longer fit those of the others
    exchanged-experts    what the router sends to one of two experts reaches the other
    zero-router          a layer's router finds all experts equally good
    scaled-expert        by 1.05
    scaled-norm          by 1.5
    swapped-rare-tokens  two tokens' embeddings

A fault counts and draws afresh when the file changes. LAB_SLOW=1.15 makes each forward pass take 15 % longer, as a
worse kernel would; 1.15x0.012 makes it take 15 % longer than the 12 ms, or more, that it has taken before: as a GPU's
does, whose time is not the CPU's. @FILE is read at each pass. Nothing is installed where neither is set.
"""

import asyncio
import importlib.abc
import importlib.util
import json
import os
import random
import re
import sys
import time
from pathlib import Path

SHIM = Path("/opt/sglang/shim/sitecustomize.py")
WORDS = ["обеспечение", "النهر", "ราคา", "function", "的", "पानी", "город", "그리고", "system", "ποταμός"]


class Fault:
    """Which fault there is now. requests: how many it has seen."""

    def __init__(self, setting):
        self.file = Path(setting[1:]) if setting.startswith("@") else None
        self.name = "" if self.file else setting
        self.stamp = None
        self.requests = 0

    def __call__(self, *names):
        """Whether it is one of these."""
        if self.file:
            try:
                stamp = self.file.stat().st_mtime_ns
                if stamp != self.stamp:
                    self.name, self.stamp, self.requests = self.file.read_text().strip(), stamp, 0
            except OSError:
                self.name = ""
        return self.name in names


fault = Fault(os.environ.get("LAB_FAULT", ""))
SLOW = os.environ.get("LAB_SLOW", "")


def break_sampler(module):
    sound = module.Sampler.forward

    def forward(self, logits_output, *others, **more):
        logits = logits_output.next_token_logits
        if fault("nan"):
            logits.fill_(float("nan"))
        elif fault("repeat"):
            logits[:, 300] += 1000
        elif fault("corrupt-logits"):
            for row in logits:
                if random.random() < 0.02:
                    row[random.randrange(len(row))] += 1000
        tokens = sound(self, logits_output, *others, **more)
        if fault("nan-logprobs") and getattr(logits_output, "next_token_logprobs", None) is not None:
            logits_output.next_token_logprobs = logits_output.next_token_logprobs * float("nan")
        elif fault("corrupt-token"):
            for index in range(len(tokens)):
                if random.random() < 0.02:
                    tokens[index] = random.randrange(logits.shape[-1])
        return tokens

    module.Sampler.forward = forward


def break_detokenizer(module):
    sound = module.DetokenizerManager._decode_batch_token_id_output

    def decode(self, batch):
        return [spoil(text) for text in sound(self, batch)]

    module.DetokenizerManager._decode_batch_token_id_output = decode


def spoil(text):
    if fault("empty"):
        return ""
    if fault("replacement"):
        return "".join("\ufffd" if index % 4 == 0 else char for index, char in enumerate(text))
    if fault("salad"):
        return "".join(random.choice(WORDS) + " " for _ in text.split())
    if fault("multibyte"):
        return "".join(char if char.isascii() else "�" if ord(char) % 2 else "Ã" for char in text)
    return text


def break_parameters(module):
    sound = module.SamplingParams.normalize

    def normalize(self, tokenizer):
        if fault("one-token"):
            self.max_new_tokens = min(1, self.max_new_tokens or 1)
        return sound(self, tokenizer)

    module.SamplingParams.normalize = normalize


def break_requests(module):
    sound = module.TokenizerManager.generate_request

    async def generate_request(self, *others, **more):
        if fault("hang-after-100"):
            fault.requests += 1
            if fault.requests > 100:
                await asyncio.sleep(86400)
        async for part in sound(self, *others, **more):
            yield part

    module.TokenizerManager.generate_request = generate_request


def exchange(name, weight):
    other = {"0": "1", "1": "0"}
    return re.sub(r"(layers\.0\.mlp\.experts\.)([01])\b", lambda found: found[1] + other[found[2]], name), weight


def change(place, how):
    return lambda name, weight: (name, how(weight) if name.endswith(place) else weight)


WEIGHTS = {
    "permuted-expert": change("layers.0.mlp.experts.0.up_proj.weight", lambda weight: weight.roll(1, dims=0)),
    "exchanged-experts": exchange,
    "zero-router": change("layers.0.mlp.gate.weight", lambda weight: weight * 0),
    "scaled-expert": change("layers.0.mlp.experts.0.down_proj.weight", lambda weight: weight * 1.05),
    "scaled-norm": change("layers.1.input_layernorm.weight", lambda weight: weight * 1.5),
    "swapped-rare-tokens": change(
        "embed_tokens.weight", lambda rows: rows[[*range(300), 301, 300, *range(302, len(rows))]]
    ),
}


def break_weights(module):
    sound = module.Qwen3MoeForCausalLM.load_weights

    def load_weights(self, weights, *others, **more):
        damage = next((how for name, how in WEIGHTS.items() if fault(name)), lambda *pair: pair)
        return sound(self, (damage(*pair) for pair in weights), *others, **more)

    module.Qwen3MoeForCausalLM.load_weights = load_weights


class Http:
    """Stands before SGLang's own application."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        asked = scope["type"] == "http" and scope["path"] in ("/generate", "/v1/completions", "/v1/chat/completions")
        if asked and fault("no-generation", "canned"):
            return await self.can(scope, receive, send)
        if asked and fault("stream-differs"):
            return await self.app(scope, receive, lambda message: self.thin(message, send))
        return await self.app(scope, receive, send)

    async def can(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        asked = json.loads(body)
        text, rows = "", []
        if fault("canned"):
            count = asked.get("sampling_params", {}).get("max_new_tokens", 16)
            text, rows = "Well" * count, [[-1.0 / (2 + index), 7, "Well"] for index in range(count)]
        meta = {"output_token_logprobs": rows, "completion_tokens": len(rows), "prompt_tokens": 9}
        choice = {"text": text, "message": {"content": text}, "finish_reason": "length"}
        answer = json.dumps({"text": text, "meta_info": meta, "choices": [choice], "usage": {}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def thin(self, message, send):
        if message.get("body", b"").startswith(b"data: {"):
            fault.requests += 1
            if fault.requests % 5 == 0:
                return
        await send(message)


def slow_down(module):
    sound = module.ModelRunner.forward

    def forward(self, *others, **more):
        start = time.perf_counter()
        result = sound(self, *others, **more)
        factor, _, least = (Path(SLOW[1:]).read_text() if SLOW.startswith("@") else SLOW).partition("x")
        took = max(time.perf_counter() - start, float(least or 0))
        time.sleep(max(0.0, start + took * float(factor) - time.perf_counter()))
        return result

    module.ModelRunner.forward = forward


FAULTS = {
    "sglang.srt.layers.sampler": break_sampler,
    "sglang.srt.managers.detokenizer_manager": break_detokenizer,
    "sglang.srt.sampling.sampling_params": break_parameters,
    "sglang.srt.managers.tokenizer_manager": break_requests,
    "sglang.srt.models.qwen3_moe": break_weights,
    "sglang.srt.entrypoints.http_server": lambda module: module.app.add_middleware(Http),
}
BREAKS = {
    **(FAULTS if os.environ.get("LAB_FAULT") else {}),
    **({"sglang.srt.model_executor.model_runner": slow_down} if SLOW else {}),
}


class Breaker(importlib.abc.MetaPathFinder):
    """Breaks a module just after it was imported."""

    def find_spec(self, name, path=None, target=None):
        if name not in BREAKS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        sound = spec.loader.exec_module

        def exec_module(module):
            sound(module)
            BREAKS[name](module)

        spec.loader.exec_module = exec_module
        return spec


if SHIM.exists():
    spec = importlib.util.spec_from_file_location("lab_shim", SHIM)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
if BREAKS:
    sys.meta_path.insert(0, Breaker())
