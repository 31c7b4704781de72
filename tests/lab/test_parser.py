"""SGLang's own parser says of the generated profiles what they were made to be, and has the flags of our snapshot."""

import json

from generated_profiles import profiles
from labhost import ROOT, Host

from kernelswap import flags

# One process, as importing SGLang takes longer than parsing.
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)

def takes(argv):
    try:
        parser.parse_args(["--model-path", "/m", *argv])
    except SystemExit:
        return False
    return True

print(json.dumps([takes(argv) for argv in json.load(sys.stdin)]))
"""
PYTHON = "PYTHONPATH=/opt/sglang/shim HF_HUB_OFFLINE=1 /opt/sglang/bin/python -W ignore"


def argv(given: dict[str, flags.FlagValue]) -> list[str]:
    return [word for group in flags.groups(given) for word in group]


def test_sglang_agrees_about_every_profile(host: Host) -> None:
    made = [profile for profile in profiles(200) if profile.parsed]
    asked = json.dumps([argv(profile.flags) for profile in made]).encode()
    taken = json.loads(host.run(f"{PYTHON} -c '{PARSE}'", data=asked, timeout=300).stdout)
    assert [p.name for p, well in zip(made, taken, strict=True) if well == bool(p.blamed)] == []


def test_the_snapshot_is_what_is_installed(host: Host) -> None:
    host.run(
        f"mkdir -p /tmp/flags && {PYTHON} - /tmp/flags", data=(ROOT / "lab/extract_flags.py").read_bytes(), timeout=300
    )
    name = "flags-0.5.23.json"
    extracted = json.loads(host.read(f"/tmp/flags/{name}"))
    assert extracted["flags"] == json.loads((ROOT / "kernelswap/knowledge/sglang" / name).read_text())["flags"]
