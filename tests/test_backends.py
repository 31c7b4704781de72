"""The rules about backends and conflicts: well-formed, with a source, and holding where they should."""

import pytest

from kernelswap import sglang
from kernelswap.backends import REFUSE, WARN, advice, ordinal, rules

FACTS = {"architecture", "quantization of the model"}
NO_CHOICES = {"1", "minimax_m3_nvfp4"}  # a size; what SGLang itself makes of some checkpoints
KNOWN = {spelling for version in sglang.versions() for spelling in sglang.release(version).spellings}
BY_ARGUMENT = {"fp8-gemm-runner-backend", "fp4-gemm-runner-backend"}  # as SGLang's arguments are called


@pytest.mark.parametrize("rule", rules(), ids=[rule["id"] for rule in rules()])
def test_every_rule_is_well_formed(rule: dict[str, object]) -> None:
    assert rule["severity"] in (REFUSE, WARN)
    assert rule["what"] and rule["todo"] and rule["source"]
    assert rule.keys() <= {"id", "if", "severity", "what", "todo", "source", "since", "until"}
    conditions = rule["if"]
    assert isinstance(conditions, dict) and conditions
    for key, wanted in conditions.items():
        for name in key.replace(">", "|").split("|"):
            assert name in KNOWN | FACTS | BY_ARGUMENT or name.isupper(), name
        if isinstance(wanted, dict):
            ((relation, operand),) = wanted.items()
            assert relation in ("not", "above") or operand in KNOWN


def test_no_two_rules_have_one_id() -> None:
    assert len({rule["id"] for rule in rules()}) == len(rules())


def test_a_value_that_a_rule_names_is_one_that_some_release_takes() -> None:
    for rule in rules():
        for key, wanted in rule["if"].items():
            flags = [name for name in key.replace(">", "|").split("|") if name in KNOWN]
            values = wanted if isinstance(wanted, list) else wanted.get("not", [])
            releases = [(sglang.release(version), flag) for version in sglang.versions() for flag in flags]
            known = [release.flag(flag) for release, flag in releases if flag in release.spellings]
            taken = {str(choice) for flag in known for choice in flag.choices}
            plain = {value for value in values if value and not set("*=") & set(value)}
            assert not taken or plain <= taken | NO_CHOICES, rule["id"]


CASES = [
    # flags, environment, architecture, quantization, version -> severity and place of each piece of advice
    ("attention-backend=trtllm_mla", "", "sm90", "", "", ["refuse attention-backend"]),
    ("attention-backend=trtllm_mla", "", "sm100", "", "", []),
    ("attention-backend=trtllm_mla", "", "", "", "", []),
    ("decode-attention-backend=cutedsl_mla", "", "sm120", "", "", ["refuse decode-attention-backend"]),
    ("decode-attention-backend=cutedsl_mla", "", "sm103", "", "", []),
    ("quantization=nvfp4_online", "", "sm120", "", "", ["refuse quantization"]),
    ("moe-runner-backend=flashinfer_trtllm quantization=fp8", "", "sm120", "", "", ["warn moe-runner-backend"]),
    ("moe-runner-backend=flashinfer_cutlass quantization=awq", "", "", "", "", ["refuse moe-runner-backend"]),
    ("moe-runner-backend=flashinfer_cutlass quantization=awq", "", "", "", "0.5.6", []),
    ("moe-runner-backend=flashinfer_cutlass", "", "", "fp8", "", []),
    ("moe-runner-backend=marlin", "", "sm90", "modelopt_fp4", "", []),
    ("moe-runner-backend=triton", "", "sm90", "modelopt_fp4", "", ["warn quantization"]),
    ("attention-backend=trtllm_mha kv-cache-dtype=fp8_e4m3", "", "sm120", "", "", ["refuse attention-backend"]),
    ("attention-backend=trtllm_mha prefill-attention-backend=fa4 kv-cache-dtype=fp8_e4m3", "", "sm120", "", "", []),
    ("moe-runner-backend=flashinfer_cutlass ep-size=4 tp-size=8", "", "", "", "", ["refuse moe-runner-backend"]),
    ("moe-runner-backend=flashinfer_cutlass ep-size=8 tp-size=8", "", "", "", "", []),
    ("attn-dp-size=3 tp-size=8", "", "", "", "", ["refuse attn-dp-size"]),
    ("attn-dp-size=2", "", "", "", "", ["refuse attn-dp-size"]),
    ("attn-dp-size=4 tp-size=8", "", "", "", "", []),
    ("chunked-prefill-size=100 page-size=64", "", "", "", "", ["warn chunked-prefill-size"]),
    ("chunked-prefill-size=-1 page-size=64", "", "", "", "", []),
    ("fp8-gemm-backend=deep_gemm", "SGLANG_ENABLE_JIT_DEEPGEMM=0", "", "", "", ["warn SGLANG_ENABLE_JIT_DEEPGEMM"]),
    ("fp8-gemm-backend=deep_gemm", "SGLANG_ENABLE_JIT_DEEPGEMM=1", "", "", "", []),
    ("enable-deterministic-inference=true", "SGLANG_MOE_CONFIG_DIR=/x", "", "", "", ["warn SGLANG_MOE_CONFIG_DIR"]),
    ("speculative-algorithm=NEXTN", "", "", "", "0.5.9", ["warn speculative-algorithm"]),
    ("speculative-algorithm=NEXTN", "SGLANG_ENABLE_SPEC_V2=True", "", "", "0.5.9", []),
    ("speculative-algorithm=NEXTN", "", "", "", "0.5.23", []),
    ("speculative-algorithm=NEXTN", "", "", "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "environment", "architecture", "quantization", "version", "said"), CASES)
def test_advice(
    flags: str, environment: str, architecture: str, quantization: str, version: str, said: list[str]
) -> None:
    given, variables = (dict(pair.split("=", 1) for pair in text.split()) for text in (flags, environment))
    found = advice(given, variables, architecture, quantization, version)
    assert [f"{each.severity} {each.place[1]}" for each in found] == said
    assert not [each for each in found if "{" in each.what + each.todo]


def test_versions_are_in_order() -> None:
    versions = ["0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.6.0", "1.0"]
    assert sorted(sorted(versions), key=ordinal) == versions
