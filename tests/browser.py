"""A headless Chromium spoken to over its debugging pipe (Chrome DevTools Protocol), without any further package.

with Browser() as browser:
    browser.open(path, width=1200, dark=False)
    browser.run("document.title"); browser.console, browser.requests
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_SECONDS = 120


class Browser:
    """One browser with one tab. console: what pages complained of; requests: the addresses that they asked for."""

    def __enter__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, self.write = os.pipe()
        self.read, theirs_out = os.pipe()
        # Chromium reads commands from descriptor 3 and answers on 4.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
                 "--disable-extensions", f"--user-data-dir={self.profile.name}", "about:blank"]  # fmt: skip
        words = ["bash", "-c", f'exec 3<&{ours_in} 4>&{theirs_out}; exec "$@"', "browser", CHROMIUM, *flags]
        self.process = subprocess.Popen(words, pass_fds=(ours_in, theirs_out), stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(ours_in)
        os.close(theirs_out)
        self.buffer, self.number, self.session, self.console, self.requests, self.loaded = b"", 0, None, [], [], False
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        try:
            self.send("Browser.close")
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired, TimeoutError):
            self.process.kill()
            self.process.wait()
        os.close(self.read)
        os.close(self.write)
        self.profile.cleanup()

    def open(self, path, width=1200, height=900, dark=False, scale=1):
        """Load a file in a window of that size and mode, and wait until it is there."""
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=media)
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=width < 600)  # fmt: skip
        self.console, self.requests, self.loaded = [], [], False
        self.send("Page.navigate", url=Path(path).resolve().as_uri())
        while not self.loaded:
            self._next()

    def run(self, code):
        """Evaluate JavaScript in the page and return its value."""
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def screenshot(self, path, whole=True):
        """Save what the page looks like."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def send(self, method, **params):
        """Send one command and return its result; what happens meanwhile is noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self):
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self.buffer:
            if not select.select([self.read], [], [], max(0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self.read, 2**16)
            if not part:
                raise OSError("the browser has ended")
            self.buffer += part
        raw, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(raw)
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.console.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.console.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.console.append(params["entry"]["text"])
        return message
