"""A check of outputs that is cheap enough to leave on: it waits for nothing, and is read when somebody asks.

A NaN or an infinity anywhere in what a step uses of a slot (state or window), or in a row's inputs, makes that row's
output non-finite in the same step; what overflows in the state's update does so in the next. So the output, a few KiB a
row, is all that has to be looked at.

In a model with a residual stream it goes on from there to every later layer of the row. So watching the last KDA layer
alone, one launch a model step, finds the slot; :meth:`fused_kda.pool.StatePool.not_finite` then tells in which layers
it holds such numbers, and the lowest of them is where it began.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch

from .pool import StatePool


class Finding(NamedTuple):
    """A slot whose output was not finite in some step since the last :meth:`FiniteCheck.clear`, and in which layer."""

    layer: int
    slot: int


class FiniteCheck:
    """Marks the slots of a pool whose outputs were not finite.

    Args:
        pool: whose slots and layers they are.

    After each step call :meth:`watch`; now and then, or when a request ends, call :meth:`found`::

        fused_kda_decode(..., state_indices=indices, out=out)
        check.watch(layer, out, indices)
        ...
        for finding in check.found():
            pool.quarantine(finding.slot, f"not finite in layers {pool.not_finite(finding.slot)}")
            check.clear(finding.slot)

    ``python -m fused_kda.bench.finite`` measures what it adds to a step.
    """

    def __init__(self, pool: StatePool) -> None:
        device = pool.layer(0).state.device
        # One place more than slots, where rows that name no slot are marked and nobody reads; then up to 16 bytes.
        self._flags = torch.zeros(pool.layers, pool.slots // 4 * 4 + 4, dtype=torch.int32, device=device)
        self._slots, self._null_slot = pool.slots, pool.null_slot
        self._fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None

    def watch(self, layer: int, out: torch.Tensor, state_indices: torch.Tensor) -> None:
        """Look at one step's output, on the current stream: no wait, and no allocation where Triton is installed.

        May be captured into a CUDA graph; a replay looks again. On a GPU with Triton it is one launch.

        Args:
            layer: of the pool.
            out: of the step, ``[1, B, H, D]``, ``[B, H, D]`` or ``[B, P]``. Read.
            state_indices: of the step, ``[B]`` or ``[B, 1]``. Read.
        """
        flags = self._flags[layer]
        batch = state_indices.shape[0]
        if batch == 0:
            return
        rows = out[0] if out.ndim == 4 else out
        if self._fused and out.dtype == torch.bfloat16:
            from .kernels.finite import marker

            launch = marker(
                out.device, batch, state_indices.dtype, self._slots, self._null_slot, rows.numel() // batch,
                rows.stride(0), state_indices.stride(0),
            )  # fmt: skip
            with torch.cuda.device(out.device):
                launch({"flags": flags, "out": rows, "state_indices": state_indices})
            return
        bad = ~rows.reshape(batch, -1).isfinite().all(1)
        slots = state_indices.flatten().long()
        live = (slots > self._null_slot) & (slots < self._slots)
        flags.scatter_reduce_(0, torch.where(live, slots, self._slots), bad.int(), "amax")

    def found(self) -> list[Finding]:
        """The findings so far, by layer and slot. Waits for the device."""
        marked = self._flags[:, : self._slots].nonzero().tolist()
        return [Finding(layer, slot) for layer, slot in marked]

    def clear(self, slot: int | None = None) -> None:
        """Forget what was found of a slot, or of all, before it is used again."""
        (self._flags if slot is None else self._flags[:, slot]).zero_()
