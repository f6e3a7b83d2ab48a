"""Triton's own disk cache for this package's kernels, in the private directory, with nothing taken on trust.

Triton's files are written atomically under a key of source, options, architecture and compiler. What it lacks is done
here through its cache interface: an entry also holds the SHA-256 of its files, and one that is truncated or altered is
compiled anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.cache import FileCacheManager

from .. import binaries, gates
from .cache import private_directory, unusable

logger = logging.getLogger("fused_kda")

_lock = threading.Lock()


class CheckedCache(FileCacheManager):  # type: ignore[misc]
    """One entry. Its files count only where a list of their hashes, made for this key, agrees."""

    #: What is being compiled, in words; set under the lock.
    wanted = ""

    def put_group(self, filename: str, group: Mapping[str, str]) -> Any:
        self.put(json.dumps(self._digests(group)), f"{filename}.sha256", binary=False)
        return super().put_group(filename, dict(group))

    def get_group(self, filename: str) -> Any:
        group = self._whole(filename)
        if group is not None:
            binaries.counts["cache"] += 1
        else:
            gates.before_compile(self.wanted)
        return group

    def _whole(self, filename: str) -> Any:
        if not self.has_file(f"__grp__{filename}"):
            return None
        try:
            group = super().get_group(filename)
            wanted = json.loads(Path(self.get_file(f"{filename}.sha256") or "").read_text())
            if group is not None and self._digests(group) == wanted:
                return group
        except (OSError, ValueError, AttributeError):  # truncated JSON, or of another form
            pass
        logger.warning("a damaged entry in the kernel cache %s is compiled anew", self.cache_dir)
        return None

    def _digests(self, group: Mapping[str, str]) -> dict[str, str]:
        return {
            name: hashlib.sha256(f"{self.key} {name} ".encode() + Path(path).read_bytes()).hexdigest()
            for name, path in group.items()
        }


def compile_kernel(source: ASTSource, target: GPUTarget, options: Mapping[str, Any], wanted: str) -> CompiledKernel:
    """``triton.compile`` with this package's cache. ``wanted`` names the kernel where compiling is forbidden.

    Raises:
        RuntimeError: the environment forbids to compile now, and the cache does not have it.
    """
    root = gates.settings().cache_dir
    directory = private_directory(root, "triton")
    if directory is not None:
        try:
            return _compile(directory, source, target, options, wanted)
        except OSError as error:
            unusable(root, error)
    with tempfile.TemporaryDirectory() as scratch:
        return _compile(Path(scratch), source, target, options, wanted)


def _compile(
    directory: Path, source: ASTSource, target: GPUTarget, options: Mapping[str, Any], wanted: str
) -> CompiledKernel:
    with _lock, triton.knobs.cache.scope():
        CheckedCache.wanted = wanted
        triton.knobs.cache.dir = str(directory)
        triton.knobs.cache.manager_class = CheckedCache
        return triton.compile(source, target=target, options=dict(options))
