"""A Redis server of its own for tests, on a socket in a temporary folder, without persistence. Standard library only."""
import pathlib
import shutil
import socket
import subprocess
import time

import pytest


def program():
    """Debian's redis-tools has the server under another name, and it goes by the name that it is called by."""
    found = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if not found:
        pytest.skip("there is no redis-server (Debian's package redis-tools has it)")
    return found


class Redis:
    """A context manager; address: as --redis takes it."""

    def __init__(self, folder, name="redis", *args):
        self.socket = str(pathlib.Path(folder) / f"{name}.sock")
        assert len(self.socket) < 100, self.socket
        self.address, self.folder, self.args = f"unix:{self.socket}", folder, args
        self.executable = program()
        self.start()

    def start(self):
        command = ["redis-server", "--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no", "--dir",
                   str(self.folder), *self.args]
        self.process = subprocess.Popen(command, executable=self.executable, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                assert self("PING") in ("PONG", b"PONG")
                return
            except OSError:
                time.sleep(0.01)
        raise AssertionError("redis-server does not start")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()

    def __call__(self, *words):
        """One command; the reply as bytes, int, list, None, or an error raised."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(60)
            s.connect(self.socket)
            parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
            s.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
            with s.makefile("rb") as stream:
                return self.read(stream)

    def read(self, stream):
        line = stream.readline().rstrip(b"\r\n")
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            raise AssertionError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return [self.read(stream) for _ in range(int(rest))]
        if int(rest) < 0:
            return None
        data = stream.read(int(rest))
        stream.read(2)
        return data
