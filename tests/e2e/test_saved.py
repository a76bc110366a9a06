"""Goal: a conversation in a file comes back, by `paged run --session` and by POST /slots, and neither a damaged file nor a
name from a client does harm (D07, D09). Method: the program from outside on a tiny model; what lies in the directory is looked
at after each refusal."""
import fcntl
import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import serving

PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
ASK = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tiny):
    return tiny("mha-16")[2]


def run(paged, path, session, *args, code=0):
    done = paged("run", "--model", path, "--raw", "--prompt", PROMPT, "--max-tokens", 12, "--ignore-eos", "--threads", 1, "--json",
                 "--session", session, *args)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


def test_run_goes_on_where_it_was(paged, path, tmp_path):
    session = tmp_path / "chat"
    first, again = run(paged, path, session), run(paged, path, session)
    assert first["cached_tokens"] == 0 and again["cached_tokens"] == again["prompt_tokens"] - 1
    assert again["text"] == first["text"] and again["tokens"] == first["tokens"]
    assert os.listdir(tmp_path) == ["chat"]
    whole = session.read_bytes()
    for bad in (b"", whole[:len(whole) // 10], whole[:len(whole) // 2], whole[:-1], whole + bytes(100), b"x" + whole[1:]):
        session.write_bytes(bad)
        assert "chat" in run(paged, path, session, code=1)
        assert session.read_bytes() == bad
    session.write_bytes(whole)
    theirs = again["kv_type"]
    assert f"in {theirs}, and this engine has them in f32; one with kv_type {theirs} can load it" in run(
        paged, path, session, "--kv-type", "f32", code=1)
    assert run(paged, path, session)["cached_tokens"] == again["cached_tokens"]


def ask(server, **more):
    value = server.post("/v1/completions", dict(ASK, **more))
    usage = value["usage"]
    return value["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


def slot(server, action, body, number=0):
    status, _, value = server.request("POST", f"/slots/{number}?action={action}", body)
    return status, value


def test_slots_are_saved_and_restored(path, tmp_path):
    with serving.Server(path, "--slot-save-path", tmp_path, "--max-running", 2) as server:
        assert slot(server, "save", {"filename": "chat-01"})[0] == 400  # nothing has run there
        text, cached, _ = ask(server, id_slot=1)
        assert cached == 0
        status, saved = slot(server, "save", {"filename": "chat-01"}, 1)
        assert status == 200 and saved["n_saved"] > 200 and saved["n_written"] == (tmp_path / "chat-01").stat().st_size
        assert slot(server, "erase", None, 1) == (200, {"id_slot": 1, "n_erased": saved["n_saved"] + 1})
        assert slot(server, "save", {"filename": "chat-01"}, 1)[0] == 400
        assert slot(server, "save", {"filename": "a"}, 2)[0] == 404 and slot(server, "save", {"filename": "a"}, "x")[0] == 404
        assert slot(server, "eat", {"filename": "a"})[0] == 400 and server.request("POST", "/slots/0", {})[0] == 400
    with serving.Server(path, "--slot-save-path", tmp_path, "--max-running", 2) as server:
        status, restored = slot(server, "restore", {"filename": "chat-01"})
        assert status == 200 and restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        again, cached, n_prompt = ask(server)
        assert again == text and cached == n_prompt - 1
        assert slot(server, "save", {"filename": "chat-02"})[1]["n_saved"] == saved["n_saved"]
        assert slot(server, "restore", {"filename": "none"})[0] == 404
        # With a salt it is for those who have it.
        assert slot(server, "restore", {"filename": "chat-01", "cache_salt": "s"}, 1)[0] == 200
        assert ask(server, cache_salt="s")[1] == n_prompt - 1 and ask(server, cache_salt="t")[1] == 0
        # D07: each damage is told, and nothing has changed.
        whole = (tmp_path / "chat-01").read_bytes()
        server.wait_idle()
        for bad in (b"", whole[:len(whole) // 10], whole[:len(whole) // 2], whole[:-10], whole + bytes(100), flip(whole, 3),
                    flip(whole, 900), flip(whole, len(whole) - 3000)):
            (tmp_path / "bad").write_bytes(bad)
            status, value = slot(server, "restore", {"filename": "bad"})
            assert status == 400 and "bad" in value["error"]["message"], value
            server.wait_idle()
        assert ask(server)[0] == text


# A disk that is slow as long as a file is there.
SLOW_DISK = """#include <stdlib.h>
#include <unistd.h>
int fsync(int fd) { (void)fd; while (access(getenv("SLOW_DISK"), F_OK) == 0) usleep(1000); return 0; }
int fdatasync(int fd) { return fsync(fd); }
"""


class SlowDisk:
    """A directory for slots, and the file that makes it slow."""

    def __init__(self, path):
        self.folder, self.slow, library = path / "in", path / "slow", path / "slow_disk.so"
        self.folder.mkdir()
        subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=SLOW_DISK, text=True, check=True)
        self.env = {"LD_PRELOAD": str(library), "SLOW_DISK": str(self.slow),
                    "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}

    def serve(self, model, *args):
        return serving.Server(model, "--slot-save-path", self.folder, "--max-running", 2, *args, env=self.env)

    def names(self):
        return sorted(os.listdir(self.folder))

    def hangs(self, name):
        """Whether it is all that is being written."""
        mine = [n for n in self.names() if n.endswith(".tmp")]
        return len(mine) == 1 and mine[0].startswith(f".{name}.")


@pytest.fixture(name="disk")
def slow_disk(tmp_path):
    return SlowDisk(tmp_path)


def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def save_and_leave(server, name):
    """Sends a save and does not wait for its end."""
    client = server.connect()
    client.sendall(serving.raw_request("/slots/0?action=save", {"filename": name}))
    return client


def test_others_are_answered_while_a_file_is_written(path, disk):
    with disk.serve(path) as server:
        text, _, n_prompt = ask(server, id_slot=0)
        disk.slow.touch()
        answers = []
        saver = threading.Thread(target=lambda: answers.append(slot(server, "save", {"filename": "a"})))
        saver.start()
        until(lambda: disk.hangs("a"))
        # Others are answered, that slot goes on, and what it has then is not in the file.
        assert ask(server, id_slot=0, max_tokens=20)[0].startswith(text) and ask(server, id_slot=1)[0] == text
        kept = server.post("/v1/conversations", {"messages": [{"role": "user", "content": "hi"}]}, timeout=10)
        assert server.get(f"/v1/conversations/{kept['id']}", timeout=10)["n_messages"] == 1
        # One at a time.
        status, headers, value = server.request("POST", "/slots/1?action=save", {"filename": "b"})
        assert status == 503 and headers["Retry-After"] and "file is being written" in value["error"]["message"], value
        assert not answers and disk.hangs("a")
        disk.slow.unlink()
        saver.join(60)
        assert answers[0][0] == 200 and n_prompt < answers[0][1]["n_saved"] <= n_prompt + ASK["max_tokens"], answers
        assert slot(server, "save", {"filename": "b"}, 1)[0] == 200
        assert (disk.folder / "b").stat().st_size == answers[0][1]["n_written"]
        server.wait_idle()
        disk.slow.touch()
        leaver = save_and_leave(server, "c")
        until(lambda: disk.hangs("c"))
        leaver.close()
        threading.Timer(0.2, disk.slow.unlink).start()
    assert disk.names() == ["a", "b", "c"]  # the end waits for it


def resident_bytes(server):
    with open(f"/proc/{server.process.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_clients_that_leave_collect_no_copies(path, disk):
    with disk.serve(path) as server:
        ask(server, id_slot=0, max_tokens=200)
        n_bytes = slot(server, "save", {"filename": "first"})[1]["n_written"]
        disk.slow.touch()
        first = save_and_leave(server, "a")
        until(lambda: disk.hangs("a"))
        first.close()
        before, n = resident_bytes(server), (128 << 20) // n_bytes
        for i in range(n):
            with save_and_leave(server, f"b{i}") as client:
                if i % 8 == 0:  # the others leave at once
                    assert client.recv(100).startswith(b"HTTP/1.1 503 ")
        assert slot(server, "save", {"filename": "z"})[0] == 503
        assert resident_bytes(server) - before < 64 << 20, n
        assert disk.hangs("a")
        disk.slow.unlink()
        until(lambda: "a" in disk.names())
        until(lambda: slot(server, "save", {"filename": "z"})[0] == 200)
        server.wait_idle()
    assert disk.names() == ["a", "first", "z"]


@pytest.mark.parametrize("seconds, signals", [(60, 2), (1, 1)])
def test_the_end_does_not_wait_for_a_disk_that_hangs(path, disk, seconds, signals):
    server = disk.serve(path, "--drain-timeout", seconds)
    ask(server, id_slot=0)
    disk.slow.touch()
    with save_and_leave(server, "a"):
        until(lambda: disk.hangs("a"))
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        server.process.wait(timeout=0.3)
    if signals == 2:
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=20) == 1
    server.stop()
    server.reader.join(5)
    assert "is not written yet" in "".join(server.errors)
    # What it left goes when the directory is used again; nothing else, and not what somebody writes at this time.
    assert disk.hangs("a")
    others = [".a.1-f.tmp.x", ".a.1-g.tmp", ".a.-f.tmp", ".1-f.tmp", "a.1-f.tmp", ".tmp"]
    for name in others:
        (disk.folder / name).touch()
    (disk.folder / ".link.1-f.tmp").symlink_to(disk.folder / "a.1-f.tmp")
    os.mkfifo(disk.folder / ".pipe.1-f.tmp")
    others += [".link.1-f.tmp", ".pipe.1-f.tmp", ".held.1-f.tmp"]
    with open(disk.folder / ".held.1-f.tmp", "wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        disk.slow.unlink()
        with disk.serve(path) as server:
            assert disk.names() == sorted(others)
            ask(server)
            assert slot(server, "save", {"filename": "a"})[0] == 200
    assert disk.names() == sorted([*others, "a"])


def test_a_signal_ends_a_server_whose_conversations_hang(path, disk, tmp_path):
    server = disk.serve(path, "--store", tmp_path / "store", "--drain-timeout", 1)
    server.post("/v1/conversations", {"messages": [{"role": "user", "content": "hi"}]})
    disk.slow.touch()
    with server.connect() as client:
        client.sendall(serving.raw_request("/v1/conversations", {"messages": [{"role": "user", "content": "hi"}]}))
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(timeout=2)

    def ends():
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        return server.process.poll() is not None

    until(ends)
    assert server.stop() == -signal.SIGTERM


def test_a_directory_that_is_gone(path, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    with serving.Server(path, "--slot-save-path", folder) as server:
        ask(server)
        folder.rmdir()
        status, value = slot(server, "save", {"filename": "a"})
        assert status == 500 and value["error"]["code"] == "io_error", value
        assert slot(server, "restore", {"filename": "a"})[0] == 404


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1:]


def test_names_never_become_paths(path, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    names = ["../a", "..", ".", "", "/tmp/a", "a/b", "a\\b", "a\0b", "a" * 300, ".a", "a b", "ä", "a\n", None, 7, ["a"]]
    with serving.Server(path, "--slot-save-path", folder) as server:
        ask(server)
        assert slot(server, "save", {"filename": "good"})[0] == 200
        (folder / "link").symlink_to(folder / "good")
        os.mkfifo(folder / "pipe")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(str(folder / "socket"))
        (folder / "dir").mkdir()
        before = sorted(os.listdir(folder)), sorted(os.listdir(tmp_path))
        for action in ("save", "restore"):
            for name in names:
                assert slot(server, action, {"filename": name})[0] == 400, name
            assert slot(server, action, b'{"filename": "a\xff"}')[0] == 400
            assert slot(server, action, {})[0] == 400 and slot(server, action, b"")[0] == 400
        for name in ("link", "pipe", "socket", "dir"):
            assert slot(server, "restore", {"filename": name})[0] == 400, name
        assert (sorted(os.listdir(folder)), sorted(os.listdir(tmp_path))) == before
        assert slot(server, "save", {"filename": "link"})[0] == 200  # replaces the link, not what it leads to
        assert not (folder / "link").is_symlink() and (folder / "good").is_file()
        assert slot(server, "save", {"filename": "dir"})[0] == 400
        server.wait_idle()
    with serving.Server(path) as server:
        assert slot(server, "save", {"filename": "a"})[0] == 501
