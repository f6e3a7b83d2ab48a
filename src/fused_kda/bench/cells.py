"""One cell of the measurement: a size, its bytes, and the layers that a graph replays.

Every layer has recurrent and conv pools of its own, and there are so many layers that together they are several times
the L2 cache: a layer finds its state cold, as in a model. Inputs and weights are shared by the layers; they are warm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..layouts import LAYOUTS, ConvLayout, LayoutKind, conv_view
from ..testing.problems import Call

DIM, WIDTH = 128, 4
#: KDA layers of Kimi-K3, and the fewest that one replay runs through.
MODEL_LAYERS = 69
#: A replay touches at least this many bytes of state (several times any L2), and at most the second number.
LEAST_BYTES, MOST_BYTES = 256 << 20, 12 << 30
#: (heads, batch) of the table in docs/performance.md: Kimi-K3 at TP8 (H = 12) and TP1 (H = 96).
TABLE: tuple[tuple[int, int], ...] = (
    *((12, batch) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    *((96, batch) for batch in (1, 4, 16, 64)),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """H, B, conv layout and state dtype; bf16 activations, bounded gate, gated norm, fp32 weights."""

    heads: int
    batch: int
    layout: LayoutKind = "SD"
    state_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {self.layout!r}")

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state: all of it is read once and written once."""
        return self.batch * self.heads * DIM * DIM * self.state_dtype.itemsize

    @property
    def step_bytes(self) -> int:
        """Bytes that one step must move, each once.

        State in and out; conv window in and out (3 taps of q, k and v); x; raw_g, output gate and out; weights once.
        """
        channels = 3 * self.heads * DIM
        window = self.batch * channels * (WIDTH - 1) * 2
        rows = self.batch * (channels + 3 * self.heads * DIM + self.heads) * 2
        weights = (channels * WIDTH + self.heads * (DIM + 1) + DIM) * 4
        return 2 * self.state_bytes + 2 * window + rows + weights

    @property
    def layers(self) -> int:
        """Layers in one replay."""
        wanted = max(MODEL_LAYERS, -(-LEAST_BYTES // self.state_bytes))
        return max(2, min(wanted, MOST_BYTES // self.state_bytes))

    def record(self) -> dict[str, Any]:
        """The cell for a results file."""
        return {**asdict(self), "state_dtype": str(self.state_dtype).removeprefix("torch.")}


def make_layers(cell: Cell, device: torch.device) -> list[Call]:
    """Draw the cell's layers on the device. Slot 0 is reserved; rows use the other slots in a random order."""
    generator = torch.Generator(device).manual_seed(cell.heads * 1000 + cell.batch)
    heads, batch, inner = cell.heads, cell.batch, cell.heads * DIM
    slots = batch + 1

    def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    shared = {
        "x": normal(batch, 3 * inner),
        "weight": normal(3, WIDTH, inner, std=0.5, dtype=torch.float32),
        "bias": None,
        "raw_g": normal(1, batch, heads, DIM, std=2.0),
        "raw_beta": normal(1, batch, heads),
        "A_log": normal(heads, std=0.5, dtype=torch.float32),
        "dt_bias": normal(inner, dtype=torch.float32),
        "output_gate": normal(batch, heads, DIM),
        "norm_weight": normal(DIM, dtype=torch.float32),
        "has_initial_state": None,
        "lower_bound": -5.0,
        "prefetch": True,
    }
    layout = ConvLayout(cell.layout, 3 * inner, WIDTH - 1)
    layers = []
    for _ in range(cell.layers):
        order = torch.randperm(batch, generator=generator, device=device) + 1
        arguments = {
            **shared,
            "conv_state": conv_view(normal(slots, *layout.storage_shape), layout, WIDTH - 1),
            "state": normal(slots, heads, DIM, DIM, std=0.3, dtype=cell.state_dtype),
            "state_indices": order.to(torch.int32),
            "out": torch.full((batch, heads, DIM), float("nan"), dtype=torch.bfloat16, device=device),
        }
        layers.append(Call(arguments, tuple(range(batch)), tuple(order.tolist())))
    return layers
