"""Takes secrets out of text that somebody will read: logs, causes, evidence."""

from __future__ import annotations

import re
from functools import cache
from typing import Iterable, List, Sequence, Tuple

MARK = "[redacted]"

# Repetitions have bounds: a line of any content takes time that grows with its length alone.
# A name that says that its value is secret. `token` alone counts tokens more often than it names a secret.
_NAME = (
    r"[\w.-]{0,40}(?:api[ _-]?key|passw(?:or)?d|passphrase|secret(?:[_-]?access)?(?:[_-]?key)?|private[_-]?key"
    r"|(?:auth|access|api|hf|hub|hugging[_-]?face|session|bearer|refresh|id|github|gitlab|bot|job)[_-]?token)"
)
# None, True, false and "" hold no secret.
_NOT_EMPTY = r"(?!(?:none|null|true|false)\b|\[redacted|(?:\\*['\"]){2})"
# Quoted (also inside JSON or repr), a list, a call, a word.
_VALUE = (
    r"b?(?:(?P<quote>['\"])(?:\\.|(?!(?P=quote))[^\\\n]){0,4000}(?P=quote)|(?P<escaped>\\+['\"])(?:(?!(?P=escaped)).){0,4000}(?P=escaped)"
    r"|\[[^\]\n]{0,4000}\]|[\w.]{1,40}\([^)\n]{0,4000}\)|['\"]?[^\s,;)}\]'\"\\]+)"
)
_ARGUMENT = rf"{_NAME}|\w*watermark_(?:key|config)\w*"
_HIDDEN = rf"\g<quote>\g<escaped>{MARK}\g<quote>\g<escaped>"


@cache
def _rules() -> Tuple[Tuple[re.Pattern[str], str], ...]:
    """Compiled when they are needed: that takes longer than to answer the controller's question."""
    return (
        # A key in PEM, whole.
        (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|\Z)", re.DOTALL), rf"\1{MARK}\2"),
        # Authorization: Bearer X, also inside a dict or JSON; Authorization: X; Cookie: a=X; b=X
        (re.compile(r"(?i)\b(bearer|basic)(\s+)(?!token\b|auth)[\w.~+/=-]{6,}"), rf"\1\2{MARK}"),
        (
            re.compile(
                r"(?i)(\bauthorization\\*['\"]?\s*[:=,]\s*(?:b(?=['\"]))?\\*['\"]?(?:token\s+)?)"
                r"(?!b['\"]|\[redacted|(?:bearer|basic|token)\s)[^\s'\",\\]+"
            ),
            rf"\1{MARK}",
        ),
        (
            re.compile(
                r"(?i)(\b(?:set-)?cookie\\*['\"]?\s*[:,]\s*(?:b(?=['\"]))?\\*['\"]?)(?!\s|\[redacted)[^\r\n'\"\\]+"
            ),
            rf"\1{MARK}",
        ),
        # scheme://user:password@host, https://token@host, curl -u user:password
        (re.compile(r"(\b[a-z][a-z0-9+.-]{0,15}://[^\s:/@'\"]{0,80}:)[^\s@/'\"]{1,300}@"), rf"\1{MARK}@"),
        (re.compile(r"(\bhttps?://)[^\s:/@'\"\[]{8,300}@"), rf"\1{MARK}@"),
        (re.compile(r"(\bcurl\b.{0,300}?\s(?:-u|--user)[\s=]*['\"]?[^\s:'\"]+:)[^\s'\"]+"), rf"\1{MARK}"),
        # ?token=X&sig=X
        (re.compile(r"(?i)([?&](?:token|key|sig|signature|x-amz-[a-z-]+)=)[^\s&'\"]+"), rf"\1{MARK}"),
        # --api-key X, --api-key=X, "--api-key", "X"
        (
            re.compile(
                rf"(?i)(--(?:{_NAME}|token)(?![\w-])\\*['\"]?(?:\s*[=,]\s*|\s+))"
                rf"(?!--|(?:is|must|was|and|or)\b){_NOT_EMPTY}{_VALUE}"
            ),
            rf"\1{_HIDDEN}",
        ),
        # api_key='X', "api_key": "X", Incorrect API key provided: X
        (
            re.compile(rf"(?i)(?<![\w-])({_NAME}(?: provided)?\\*['\"]?\s*(?:=>|[=:])\s*){_NOT_EMPTY}{_VALUE}"),
            rf"\1{_HIDDEN}",
        ),
        # X_TOKEN=X, DB_PASS=X; token='X', "token": "X" where it is too long for a token of a text
        (
            re.compile(
                rf"(?<![\w-])((?:[A-Z0-9_]{{0,40}}(?:TOKEN|PASS|PWD|SECRET)|credentials?)=)(?!\d+\b){_NOT_EMPTY}{_VALUE}"
            ),
            rf"\1{_HIDDEN}",
        ),
        (re.compile(rf"((?<![\w#-])token=)(?!\d+\b){_NOT_EMPTY}{_VALUE}"), rf"\1{_HIDDEN}"),
        (re.compile(r"((?<![\w#-])token\\*['\"]?\s*:\s*\\*['\"]?)[\w.-]{12,}"), rf"\1{MARK}"),
        # Tokens that are known by their looks.
        (
            re.compile(
                r"\b(?:sk-[\w-]{6,}|hf_\w{6,}|nvapi-[\w-]{8,}|gh[pousr]_\w{16,}|github_pat_\w{16,}|glpat-[\w-]{12,}"
                r"|xox[abprs]-[\w-]{8,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
            ),
            MARK,
        ),
    )


def names_secret(argument: str) -> bool:
    """Whether an argument of SGLang (`api_key`) holds a secret."""
    return re.fullmatch(_ARGUMENT, argument) is not None


def redact(text: str, values: Sequence[str] = ()) -> str:
    """The text without secrets: the values given, and whatever looks like one or is named like one."""
    for value in values:
        if value:
            text = text.replace(value, MARK)
    for pattern, replacement in _rules():
        text = pattern.sub(replacement, text)
    return text


# `--api-key`, `--ssh-password=X`, `HF_TOKEN=X`
SECRET = re.compile(
    r"(--)?[\w.-]*(?:api[-_]?key|token|passw(?:or)?d|passphrase|secret(?:[-_]key)?)(=.*)?", re.IGNORECASE | re.DOTALL
)


def hide_secrets(argv: Iterable[str]) -> List[str]:
    """The words without the values of flags and variables that name a secret, and without what looks like one."""
    words: List[str] = []
    hide = False
    for word in argv:
        match = SECRET.fullmatch(word)
        if hide and not word.startswith("--"):
            word = MARK
        elif match and match[2]:
            word = word.partition("=")[0] + f"={MARK}"
        hide = bool(match and match[1] and not match[2])
        words.append(redact(word))
    return words
