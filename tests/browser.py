"""A headless Chromium that is driven over its DevTools pipe: clicks, keys and what a page shows.

The pipe carries JSON between zero bytes on descriptors 3 and 4, so no websocket and no port is needed.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager

SECONDS = 30.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
         "--font-render-hinting=none", "--remote-debugging-pipe")  # fmt: skip
KEYS = {"Enter": ("Enter", 13, "\r"), "Escape": ("Escape", 27, ""), "Tab": ("Tab", 9, "")}
SHIFT = 8
MISSING = f"the page is not tested in a browser: none of {', '.join(NAMES)} is installed (Debian: apt install chromium)"


def installed():
    """The path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def pipe():
    """Its two ends, away from the descriptors 3 and 4 that Chromium's own will take the place of."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high


class Browser:
    """A process, and one tab of it. `events` is all that the tab has reported: requests, errors, dialogs."""

    def __init__(self, profile):
        found = installed()
        assert found, MISSING
        theirs, self.out = pipe()
        self.into, ours = pipe()
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash", found, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(ours)
        self.number, self.rest, self.session, self.events = 0, b"", None, []
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.command(f"{domain}.enable")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)

    def command(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while (answer := self._next(deadline)).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self, deadline):
        while b"\0" not in self.rest:
            ready = select.select([self.into], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(self.into, 1 << 20) if ready else b""
            assert part, "Chromium does not answer"
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def told(self, method):
        """The events of a kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def go(self, address):
        self.command("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self):
        self.run("window.before = true")
        self.command("Page.reload")
        self.until("document.readyState === 'complete' && !window.before")

    def run(self, expression):
        """The value of some JavaScript in the page."""
        answer = self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (expression, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, expression, seconds=SECONDS):
        """Waits for an expression to become true, and gives its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if (value := self.run(expression)) or value == {}:  # an element comes as {}
                    return value
            except AssertionError as error:  # between two pages there is nothing to ask
                if "Chromium does not answer" in str(error):
                    raise
            time.sleep(0.02)
        raise AssertionError(f"never true: {expression}\n{self.run('document.body.innerText')}")

    def text(self, selector):
        """What a reader sees of the first such element; "" where there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def texts(self, selector):
        return self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.innerText)")

    def offline(self, cut):
        self.command(
            "Network.emulateNetworkConditions", offline=cut, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )

    def click(self, selector):
        """With the mouse, in the middle of the element, which must be what is on top there."""
        quoted = json.dumps(selector)
        place = self.until(
            f"(() => {{ const node = document.querySelector({quoted}); if (!node) return null;"
            "node.scrollIntoView({block: 'nearest'}); const box = node.getBoundingClientRect();"
            "const x = box.x + box.width / 2, y = box.y + box.height / 2, top = document.elementFromPoint(x, y);"
            "return node === top || node.contains(top) ? [x, y] : null })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.mouse(kind, *place)

    def mouse(self, kind, x, y):
        button = "none" if kind == "mouseMoved" else "left"
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def type(self, text):
        self.command("Input.insertText", text=text)

    def press(self, key, modifiers=0):
        name, code, text = KEYS[key]
        wanted = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.command("Input.dispatchKeyEvent", type="keyDown", **wanted, **({"text": text} if text else {}))
        self.command("Input.dispatchKeyEvent", type="keyUp", **wanted)

    def show_as(self, width, height, *, dark=False, phone=False, scale=1):
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self):
        """A PNG of what is seen."""
        return base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])


@contextmanager
def browsing():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(profile)
        try:
            yield browser
        finally:
            browser.close()
