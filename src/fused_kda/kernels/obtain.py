"""Getting a kernel into a device: from a prebuilt directory if one holds it, else by compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .. import binaries, gates
from ..binaries import Prebuilt

T = TypeVar("T")


def obtain(backend: str, key: str, load: Callable[[Prebuilt], T], compile_and_load: Callable[[], T]) -> T:
    """The loaded kernel.

    Args:
        backend: of the gates' table.
        key: the kernel's :func:`fused_kda.binaries.identity`.
        load: takes a prebuilt kernel, its files already compared with the manifest.
        compile_and_load: the way without one; counts what it compiles.

    Raises:
        gates.Unloadable: the device refuses the code. If it was a prebuilt one, that one is not offered again.
    """
    found = binaries.find(gates.prebuilt_sets(), backend, key)
    if found is None:
        return compile_and_load()
    directory, kernel = found
    try:
        loaded = load(kernel)
    except gates.Unloadable as error:
        directory.refuse(key, str(error))
        raise gates.Unloadable(str(error), prebuilt=True) from error
    binaries.counts["prebuilt"] += 1
    return loaded
