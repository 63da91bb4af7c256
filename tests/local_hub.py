"""A hub on this machine: enough of its API for the real client, and the faults that real networks have."""

import hashlib
import json
import re
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


class Cut:
    """The connection ends after so many bytes."""

    def __init__(self, after):
        self.after = after


class Serve:
    """Other bytes than those of the repository, under another version, perhaps cut."""

    def __init__(self, data, after=None):
        self.data, self.after = data, after


class Status:
    def __init__(self, code, error=None):
        self.code, self.error = code, error


class LocalHub(ThreadingHTTPServer):
    """Serves `files` of one repository. `faults` are met one by one by the requests for a file, the listing is ""."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.faults = files, defaultdict(list)
        self.asked = []  # (file, its Range, headers)
        self.private = self.gated = False
        self.commit, self.elsewhere = COMMIT, self.address  # where large files are redirected to
        Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"

    def ranges(self, name):
        """Where each request for a file began."""
        return [range for file, range, _ in self.asked if file == name]

    def stop(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        pass  # a client that went away


def is_large(name):
    return name.endswith(".safetensors")


def digest(name, data):
    if is_large(name):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = urlsplit(self.path).path  # of a whole address, where we are a proxy
        hub = self.server
        if hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/owner/model"):
            return self.listing(path.partition("/revision/")[2])
        if path.startswith("/api/"):
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if found := re.fullmatch(r"/owner/model/resolve/([0-9a-f]{40})/(.+)", path):
            if hub.gated:
                return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
            if is_large(found[2]):  # as the real one: weights come from elsewhere
                return self.answer(302, b"", {"Location": f"{hub.elsewhere}/cdn/{found[2]}"})
            return self.file(found[2])
        return self.file(path.removeprefix("/cdn/"))

    def listing(self, revision):
        hub = self.server
        hub.asked.append(("", None, dict(self.headers)))
        if hub.faults[""]:
            fault = hub.faults[""].pop(0)
            return self.answer(fault.code, b"", {"X-Error-Code": fault.error} if fault.error else {})
        if revision not in ("", "main", hub.commit):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        siblings = []
        for name, data in hub.files.items():
            one = {"rfilename": name, "size": len(data), "blobId": digest("", data)}
            if is_large(name):
                one["lfs"] = {"sha256": digest(name, data), "size": len(data), "pointerSize": 130}
            siblings.append(one)
        said = {"id": "owner/model", "sha": hub.commit, "siblings": siblings}
        return self.answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def file(self, name):
        hub = self.server
        hub.asked.append((name, self.headers.get("Range"), dict(self.headers)))
        fault = hub.faults[name].pop(0) if hub.faults[name] else None
        if isinstance(fault, Status):
            return self.answer(fault.code, b"")
        data = fault.data if isinstance(fault, Serve) else hub.files[name]
        etag = f'"{hashlib.md5(data).hexdigest()}"'
        headers, code, whole = {"ETag": etag, "Accept-Ranges": "bytes"}, 200, len(data)
        wanted = self.headers.get("Range")
        if wanted and self.headers.get("If-Range") in (None, etag):
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            if start >= whole:
                return self.answer(416, b"", {"Content-Range": f"bytes */{whole}"})
            data, code = data[start:], 206
            headers["Content-Range"] = f"bytes {start}-{whole - 1}/{whole}"
        return self.answer(code, data, headers, getattr(fault, "after", None))

    def answer(self, code, data, headers=(), after=None):
        self.send_response(code)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:after])
        if after is not None and after < len(data):
            self.wfile.flush()
            self.close_connection = True
