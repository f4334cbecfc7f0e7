"""A headless Chromium, driven over its DevTools protocol: JSON messages on two pipes, each ended by a null byte."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from PIL import Image

#: Debian's names.
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")

_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--force-color-profile=srgb", "--remote-debugging-pipe", "about:blank"),
)


class Browser:
    """One window; closing it ends the browser."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.TemporaryDirectory(prefix="rrfp-chromium-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        # The browser reads descriptor 3, and writes 4. The pipes may have these numbers here, so they move up first.
        script = f'exec "$0" "$@" 3<&{to_browser + 0} 4>&{from_browser + 0}'
        command = ["/bin/bash", "-c", script, PROGRAM, f"--user-data-dir={self._profile.name}", *_OPTIONS]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        #: Lines of the console, and addresses that the page asked for.
        self.console: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(20)
        os.close(self._read)
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A method of the protocol, and its result."""
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, event: Mapping[str, Any]) -> None:
        details = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.console.append(str(details["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.console.append(str(details["args"]))
            case "Log.entryAdded":
                self.console.append(details["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(details["request"]["url"])

    def open(self, path: Path, width: int = 1400, height: int = 900, scheme: str = "light") -> None:
        """Show a report, until it has drawn."""
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.requests.clear()
        self.call("Page.navigate", url=path.as_uri())
        # The page's own script may not have run yet.
        self.run(
            "new Promise(done => { (function look() { "
            "window.report ? done(window.report.ready) : setTimeout(look, 5); })(); })"
        )
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Change the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, code: str) -> Any:
        """The value of an expression, or what its promise gives."""
        answer = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Until what was asked for is drawn: the page's panels follow its timelines within a tenth of a second."""
        self.run("new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 100))")

    def mouse(self, event: str, x: float, y: float, **more: Any) -> None:
        """``mouseMoved``, ``mousePressed``, ``mouseReleased`` or ``mouseWheel``."""
        self.call("Input.dispatchMouseEvent", type=event, x=x, y=y, **more)

    def press(self, key: str) -> None:
        """A key, by the name that scripts see."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)
        self.settle()

    def screenshot(self, *, whole: bool = False) -> Image.Image:
        """The window, or the whole page."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        return Image.open(io.BytesIO(base64.b64decode(picture["data"]))).convert("RGB")

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def pixels(self) -> np.ndarray:
        """The window, by row and column, three colours each."""
        return np.asarray(self.screenshot())
