"""Chromium by its own protocol, through two pipes: what a hand and an eye do with a page."""

import base64
import json
import os
import shutil
import subprocess

PROGRAM = next(filter(shutil.which, ("chromium", "google-chrome", "chromium-browser")), None)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27}


class Browser:
    """One page in a Chromium without a window. Use it as a context."""

    def __init__(self, address, width=1280, dark=False, printed=False):
        self.address, self.width, self.dark, self.printed = address, width, dark, printed

    def __enter__(self):
        from_here, to_chromium = os.pipe()
        from_chromium, to_here = os.pipe()
        # bash, because sh takes no numbers above 9 for the pipes
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe about:blank"
        command = ["bash", "-c", f'exec "$0" {options} 3<&{from_here} 4>&{to_here}', PROGRAM]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(from_here, to_here), **quiet)
        os.close(from_here), os.close(to_here)
        self.commands, self.answers = os.fdopen(to_chromium, "wb"), os.fdopen(from_chromium, "rb")
        self.number, self.unread, self.session = 0, b"", {}
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self):
        (target,) = (x for x in self.ask("Target.getTargets")["targetInfos"] if x["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        self.look(self.width, self.dark, self.printed)
        self.ask("Page.navigate", url=self.address)
        self.see("new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))")

    def look(self, width, dark=False, printed=False):
        """Show the page on a screen of this width, or as it is printed."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", media="print" if printed else "screen", features=scheme)

    def ask(self, method, **parameters):
        """The answer to a command of the protocol."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters} | self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        self.commands.flush()
        while True:
            while b"\0" not in self.unread:
                self.unread += self.answers.read1(1 << 16) or b'{"id": 0, "error": "Chromium has ended"}\0'
            answer, _, self.unread = self.unread.partition(b"\0")
            answer = json.loads(answer)
            assert "error" not in answer, answer
            if answer.get("id") == self.number:
                return answer["result"]

    def see(self, script):
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key):
        """Press a key, and let it go."""
        key_event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **key_event, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **key_event)

    def screenshot(self):
        """What the screen shows, as a PNG file."""
        return base64.b64decode(self.ask("Page.captureScreenshot")["data"])

    def pdf(self):
        """The page as it would be printed."""
        return base64.b64decode(self.ask("Page.printToPDF")["data"])

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()
        self.commands.close()
        self.answers.close()
