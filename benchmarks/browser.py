"""A headless Chromium, driven through chromedriver's WebDriver protocol with the standard library alone."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference to an element


class WebDriverError(Exception):
    pass


class Browser:
    """One window. `run` executes JavaScript; the rest acts as a user would."""

    def __init__(self, address):
        self.address, self.session = address, None
        options = {
            "binary": shutil.which("chromium"),
            "args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = answer["sessionId"]

    def _send(self, method, path, body=None):
        path = path if self.session is None else f"/session/{self.session}{path}"
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)["value"]
        except urllib.error.HTTPError as error:
            raise WebDriverError(json.load(error)["value"]["message"]) from None

    def go_to(self, path):
        self._send("POST", "/url", {"url": path.as_uri()})

    def open(self, path):
        """Open a page that says when it is ready, as the report does."""
        self.go_to(path)
        self.wait("document.documentElement.dataset.ready === 'yes'")

    def run(self, script, *arguments):
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def run_async(self, script, *arguments):
        """Run a script whose last argument is a function to call with the result."""
        return self._send("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def wait(self, condition, seconds=15):
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"waited in vain for {condition}"
            time.sleep(0.02)

    def element(self, selector):
        return self._send("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def text(self, selector):
        return self._send("GET", f"/element/{self.element(selector)}/text")

    def click(self, selector):
        self._send("POST", f"/element/{self.element(selector)}/click")

    def type(self, selector, text):
        self._send("POST", f"/element/{self.element(selector)}/value", {"text": text})

    def click_at(self, x, y):
        """Click a point of the window, in CSS pixels."""
        moves = [
            {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y), "origin": "viewport"},
            {"type": "pointerDown", "button": 0},
            {"type": "pointerUp", "button": 0},
        ]
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves}
        self._send("POST", "/actions", {"actions": [pointer]})

    def errors(self):
        """What the console has said since the last call, below the level of a remark."""
        log = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in log if entry["level"] in ("SEVERE", "WARNING")]

    def alert(self):
        """The text of an open alert, or None."""
        try:
            return self._send("GET", "/alert/text")
        except WebDriverError:
            return None

    def emulate(self, width, height, scheme="light", scale=1):
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        self._devtools("Emulation.setDeviceMetricsOverride", metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def go_offline(self):
        """From now on a request to any host fails, and the console says so."""
        self._devtools("Network.enable", {})
        nothing = {"offline": True, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self._devtools("Network.emulateNetworkConditions", nothing)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))

    def _devtools(self, command, parameters):
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self):
        self._send("DELETE", "")


@contextlib.contextmanager
def browser():
    """A browser that is closed, and its driver ended, whatever happens."""
    # Port 0 would do for newer drivers only; this one prints the port that it found.
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        for line in driver.stdout:
            if "started successfully on port" in line:
                port = int(line.strip().rstrip(".").split()[-1])
                break
        else:
            raise RuntimeError("chromedriver did not start")
        opened = Browser(f"http://127.0.0.1:{port}")
        try:
            yield opened
        finally:
            opened.close()
    finally:
        driver.terminate()
        driver.wait(timeout=20)
        driver.stdout.close()
