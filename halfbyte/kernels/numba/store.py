"""Where compiled kernels are kept: one file each in a private folder, so that only the first start compiles.

The folder's name stands for what all compiled code depends on: Numba, LLVM, Python and the CPU. A file's name stands
for a kernel, its sources (its module and those of this folder that it is made from) and the types of its arguments, so
that a new version compiles only what it changes. A file begins with the digest of what follows, and appears whole under
its name. So a damaged file counts as missing, and where processes compile the same kernel at the
same time either's file will do. (Numba's own cache numbers its files and lists them in an index: two processes can make
an entry name the other's file.)

What is kept is executed. So neither a folder nor a file is used that belongs to, or can be written by, anybody else.
"""

import atexit
import errno
import hashlib
import logging
import os
import pickle
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import llvmlite
import numba
from llvmlite import binding
from numba.core import config
from numba.core.compiler import CompileResult
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
LAYOUT = "2"  # of the names in this folder
DIGEST = hashlib.sha256().digest_size
UNUSED = 90 * 86400  # seconds after which what another version has compiled is removed


def base():
    """The user's cache folder."""
    if sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        return Path(os.environ["LOCALAPPDATA"]) / "halfbyte"
    given = os.environ.get("XDG_CACHE_HOME", "")  # one that is relative is to be ignored, says its specification
    return Path(given if os.path.isabs(given) else os.path.join(os.path.expanduser("~"), ".cache")) / "halfbyte"


def version():
    """What compiled code depends on, as a name."""
    cpu = (
        config.CPU_NAME or binding.get_host_cpu_name(),
        binding.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES,
    )
    versions = LAYOUT, numba.__version__, llvmlite.__version__, platform.python_version(), platform.machine(), *cpu
    return f"numba-{digest(chr(0).join(versions).encode())}"


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


@cache
def imported(module):
    """The source of a module of this folder, and the names of those that it imports from here."""
    source = (HERE / f"{module}.py").read_text(encoding="utf-8")
    names = {name for line in re.findall(r"^from \. import (.+)$", source, re.M) for name in line.split(", ")}
    return source.encode(), names | set(re.findall(r"^from \.(\w+) import", source, re.M))


@cache
def sources(module):
    """The digest of all sources that a module's kernels may be made from; this file only keeps them."""
    found, coming = {}, {module}
    while coming:
        name = coming.pop()
        found[name], more = imported(name)
        coming |= more - found.keys() - {"store"}
    return digest(b"".join(found[name] for name in sorted(found)))


@cache
def folder():
    """The folder of this version; one of this process where that is not ours, or not ours alone; None where none is."""
    wanted = base() / version()
    try:
        if not wanted.is_absolute():
            raise FileNotFoundError(errno.ENOENT, "this user has no home folder", str(wanted))
        have_private(wanted.parent)  # whoever can write there puts another in the place of the one below
        new = have_private(wanted)
        with tempfile.TemporaryFile(dir=wanted):
            os.utime(wanted)  # in use
        if new:
            remove_unused(wanted)
        return wanted
    except OSError as error:
        log.warning(
            "%s: %s. Until then CPU kernels are compiled at every start; XDG_CACHE_HOME names another place for them.",
            error.filename or wanted, error.strerror or error,
        )  # fmt: skip
    with suppress(OSError):
        passing = Path(tempfile.mkdtemp(prefix="halfbyte-numba-"))
        atexit.register(shutil.rmtree, passing, ignore_errors=True)
        return passing
    return None


def state():
    """Where kernels are kept, whether that lasts, and how many there are of how many bytes."""
    wanted, used = base() / version(), folder()
    sizes = [] if used is None else [path.stat().st_size for path in used.glob("*.kernel")]
    return {"folder": str(wanted), "lasts": used == wanted, "kernels": len(sizes), "bytes": sum(sizes)}


def have_private(path):
    """Make a folder, with those above it that are missing, for us alone, or refuse the one there is; whether it is new.

    Whoever made what was there above it may have meant others to read it.
    """
    missing = [one for one in (path, *path.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)  # another process may have been faster
    if why := exposed(found := path.stat()):
        remedy = "remove it"
        if found.st_uid == os.geteuid():
            remedy = f"`chmod 700 '{path}'` if nobody else has put anything there, else remove it"
        raise PermissionError(errno.EACCES, f"{why}, and what lies there is executed: {remedy}", str(path))
    return path in missing


def exposed(found):
    """Why somebody else may have written what this is the state of; "" where nobody else can have."""
    if not hasattr(os, "geteuid"):
        return ""
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others can write to it" if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


@cache
def warn_of_files(where):
    """Once for a folder, as it was perhaps open to others before."""
    log.warning(
        "%s: files in it belong to another user, or others can write to them. They are not executed, but compiled "
        "again; if that recurs, remove the folder.", where,
    )  # fmt: skip


def remove_unused(current):
    """Folders of versions that nobody has used for long."""
    for other in current.parent.glob("numba-*"):
        with suppress(OSError):
            if other != current and time.time() - other.stat().st_mtime > UNUSED:
                shutil.rmtree(other)


@cache
def remove_old(current):
    """Kernels of sources that nobody has used for long, and what processes that ended early left half written; looked
    for once a process, when one is compiled."""
    for path in current.glob("*.kernel*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED:
                path.unlink()


def portable(compiled):
    """A compiled kernel as bytes that another process can load."""
    if compiled.library.has_dynamic_globals:
        name = compiled.fndesc.qualname
        raise TypeError(f"{name} calls an address of this process: kept, it would call the same one in another")
    return dumps(compiled._reduce())


class Kept:
    """The cache of one kernel, as Numba's dispatchers use it."""

    def __init__(self, function):
        module = function.__module__.rpartition(".")[2]
        self.name = f"{module}.{function.__name__}"
        self.sources = sources(module)  # now, as they are imported: files may change under a process that runs
        self.ready = {}  # read already, or compiled by another process for this one

    @property
    def cache_path(self):
        return str(folder())

    def path(self, signature):
        where = folder()
        types = digest(repr(tuple(signature)).encode())
        return None if where is None else where / f"{self.name}-{types}-{self.sources}.kernel"

    def load_overload(self, signature, target_context):
        """The compiled kernel for arguments of these types; None where it must be compiled.

        Compiled code needs Numba's runtime and its threads, which it asks how many they are, and no more. Numba would
        first load all that it can compile, which takes as long as importing it.
        """
        rtsys.initialize(target_context)
        numba.get_num_threads()
        try:
            data = self.ready.pop(tuple(signature), None) or self.read(signature)
            return CompileResult._rebuild(target_context, *pickle.loads(data))
        except Exception:  # no file, or whatever one holds: compiling mends it
            return None

    def read(self, signature):
        path = self.path(signature)
        if path is None:
            raise FileNotFoundError("nothing is kept: no folder can be written to")
        with path.open("rb") as file:
            if exposed(os.fstat(file.fileno())):  # of what was opened: a name may come to mean another file
                warn_of_files(path.parent)
                raise PermissionError("not ours alone to write")
            data = file.read()
        with suppress(OSError):
            os.utime(path)  # in use
        if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
            raise ValueError("a damaged file")
        return data[DIGEST:]

    def save_overload(self, signature, compiled):
        self.save(signature, portable(compiled))

    def accept(self, signature, data):
        """Code that another process has compiled for this one."""
        self.ready[tuple(signature)] = data
        self.save(signature, data)

    def save(self, signature, data):
        """Keep `portable` code. Where there is no room for it, the kernel is compiled again next time."""
        path = self.path(signature)
        if path is None:
            return
        passing = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            with open(passing, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(hashlib.sha256(data).digest() + data)
            passing.replace(path)
            remove_old(path.parent)
        except OSError:
            with suppress(OSError):
                passing.unlink()

    def has(self, signature):
        """Whether the store has this kernel, whole. It is read for that, and kept until it is loaded."""
        try:
            self.ready[tuple(signature)] = self.read(signature)
        except (OSError, ValueError):
            return False
        return True

    def enable(self):
        """Part of Numba's interface: there is nothing to enable."""

    def disable(self):
        """Part of Numba's interface."""

    def flush(self):
        """Part of Numba's interface."""
