from __future__ import annotations

import pytest

from kernelswap.agent.redaction import redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("--api-key S3cr3tValue --port 30000", "--api-key [redacted] --port 30000"),
        ("--admin-api-key=S3cr3tValue x", "--admin-api-key=[redacted] x"),
        ("['--api-key', 'S3cr3tValue', '--tp']", "['--api-key', '[redacted]', '--tp']"),
        ('"--hf-token", "S3cr3tValue"', '"--hf-token", "[redacted]"'),
        ("ServerArgs(api_key='S3c, r3t', tp_size=8)", "ServerArgs(api_key='[redacted]', tp_size=8)"),
        ('{"admin_api_key": "S3cr3t", "port": 1}', '{"admin_api_key": "[redacted]", "port": 1}'),
        ('{\\"api_key\\": \\"S3cr3t\\", \\"port\\": 1}', '{\\"api_key\\": \\"[redacted]\\", \\"port\\": 1}'),
        ("api_key=S3cr3t, tp_size=8", "api_key=[redacted], tp_size=8"),
        ("Authorization: Bearer S3cr3tValue", "Authorization: Bearer [redacted]"),
        ("{'Authorization': 'Bearer S3cr3tValue'}", "{'Authorization': 'Bearer [redacted]'}"),
        ("x-api-key: S3cr3tValue", "x-api-key: [redacted]"),
        ("HF_TOKEN=S3cr3tValue python", "HF_TOKEN=[redacted] python"),
        ("key sk-proj-0123456789 gone", "key [redacted] gone"),
        ("hf_AbCdEfGhIjKl", "[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=[redacted]"),
        ("https://ann:S3cr3t@host/x", "https://ann:[redacted]@host/x"),
        ("redis://:S3cr3t@host", "redis://:[redacted]@host"),
        ("GET /x?token=S3cr3t&a=1", "GET /x?token=[redacted]&a=1"),
        ("password: S3cr3t", "password: [redacted]"),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END",
            "-----BEGIN PRIVATE KEY-----[redacted]-----END",
        ),
        ("twice my-own-key my-own-key", "twice [redacted] [redacted]"),
    ],
)
def test_secrets_are_taken_out(text: str, clean: str) -> None:
    assert redact(text, ["my-own-key", ""]) == clean
    assert redact(clean, ["my-own-key"]) == clean


@pytest.mark.parametrize(
    "text",
    [
        "api_key=None, admin_api_key=None",
        "--max-total-tokens 8192 --tokenizer-path /m --skip-tokenizer-init",
        "#new-token: 6, #cached-token: 0, token usage: 0.00",
        "ServerArgs(tokenizer_path='/models/glm5', max_total_tokens=8192, token_id=5)",
        "RuntimeError: CUDA out of memory. Tried to allocate 1.20 GiB.",
        "Failed to determine user credentials: No such process",
        "--api-key --port 30000",
        "http://127.0.0.1:30000/v1/chat/completions",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text
