"""A local server that is a model hub and a package index at once, and fails on command."""

import contextlib
import hashlib
import io
import json
import re
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class FakeServer:
    """Serves `hub` files (OWNER/REPO/FILE -> bytes) and `wheels` (file name -> bytes).

    `cut` and `stall` say, per path, after how many bytes of the body the next GETs are cut off, or wait
    until `release` is set (`stalled` tells the test that one does).
    """

    def __init__(self):
        self.hub = {}
        self.wheels = {}
        self.cut = {}
        self.stall = {}
        self.stalled = threading.Event()
        self.waiting = []  # paths of the GETs that wait or have waited
        self.release = threading.Event()
        self.gets = []  # (path, first byte asked for)
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                server.answer(self, head=True)

            def do_GET(self):
                server.answer(self, head=False)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.release.set()
        self._http.shutdown()
        self._http.server_close()

    def downloads(self, part):
        """First bytes asked for by the GETs of paths that contain `part`."""
        return [start for path, start in self.gets if part in path and "/simple/" not in path]

    def answer(self, request, *, head):
        path = request.path.split("?")[0].split("#")[0]
        if match := re.fullmatch(r"/simple/([^/]+)/", path):
            names = [n for n in self.wheels if n.split("-")[0].replace("_", "-") == match[1]]
            links = "".join(f'<a href="/files/{name}">{name}</a>' for name in names)
            body, headers = f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), {}
            headers["Content-Type"] = "text/html"
            if not names:
                body = None
        elif path.startswith("/files/"):
            body, headers = self.wheels.get(path.removeprefix("/files/")), {}
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            body = self.hub.get(f"{match[1]}/{match[3]}")
            headers = {"X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if body is not None:
                headers["ETag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            else:
                headers["X-Error-Code"] = "EntryNotFound"
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/.+)?", path):
            files = [
                name.removeprefix(f"{match[1]}/") for name in self.hub if name.startswith(f"{match[1]}/")
            ]
            facts = {"id": match[1], "siblings": [{"rfilename": name} for name in files]}
            body, headers = (json.dumps(facts).encode() if files else None), {}
            headers["X-Error-Code" if body is None else "Content-Type"] = (
                "RepoNotFound" if body is None else "application/json"
            )
        else:
            body, headers = None, {}
        self._send(request, path, body, headers, head=head)

    def _send(self, request, path, body, headers, *, head):
        if body is None:
            request.send_response(404)
            for key, value in headers.items():
                request.send_header(key, value)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range") or ""):
            start = int(match[1])
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            request.send_response(200)
        for key, value in headers.items():
            request.send_header(key, value)
        request.send_header("Content-Length", str(len(body) - start))
        request.end_headers()
        if head:
            return
        self.gets.append((path, start))
        for failures, action in ((self.stall, self._wait), (self.cut, None)):
            if failures.get(path):
                stop = failures[path].pop(0)
                request.wfile.write(body[start:stop])
                request.wfile.flush()
                if action is None:
                    request.close_connection = True
                    return
                self.waiting.append(path)
                action()
                start = stop
        with contextlib.suppress(ConnectionError):  # the reader was killed, which is the test's point
            request.wfile.write(body[start:])

    def _wait(self):
        self.stalled.set()
        self.release.wait(30)


def wheel(package, version, members):
    """A wheel's file name and bytes: `members` (path -> bytes) and the least metadata pip accepts."""
    name = package.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, data in members.items():
            archive.writestr(path, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl", buffer.getvalue()
