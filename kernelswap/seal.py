"""The digest in a release's name: of all that changes the server, its secrets too.

Shared by the controller, which names releases, and the agent, which finds out whether one was edited since (Python 3.9,
standard library).
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Mapping

SECRETS_FILE = "secrets.yaml"
UNNAMED = "RELEASE"  # stands for the release's name in its own texts, and in a preview that does not know the secrets
LENGTH = 12  # hexadecimal digits


def digest(texts: Mapping[str, str], secrets: Mapping[str, str], key: str) -> str:
    """texts: the release's files that decide how the server runs, with UNNAMED for its name. key: the host's, see
    KEY_PATH, so that the digest gives no secret away."""
    sealed = json.dumps(dict(secrets), sort_keys=True)
    mac = hmac.new(key.encode(), sealed.encode(), hashlib.sha256).hexdigest() if secrets else ""
    content = json.dumps({**texts, SECRETS_FILE: mac}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:LENGTH]


def is_whole(release: str, texts: Mapping[str, str], secrets: Mapping[str, str], key: str) -> bool:
    """Whether the texts and secrets that a host has are those that the release was named for."""
    unnamed = {name: text.replace(release, UNNAMED) for name, text in texts.items()}
    return digest(unnamed, secrets, key) == release.rpartition("-")[2]
