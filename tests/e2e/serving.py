"""A server of its own for tests: starts `paged serve`, talks to it, ends it. Standard library only."""
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import threading
import time

import conftest


class Server:
    """paged serve on a free port; a context manager."""
    was_killed = False

    def __init__(self, model, *args, env=None):
        command = [conftest.program("paged"), "serve", "--model", str(model), "--port", "0", "--threads", "1", *map(str, args)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PAGED_")}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                        env=dict(clean, **(env or {})))
        self.errors = []
        self.reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self.reader.start()
        line = self.process.stdout.readline()
        if not line.startswith("listening on http://"):
            self.process.wait(timeout=60)
            self.reader.join(5)
            raise AssertionError(f"{' '.join(command)}: {self.process.returncode}: {''.join(self.errors)}")
        self.url = line.split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        code = self.stop()
        self.reader.join(5)
        assert kind or code == 0 or self.was_killed, f"{code}: {''.join(self.errors)[-4000:]}"

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=60)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()
        return self.process.returncode

    def kill(self):
        """As if the power had gone."""
        self.was_killed = True
        self.process.kill()
        self.process.wait()

    def request(self, method, path, body=None, headers=None, timeout=120):
        """(status, headers, JSON or text)"""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            raw = response.read().decode()
        with contextlib.suppress(ValueError):
            return response.status, dict(response.getheaders()), json.loads(raw)
        return response.status, dict(response.getheaders()), raw

    def get(self, path, **options):
        status, _, value = self.request("GET", path, **options)
        assert status == 200, value
        return value

    def post(self, path, body, **options):
        status, _, value = self.request("POST", path, body, **options)
        assert status == 200, value
        return value

    def connect(self, receive_bytes=None):
        s = socket.socket()
        if receive_bytes:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        s.settimeout(60)
        s.connect(("127.0.0.1", self.port))
        return s

    def metrics(self):
        """{name{labels without the model's}: value}"""
        values = {}
        for line in self.get("/metrics").splitlines():
            if line and line[0] != "#":
                name, value = line.rsplit(" ", 1)
                values[name.replace(f'model_name="{self.model_name()}",engine="0"', "").replace("{,", "{").replace("{}", "")] = float(value)
        return values

    def model_name(self):
        if not hasattr(self, "_name"):
            self._name = self.get("/v1/models")["data"][0]["id"]
        return self._name

    def used_blocks(self):
        return self.metrics()['paged_blocks{state="used"}']

    def wait_idle(self, seconds=60):
        """Until no block is in use; the check of every invariant holds then."""
        deadline = time.monotonic() + seconds
        while self.used_blocks() and time.monotonic() < deadline:
            time.sleep(0.02)
        metrics = self.metrics()
        assert metrics['paged_blocks{state="used"}'] == 0, {k: v for k, v in metrics.items() if "block" in k or "num_" in k}
        assert self.get("/paged/check") == {"ok": True}


def raw_request(path, body=None, method=None, headers=""):
    """The bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    length = f"Content-Length: {len(data)}\r\n" if body is not None else ""
    method = method or ("GET" if body is None else "POST")
    return f"{method} {path} HTTP/1.1\r\nHost: test\r\n{length}{headers}\r\n".encode() + data


def read_response(stream):
    """One response from a file of a socket: (status, headers, body); None: closed."""
    line = stream.readline()
    if not line:
        return None
    assert line.startswith(b"HTTP/1.1 "), line
    status, headers = int(line.split()[1]), {}
    while (line := stream.readline()) not in (b"\r\n", b""):
        name, value = line.decode().split(":", 1)
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while n := int(stream.readline(), 16):
            body += stream.read(n)
            assert stream.read(2) == b"\r\n"
        assert stream.readline() == b"\r\n"
    else:
        body = stream.read(int(headers.get("content-length", 0)))
    return status, headers, body


def events(body):
    """The data of a stream's events, "[DONE]" as it is; comments are left out. Every event is one line and a blank one."""
    text = body.decode("utf-8")
    assert text.endswith("\n\n"), text[-80:]
    blocks = [b for b in text[:-2].split("\n\n") if not b.startswith(":")]
    assert all(b.startswith("data: ") and "\n" not in b for b in blocks), blocks
    return [b[6:] if b == "data: [DONE]" else json.loads(b[6:]) for b in blocks]
