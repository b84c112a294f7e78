"""Headless Chromium, driven through the pipe of its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_SECONDS = 20.0
# The browser reads its file 3 and writes its file 4.
_PIPES = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def found() -> str | None:
    """The path of a browser, if there is one."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """One page in a browser of its own; a context manager that ends it."""

    def __init__(self, path: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium", ignore_cleanup_errors=True)
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        command = [path, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-dev-shm-usage", "--disable-background-networking",
                   "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}"]  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PIPES, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._held, self._number, self._session = b"", 0, ""
        self.messages: list[str] = []  # errors and warnings of the console
        self.requests: list[str] = []  # URLs
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol; what it returns."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                if "error" in said:
                    raise RuntimeError(f"{method}: {said['error']}")
                return dict(said["result"])
            self._note(said)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + _SECONDS
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0, until - time.monotonic()))
            piece = os.read(self._in, 1 << 16) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not answer")
            self._held += piece
        one, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(one))

    def _note(self, said: dict[str, Any]) -> None:
        params = said.get("params", {})
        match said["method"]:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.messages.append(params["entry"]["text"])
            case "Runtime.exceptionThrown":
                self.messages.append(json.dumps(params["exceptionDetails"]))

    def open(self, url: str, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Go to a page and wait for it; width, height: in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def value(self, script: str) -> Any:
        """What an expression of JavaScript is. Raises RuntimeError where it throws."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"]))
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _SECONDS
        while not self.value(f"Boolean({script})"):
            if time.monotonic() > until:
                raise TimeoutError(script)
            time.sleep(0.03)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """A key; code: its number in Windows; modifiers: 8 is Shift."""
        options: dict[str, Any] = {"key": key, "windowsVirtualKeyCode": code}
        if key == "Enter":
            options["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", modifiers=modifiers, **options)
        self.call("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **options)

    def screenshot(self, path: Path) -> None:
        """What is seen, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End it, with all of its processes."""
        os.close(self._out)  # it ends by itself then
        os.close(self._in)
        try:
            self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Sequence[object]) -> None:
        self.close()
