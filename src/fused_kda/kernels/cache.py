"""Where compiled kernels are kept between processes: a private directory, or none at all.

Each kind of kernel has a directory of its own under the cache directory, mode 0700. Where it cannot be had or written
(a read-only home, a full disk, another user's directory) kernels are kept in memory, and one warning says so.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
from pathlib import Path

from .. import gates

logger = logging.getLogger("fused_kda")

#: The kinds: directories under the cache directory.
KINDS = ("cuda", "triton")


@functools.cache
def private_directory(root: Path, kind: str) -> Path | None:
    """A kind's directory, made if need be, with nothing in it that another user put there; None if there can be none.

    Args:
        root: the cache directory.
        kind: one of :data:`KINDS`.
    """
    directory = root / kind
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(f"{directory} is not a directory of user {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) != 0o700:
            directory.chmod(0o700)
        for path in directory.rglob("*"):
            if path.lstat().st_uid != os.geteuid():
                logger.warning("%s belongs to another user: removed, and compiled anew", path)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    except OSError as error:
        unusable(root, error)
        return None
    return directory


@functools.cache
def _warn(root: Path) -> None:
    logger.warning("kernel cache %s: %s; kernels are kept in memory, so each process compiles", root, _reasons[root])


_reasons: dict[Path, str] = {}


def unusable(root: Path, error: OSError) -> None:
    """Say once in a process that a cache directory cannot be used, and why."""
    _reasons.setdefault(root, str(error))
    _warn(root)


def contents(kind: str) -> tuple[int, int]:
    """Files of a kind in the cache directory, and their bytes."""
    directory = gates.settings().cache_dir / kind
    sizes = [path.lstat().st_size for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
    return len(sizes), sum(sizes)


def clear() -> None:
    """Remove every compiled kernel from the cache directory, and nothing else that may be there.

    Raises:
        OSError: something cannot be removed.
    """
    for kind in KINDS:
        directory = gates.settings().cache_dir / kind
        if directory.exists():
            shutil.rmtree(directory)
    private_directory.cache_clear()
