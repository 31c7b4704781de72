from __future__ import annotations

import time

import pytest

from kernelswap.agent import redaction
from kernelswap.agent.redaction import hide_secrets, redact


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
        ('--api-key "S3cr3t with spaces" --tp 8', '--api-key "[redacted]" --tp 8'),
        ("api_key='S3cr3t\\'s end', tp=8", "api_key='[redacted]', tp=8"),
        ('{"api_key":"S3cr3t\\"end"}', '{"api_key":"[redacted]"}'),
        ('{\\\\\\"api_key\\\\\\":\\\\\\"S3cr3t\\\\\\"}', '{\\\\\\"api_key\\\\\\":\\\\\\"[redacted]\\\\\\"}'),
        ("api_key=['S3cr3t', 'S3cr3t2'], tp=8", "api_key=[redacted], tp=8"),
        ("api_key=SecretStr('S3cr3t'), tp=8", "api_key=[redacted], tp=8"),
        ("ssl_keyfile='/k', ssl_keyfile_password='S3cr3t'", "ssl_keyfile='/k', ssl_keyfile_password='[redacted]'"),
        (
            "CI_JOB_TOKEN=S3cr3t DB_PASS=S3cr3t MYSQL_PWD=S3cr3t",
            "CI_JOB_TOKEN=[redacted] DB_PASS=[redacted] MYSQL_PWD=[redacted]",
        ),
        ("{'token': 'S3cr3tS3cr3t', 'n': 1}", "{'token': '[redacted]', 'n': 1}"),
        ("https://S3cr3tS3cr3t@host/x.git", "https://[redacted]@host/x.git"),
        (
            "curl -H 'Authorization: S3cr3t' -u ann:S3cr3t http://x",
            "curl -H 'Authorization: [redacted]' -u ann:[redacted] http://x",
        ),
        ("authorization: Token S3cr3t", "authorization: Token [redacted]"),
        ("(b'authorization', b'Bearer S3cr3t')", "(b'authorization', b'Bearer [redacted]')"),
        ("Set-Cookie: sid=S3cr3t; Path=/", "Set-Cookie: [redacted]"),
        ("Incorrect API key provided: S3cr3t.", "Incorrect API key provided: [redacted]"),
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
        "--api-key is required",
        "api_key='', admin_api_key=None",
        "max_tokens=5, num_tokens=3, eos_token='</s>', pad_token: '<pad>', 'token': 'Hello'",
        "{'prompt_tokens': 17, 'completion_tokens': 5}",
        "self.token_to_kv_pool_allocator.available_size()=3, num_reserved_decode_tokens=512",
        "Decode batch. #running-req: 1, #token: 66, token usage: 0.00",
        "SyntaxError: unexpected token: ','",
        "git@github.com:x/y.git ssl_keyfile='/etc/x.key'",
        "password authentication failed for user",
        "docker run -u 1000:1000 x",
        "http://127.0.0.1:30000/v1/chat/completions",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("part", ["-", "api_", "api_key='\\", "api_key=[", "curl -u ", "http://a", "password "])
def test_a_line_of_any_content_takes_time_that_grows_with_its_length_alone(part: str) -> None:
    before = time.monotonic()
    redact(part * (60_000 // len(part)))
    redact(f"api_key='{part[-1] * 60_000}")
    assert time.monotonic() - before < 10


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "ssl_keyfile_password", "watermark_key", "hf_token"])
def test_arguments_that_hold_secrets(name: str) -> None:
    assert redaction.names_secret(name)


@pytest.mark.parametrize("name", ["ssl_keyfile", "max_total_tokens", "bucket_time_to_first_token", "tokenizer_path"])
def test_arguments_that_hold_none(name: str) -> None:
    assert not redaction.names_secret(name)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (("--api-key", "s3cret", "--tp", "8"), ["--api-key", "[redacted]", "--tp", "8"]),
        (("--admin-api-key=s3cret",), ["--admin-api-key=[redacted]"]),
        (("--api_key", "s3cret"), ["--api_key", "[redacted]"]),
        (("--tokenizer-path", "/m"), ["--tokenizer-path", "/m"]),
        (("--skip-tokenizer-init", "x"), ["--skip-tokenizer-init", "x"]),
        (("--hf-token", "s3cret"), ["--hf-token", "[redacted]"]),
        (("--ssh-password", "two words"), ["--ssh-password", "[redacted]"]),
        (("--data", "sudo_password=two words"), ["--data", "sudo_password=[redacted]"]),
        (
            ("env", "HF_TOKEN=s3cret", "OPENAI_API_KEY=s3cret"),
            ["env", "HF_TOKEN=[redacted]", "OPENAI_API_KEY=[redacted]"],
        ),
        (("--url", "http://me:s3cret@proxy:80"), ["--url", "http://me:[redacted]@proxy:80"]),
        (("--max-total-tokens=5", "token", "x"), ["--max-total-tokens=5", "token", "x"]),
    ],
)
def test_secrets_are_hidden(argv: tuple[str, ...], shown: list[str]) -> None:
    assert hide_secrets(argv) == shown
