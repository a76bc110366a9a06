"""What goes wrong, as exceptions. Each status of the library has a class of its own under Error; the message has the numbers.

Where Python has a word for it the class is that, too: InvalidArgument is a ValueError, NotFound a LookupError, NoMemory a
MemoryError.
"""

from ._native import ffi, lib

__all__ = ["Cancelled", "Corrupt", "Error", "FormatError", "InvalidArgument", "Limit", "NoBlocks", "NoMemory", "NoSequences",
           "NotFound", "ReadWriteError", "Stale", "TooLong", "Unsupported"]


class Error(Exception):
    """Anything that the library refuses or cannot do. `status` is its paged_status."""

    status = None


class InvalidArgument(Error, ValueError):
    """The caller's mistake; nothing has changed."""

    status = lib.PAGED_ERR_INVALID_ARG


class NoMemory(Error, MemoryError):
    """The system has no memory left."""

    status = lib.PAGED_ERR_NO_MEMORY


class NoBlocks(Error):
    """The pool, or a table, has too few free blocks. Nothing has changed; free something, or take a larger pool."""

    status = lib.PAGED_ERR_NO_BLOCKS


class NoSequences(Error):
    """All sequence slots of a cache are in use (`max_seqs`)."""

    status = lib.PAGED_ERR_NO_SEQS


class Stale(Error):
    """The sequence, or what it belongs to, is closed."""

    status = lib.PAGED_ERR_STALE


class TooLong(Error):
    """Longer than the context allows."""

    status = lib.PAGED_ERR_TOO_LONG


class ReadWriteError(Error, OSError):
    """A file or the system failed."""

    status = lib.PAGED_ERR_IO


class FormatError(Error):
    """A file is damaged, or hostile."""

    status = lib.PAGED_ERR_FORMAT


class Unsupported(Error):
    """Right, but not something that this build can do."""

    status = lib.PAGED_ERR_UNSUPPORTED


class Cancelled(Error):
    """Somebody cancelled it."""

    status = lib.PAGED_ERR_CANCELLED


class Limit(Error):
    """A limit was reached, a full queue for one."""

    status = lib.PAGED_ERR_LIMIT


class Corrupt(Error):
    """An invariant does not hold: a bug of the library, or memory that somebody else has written to."""

    status = lib.PAGED_ERR_CORRUPT


class NotFound(Error, LookupError):
    """There is no such thing."""

    status = lib.PAGED_ERR_NOT_FOUND


_CLASSES = {cls.status: cls for cls in Error.__subclasses__()}


def check(status, error=None, what=""):
    """Raises what a status says. `error` is the paged_error of the call, `what` the words for a call that has none."""
    if status == lib.PAGED_OK:
        return
    text = ffi.string(error.message).decode(errors="replace") if error is not None else ""
    if not text:
        text = ffi.string(lib.paged_status_text(status)).decode()
        text = f"{what}: {text}" if what else text
    raise _CLASSES.get(status, Error)(text)


def new_error():
    return ffi.new("paged_error *")
