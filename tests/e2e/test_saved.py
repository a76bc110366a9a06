"""Goal: a conversation in a file comes back, by `paged run --session` and by POST /slots, and neither a damaged file nor a
name from a client does harm (D07, D09). Method: the program from outside on a tiny model; what lies in the directory is looked
at after each refusal."""
import json
import os
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
"""


def test_others_are_answered_while_a_file_is_written(path, tmp_path):
    folder, slow, library = tmp_path / "in", tmp_path / "slow", tmp_path / "slow_disk.so"
    folder.mkdir()
    subprocess.run(["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=SLOW_DISK, text=True, check=True)
    env = {"LD_PRELOAD": str(library), "SLOW_DISK": str(slow), "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}
    with serving.Server(path, "--slot-save-path", folder, "--max-running", 2, env=env) as server:
        text, _, n_prompt = ask(server, id_slot=0)
        slow.touch()
        answers = []
        saver = threading.Thread(target=lambda: answers.append(slot(server, "save", {"filename": "a"})))
        saver.start()
        with server.connect() as leaver:  # its file is written all the same
            leaver.sendall(serving.raw_request("/slots/0?action=save", {"filename": "b"}))
            server.get("/health")
            deadline = time.monotonic() + 60
            while not any(name.startswith("a.") for name in os.listdir(folder)) and time.monotonic() < deadline:
                time.sleep(0.01)
            # Others are answered, that slot goes on, and what it has then is not in the file.
            assert ask(server, id_slot=0, max_tokens=20)[0].startswith(text) and ask(server, id_slot=1)[0] == text
        assert not answers and os.listdir(folder) == [name for name in os.listdir(folder) if name.endswith(".tmp")]
        slow.unlink()
        saver.join(60)
        assert answers[0][0] == 200 and n_prompt < answers[0][1]["n_saved"] <= n_prompt + ASK["max_tokens"], answers
        while not (folder / "b").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (folder / "a").read_bytes() == (folder / "b").read_bytes()
        server.wait_idle()
        slow.touch()
        leaver = server.connect()
        leaver.sendall(serving.raw_request("/slots/0?action=save", {"filename": "c"}))
        while not any(name.startswith("c.") for name in os.listdir(folder)) and time.monotonic() < deadline:
            time.sleep(0.01)
        leaver.close()
        threading.Timer(0.2, slow.unlink).start()
    assert sorted(os.listdir(folder)) == ["a", "b", "c"]  # the end waits for it


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
