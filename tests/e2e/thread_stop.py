"""Stops one thread of a child process, as a hang does, and lets it go on: ptrace, as a debugger uses it."""
import contextlib
import ctypes
import os
import pathlib

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
WAIT_ALL = 0x40000000  # __WALL: a thread is no child

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def thread_of(process, name):
    tasks = pathlib.Path(f"/proc/{process}/task").iterdir()
    return next(int(t.name) for t in tasks if (t / "comm").read_text().strip() == name)


def _ptrace(what, thread):
    if libc.ptrace(what, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@contextlib.contextmanager
def stopped(thread):
    """OSError: this system does not allow it."""
    _ptrace(SEIZE, thread)
    _ptrace(INTERRUPT, thread)
    os.waitpid(thread, WAIT_ALL)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            _ptrace(DETACH, thread)


def has_ended(thread):
    """Whether a stopped thread is gone with its process, which nobody else hears of before this has been asked."""
    try:
        return os.waitpid(thread, WAIT_ALL | os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True
