"""Times as people read them: in UTC, as the controller shows them, whatever zone the host keeps."""

from __future__ import annotations

import time


def shown(at: float) -> str:
    """A time of day of the epoch."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
