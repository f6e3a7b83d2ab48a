"""Debug mode (``FUSED_KDA_DEBUG=1``): the data of a call looked at before its step, at the cost of a synchronisation.

:mod:`fused_kda.api` calls :func:`check` where the switch is on. What it finds it names by row and slot, and by layer
where somebody has said which pool belongs to which (:func:`label`; :class:`fused_kda.pool.StatePool` does).
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict

import torch

from .contract import DecodeProblem, Tensors

logger = logging.getLogger("fused_kda")

#: Names of recurrent pools, by the address of their first element.
_labels: dict[int, str] = {}
_skipped: set[str] = set()


def label(state: torch.Tensor, name: str) -> None:
    """Give a recurrent pool ``[slots, H, D, D]`` the name under which debug mode reports it, such as "layer 3".

    Held as long as this tensor object lives. The same name again changes nothing.
    """
    address = state.data_ptr()
    if _labels.get(address) == name:
        return
    _labels[address] = name
    weakref.finalize(state, _labels.pop, address, None).atexit = False


def check(problem: DecodeProblem, tensors: Tensors) -> None:
    """Refuse repeated live slots, out-of-range indices and non-finite pools. Reads, changes nothing; synchronises.

    Out of range is what no engine means: beyond the pool, or below -1, although both are null rows to a kernel. A pool
    is looked at in the slots whose old content the step will use. While a CUDA graph is being captured there is no data
    yet: nothing is checked then, and a warning says so once.

    Raises:
        ValueError: naming the rows, the slots and, where it is known, the layer. Nothing has been touched.
    """
    if problem.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        if "capture" not in _skipped:
            _skipped.add("capture")
            logger.warning("debug mode: steps of a captured graph are not checked, neither now nor at a replay")
        return
    found = _indices(problem, tensors) or _pools(problem, tensors)
    if found:
        name = _labels.get(tensors.state.data_ptr())
        raise ValueError(found if name is None else f"{found} ({name})")


def _indices(problem: DecodeProblem, tensors: Tensors) -> str | None:
    indices = tensors.state_indices.flatten().tolist()
    beyond = [row for row, slot in enumerate(indices) if not -1 <= slot < problem.slots]
    if beyond:
        return (
            f"state_indices: expected -1 <= slot < {problem.slots}, got {[indices[row] for row in beyond]} "
            f"in rows {beyond}"
        )
    owners: dict[int, list[int]] = defaultdict(list)
    for row, slot in enumerate(indices):
        if slot > problem.null_slot:
            owners[slot].append(row)
    repeated = {slot: rows for slot, rows in owners.items() if len(rows) > 1}
    return f"state_indices: expected each live slot once, got slot: rows {repeated}" if repeated else None


def _pools(problem: DecodeProblem, tensors: Tensors) -> str | None:
    """Live rows name slots once each, which has been checked."""
    indices = tensors.state_indices.flatten()
    used = indices > problem.null_slot
    if tensors.has_initial_state is not None:
        used &= tensors.has_initial_state
    rows = used.nonzero().flatten()
    slots = indices[rows].long()
    for name, pool in (("conv_state", tensors.conv_state), ("state", tensors.state)):
        bad = ~pool[slots].isfinite().flatten(1).all(1)
        if bool(bad.any()):
            pairs = list(zip(rows[bad].tolist(), slots[bad].tolist(), strict=True))
            return f"{name}: expected finite values in live slots, got others in (row, slot) {pairs}"
    return None
