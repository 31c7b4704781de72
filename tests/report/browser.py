"""A real browser without a screen: what it sees of a page, and what it has to complain of."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Looks at each page in a frame of its own size and says what it sees.
PROBE = """<!doctype html><meta charset="utf-8"><body><script>
const seen = {};
const pages = %s;
let left = pages.length;
for (const [name, url, width, height] of pages) {
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = height; frame.src = url;
  frame.onload = () => {
    const page = frame.contentDocument;
    const bottom = what => Math.max(...[...page.querySelectorAll(what)].map(e => e.getBoundingClientRect().bottom));
    seen[name] = {
      title: page.title, verdict: bottom("#verdict .verdict"), figures: bottom("#verdict .figures"),
      wide: page.documentElement.scrollWidth, scripts: page.querySelectorAll("script, iframe, img, link").length,
      handlers: [...page.querySelectorAll("*")].filter(e => [...e.attributes].some(a => /^on/.test(a.name))).length,
      charts: [...page.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height > 50).length,
    };
    if (--left) return;
    const out = document.createElement("pre"); out.textContent = JSON.stringify(seen); document.body.append(out);
  };
  document.body.append(frame);
}
</script>"""


def find() -> str | None:
    """The browser of this machine; root gets one installed."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for words in (["update"], ["install", "--yes", "--no-install-recommends", BROWSERS[0]]):
            subprocess.run(["apt-get", "-qq", *words], check=True, stdout=subprocess.DEVNULL)
        found = shutil.which(BROWSERS[0])
    return found


@dataclass(frozen=True)
class Browser:
    program: str
    folder: Path

    def look(self, pages: Mapping[str, str], width: int, height: int) -> tuple[dict[str, dict[str, Any]], str]:
        """What is seen of each page at a width and height, and the console's lines."""
        frames = []
        for name, text in pages.items():
            path = self.folder / f"{name}.html"
            path.write_text(text, encoding="utf-8")
            frames.append([name, path.as_uri(), width, height])
        probe = self.folder / "probe.html"
        probe.write_text(PROBE % json.dumps(frames), encoding="utf-8")
        options = ["--no-sandbox", "--allow-file-access-from-files", "--enable-logging=stderr", "--dump-dom"]
        done = subprocess.run(
            [self.program, "--headless", *options, f"--user-data-dir={self.folder / 'profile'}", probe.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        seen = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
        assert seen, done.stderr
        console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
        return json.loads(html.unescape(seen[1])), console
