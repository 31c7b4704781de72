"""The command line of the stand-in: SGLang's own flags, as far as tests use them, refused in argparse's own words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MOE_RUNNERS = "auto deep_gemm triton triton_kernel flashinfer_trtllm flashinfer_cutlass cutlass marlin"
ATTENTION = "triton torch_native flex_attention fa3 fa4 flashinfer flashmla trtllm_mla trtllm_mha"


class ServerArgs(argparse.Namespace):
    def resolve_once(self) -> None:
        """Nothing is decided later than by the parser."""


def prepare_server_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(prog="launch_server.py")
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--api-key")
    parser.add_argument("--moe-runner-backend", choices=MOE_RUNNERS.split(), default="auto")
    parser.add_argument("--attention-backend", choices=ATTENTION.split())
    parser.add_argument("--device")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--config")
    args = parser.parse_args(argv, ServerArgs())
    if args.config:  # a flat mapping, its values as JSON; the command line wins
        lines = Path(args.config).read_text(encoding="utf-8").splitlines()
        pairs = [(f"--{name}", str(json.loads(value))) for name, _, value in (line.partition(": ") for line in lines)]
        args = parser.parse_args([word for pair in pairs for word in pair] + argv, ServerArgs())
    del args.config
    return args
