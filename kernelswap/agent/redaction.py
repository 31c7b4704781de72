"""Takes secrets out of text that somebody will read: logs, causes, evidence."""

from __future__ import annotations

import re
from typing import Sequence

MARK = "[redacted]"

# A name that says that its value is secret. `token` alone counts tokens more often than it names a secret.
_NAME = (
    r"[\w.-]*(?:api[_-]?key|passw(?:or)?d|passphrase|secret(?:[_-]?access)?(?:[_-]?key)?|private[_-]?key"
    r"|(?:auth|access|hf|hub|hugging[_-]?face|session|bearer|refresh|id|github|bot)[_-]?token)"
)
_RULES = (
    # A key in PEM, whole.
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL), rf"\1{MARK}\2"),
    # Authorization: Bearer X, also inside a dict or JSON.
    (re.compile(r"(?i)\b(bearer|basic)(\s+)(?!token\b|auth)[\w.~+/=-]{6,}"), rf"\1\2{MARK}"),
    # scheme://user:password@host
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*:)[^\s@/'\"]+@"), rf"\1{MARK}@"),
    # ?token=X&sig=X
    (re.compile(r"(?i)([?&](?:token|key|sig|signature|x-amz-[a-z-]+)=)[^\s&'\"]+"), rf"\1{MARK}"),
    # --api-key X, --api-key=X, "--api-key", "X"
    (
        re.compile(
            rf"(?i)(--(?:{_NAME}|token)(?![\w-])\\?['\"]?(?:\s*[=,]\s*|\s+))(\\?['\"]?)(?!--|\[redacted)[^\s'\",\\]+"
        ),
        rf"\1\2{MARK}",
    ),
    # api_key='X', "api_key": "X"; None, True and false are no secrets
    (
        re.compile(
            rf"(?i)(?<![\w-])((?:{_NAME}|(?<![#\w-])token(?==))\\?['\"]?\s*[=:]\s*)"
            r"(?!(?:none|null|true|false)\b|\[redacted|\\?['\"]{2})"
            r"(?:(\\?['\"])(?:(?!\2).)+\2|[^\s,;)}\]'\"\\]+)"
        ),
        rf"\1\2{MARK}\2",
    ),
    # Tokens that are known by their looks.
    (
        re.compile(
            r"\b(?:sk-[\w-]{6,}|hf_\w{6,}|nvapi-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}"
            r"|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        MARK,
    ),
)


def redact(text: str, values: Sequence[str] = ()) -> str:
    """The text without secrets: the values given, and whatever looks like one or is named like one."""
    for value in values:
        if value:
            text = text.replace(value, MARK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text
