"""A headless browser for tests of pages: Debian's chromium, or any other on the path."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@functools.cache
def browser() -> str | None:
    """The path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


needs_browser = pytest.mark.skipif(browser() is None, reason=f"none of {', '.join(NAMES)} is installed")


def shown_by(page: Path, script: str, width: int = 1000) -> Any:
    """What `script`, the body of a function, returns in the page once it is loaded. It must not raise, nor the page.

    Args:
        width: of the window in pixels. Browsers have none below 500: a narrower page is in a frame.
    """
    if width < 500:
        frame = page.with_name(f"framed_{page.name}")
        page.with_name(f"inner_{page.name}").write_bytes(page.read_bytes())
        frame.write_text(
            f"<!doctype html><html><head></head><body><iframe src='inner_{page.name}' "
            f"style='width:{width}px;height:1200px;border:0'></iframe></body></html>"
        )
        return shown_by(frame, f"return ((document, innerWidth) => {{ {script} }})(frames[0].document, {width});")
    watch = """
    window.failures = [];
    addEventListener("error", event => failures.push(event.message));
    addEventListener("securitypolicyviolation", event => failures.push(event.violatedDirective));
    """
    probe = """
    const shown = document.createElement("pre");
    shown.id = "shown";
    const probe = () => JSON.stringify([(() => {%s})(), failures]);
    const loaded = new Promise(done => addEventListener("load", done));
    const whole = typeof ready === "undefined" ? null : ready;
    const put = text => { shown.textContent = text; document.body.append(shown); };
    Promise.all([loaded, whole]).then(probe).catch(error => `"${error}"`).then(put);
    """
    text = page.read_text(encoding="utf-8")
    probed = page.with_name(f"probed_{page.name}")
    text = text.replace("<head>", f"<head><script>{watch}</script>", 1)
    probed.write_text(text.replace("</body>", f"<script>{probe % script}</script></body>"), encoding="utf-8")
    command = [str(browser()), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={max(width, 500)},1200"]
    command += ["--virtual-time-budget=20000", "--allow-file-access-from-files", "--dump-dom"]
    command += [f"--user-data-dir={page.parent / 'profile'}", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r'<pre id="shown">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    content = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert isinstance(content, list), content
    result, failures = content
    assert failures == []
    return result
