"""Run on a lab host by the engine's interpreter: what its SGLang says of command lines on simulated GPUs, asked twice.

stdin: {"probe": the text of kernelswap/agent/engine_probe.py, "cases": [[[major, minor], argv], ...]}. On stdout for
each case [the probe's answer, SGLang's own word, asked without anything of ours]. Each probe has a process of its own,
as on a real host, but for the imports that are not SGLang's; the direct questions share one.
"""

import contextlib
import importlib
import io
import json
import os
import sys

import sitecustomize  # the lab's shim

question = json.load(sys.stdin)
for module in (
    "torch",
    "transformers",
    "torchvision",
    "aiohttp",
    "fastapi",
    "pydantic",
    "zmq",
    "PIL",
    "openai",
    "xgrammar",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(module)


def probe(capability, argv):
    gpus = [{"capability": capability, "name": "a GPU", "memory": 96 * 2**30}]
    sys.stdin = io.StringIO(json.dumps({"argv": argv}))
    os.environ["KERNELSWAP_GPUS"] = json.dumps(gpus)
    sitecustomize.pretend(gpus)
    exec(compile(question["probe"], "probe", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does


def direct(cases):
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import prepare_server_args

    answers = []
    for capability, argv in cases:
        said = io.StringIO()
        answer = {"accepted": False, "says": "", "values": {}}
        with override_platform(**sitecustomize.facts(*capability)):
            try:
                with contextlib.redirect_stderr(said):
                    args = prepare_server_args(argv)
                args.resolve_once()
                args.check_server_args()
                values = {name: json.dumps(value, sort_keys=True) for name, value in args.resolved_dict().items()}
                answer.update(accepted=True, values=values)
            except SystemExit:
                answer["says"] = said.getvalue()
            except Exception as error:
                answer["says"] = str(error)
        answers.append(answer)
    print(json.dumps(answers), flush=True)
    os._exit(0)


def asked(ask, *words):
    """What a process of its own prints."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
        ask(*words)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.wait()
    return json.loads(text)


cases = question["cases"]
probed = [asked(probe, *case) for case in cases]
print(json.dumps(list(zip(probed, asked(direct, cases), strict=True))))
