"""A headless Chromium for tests, driven through its debugging pipe: needs the browser and nothing else."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--no-first-run", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 60.0
"""Seconds to wait for an answer."""


def find_chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a browser of its own. Use it in a `with` statement.

    Attributes:
        requests: addresses that the page asked for, those of data in the page itself left out.
        complaints: what went to the console, exceptions, and other entries of the log.
    """

    def __init__(self, program: str) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._rest = b""
        self._events: set[str] = set()
        self._home = tempfile.mkdtemp()
        (its_input, self._to), (self._from, its_output) = os.pipe(), os.pipe()

        def as_three_and_four() -> None:
            # Both are moved out of the way first: either may be the other's number.
            ends = [os.dup(its_input), os.dup(its_output)]
            for end, number in zip(ends, (3, 4), strict=True):
                os.dup2(end, number)

        command = [program, *_FLAGS, f"--user-data-dir={self._home}", "about:blank"]
        self._process = subprocess.Popen(
            command, close_fds=False, preexec_fn=as_three_and_four, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(its_input)
        os.close(its_output)
        self._session: str | None = None

    def __enter__(self) -> "Browser":
        (target,) = (one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._home, ignore_errors=True)

    def send(self, method: str, **parameters: Any) -> Any:
        """Ask the browser for something, and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Show a file, and wait until all of it is there."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._events.discard("Page.loadEventFired")
        self.send("Page.navigate", url=page.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG, also what is below the window."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _read(self) -> dict[str, Any]:
        """The next message; what it says of the page is noted."""
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            part = os.read(self._from, 2**16) if ready else b""
            if not part:
                raise RuntimeError("the browser has gone" if ready else f"the browser was silent for {_PATIENCE} s")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        method, said = message.get("method", ""), message.get("params", {})
        self._events.add(method)
        if method == "Network.requestWillBeSent" and not said["request"]["url"].startswith("data:"):
            self.requests.append(said["request"]["url"])
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(said))
        return message
