"""A real browser for tests: Chromium through its driver's own HTTP interface, without a further dependency."""

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path


def chromium():
    """The paths of Chromium and its driver, or None."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """A headless Chromium; `errors` collects what its console complains about."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900):
        browser, driver = chromium()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._base = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += [f"--user-data-dir={profile}", "--disable-extensions", "--no-first-run"]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": browser, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        try:
            self._wait()
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        except Exception:
            self._driver.kill()
            self._driver.wait()
            raise
        self._session = f"/session/{answer['sessionId']}"
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._call("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(timeout=10)

    def open(self, path: Path, hash: str = ""):
        self._call("POST", f"{self._session}/url", {"url": path.resolve().as_uri() + hash})

    def run(self, script: str):
        """What a piece of JavaScript returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def until(self, script: str, wanted):
        """Whether the script comes to return `wanted` within five seconds; events reach a page with a delay."""
        end = time.monotonic() + 5
        while (found := self.run(script)) != wanted and time.monotonic() < end:
            time.sleep(0.02)
        return found == wanted

    def devtools(self, command: str, **parameters):
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int):
        """A viewport of exactly this size; narrower than 500 px it counts as a phone."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer(self, theme: str):
        """What the system prefers: light or dark."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def errors(self):
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def screenshot(self, path: Path, whole: bool = False):
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _wait(self):
        for _ in range(100):
            try:
                if self._call("GET", "/status")["ready"]:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise TimeoutError("the browser's driver did not answer within 10 s")

    def _call(self, verb: str, path: str, body=None):
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=verb)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
