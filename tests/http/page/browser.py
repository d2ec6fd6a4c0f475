"""Headless Chromium, driven over its debugging pipe: no driver, no library."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. Everything a page does wrong (an exception, a refused resource) is kept in `complaints`."""

    def __init__(self, profile, *, width, height, dark=False):
        assert CHROMIUM, "the tests marked browser need Chromium on the PATH"
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", "about:blank",
        ]  # fmt: skip
        command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *flags], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._held, self._count, self._session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.requests = []
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def call(self, method, seconds=30, **parameters):
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + seconds
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _next(self, deadline):
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser is gone"
            self._held += piece
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def _note(self, event):
        method, parameters = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(parameters["exceptionDetails"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def run(self, script):
        """The value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script, seconds=20):
        """Until the expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)

    def screenshot(self, file):
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self):
        self._session = None
        self.call("Browser.close")
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)


# ---- what a reader of the page does ----


def send(page, text):
    """Type a text and send it."""
    page.run(f"document.getElementById('text').value = {json.dumps(text)}")
    page.run("document.getElementById('form').requestSubmit()")


def finished(page, answers=1):
    """Wait until nothing runs and so many answers are there."""
    page.wait(f"!running && document.querySelectorAll('.assistant .acts').length === {answers}", seconds=60)


def click(page, selector):
    page.run(f"document.querySelector({json.dumps(selector)}).click()")
