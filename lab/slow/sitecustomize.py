"""Makes the lab's real SGLang slower, as a worse kernel would (put this folder before the shim on PYTHONPATH).

LAB_SLOW=1.15 makes each forward pass of the model take 15 % longer; @FILE is read at each, so one server can be both.
Nothing is installed where it is not set.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

SHIM = Path("/opt/sglang/shim/sitecustomize.py")
SETTING = os.environ.get("LAB_SLOW", "")
MODULE = "sglang.srt.model_executor.model_runner"


def factor():
    return float(Path(SETTING[1:]).read_text()) if SETTING.startswith("@") else float(SETTING)


def slow_down(module):
    sound = module.ModelRunner.forward

    def forward(self, *others, **more):
        start = time.perf_counter()
        result = sound(self, *others, **more)
        until = start + (time.perf_counter() - start) * factor()
        while time.perf_counter() < until:
            pass
        return result

    module.ModelRunner.forward = forward


class Slower(importlib.abc.MetaPathFinder):
    """Slows the module down just after it was imported."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        sound = spec.loader.exec_module

        def exec_module(module):
            sound(module)
            slow_down(module)

        spec.loader.exec_module = exec_module
        return spec


if SHIM.exists():
    spec = importlib.util.spec_from_file_location("lab_shim", SHIM)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
if SETTING:
    sys.meta_path.insert(0, Slower())
