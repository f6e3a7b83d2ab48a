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
#: On a GPU a replay touches at least this many bytes of state (several times any L2), and at most the second number.
LEAST_BYTES, MOST_BYTES = 256 << 20, 12 << 30
#: On a CPU it touches at most so many.
MOST_BYTES_CPU = 1 << 30
#: The sizes that are measured where none are named: heads, and their batches. Kimi-K3 at TP8 (H = 12) and TP1 (H = 96).
SIZES: dict[int, tuple[int, ...]] = {12: (1, 2, 4, 8, 16, 32, 64, 128, 256), 96: (1, 4, 16, 64, 256)}
SIZES_CPU: dict[int, tuple[int, ...]] = {12: (1, 4, 16)}


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

    def layers(self, device: torch.device, wanted: int = MODEL_LAYERS) -> int:
        """Layers in one replay: those of the model, more where they would fit into L2, fewer where memory would not do.

        At least two, so that no layer finds what it has just written.
        """
        if device.type == "cpu":
            return max(2, min(wanted, MOST_BYTES_CPU // self.state_bytes))
        return max(2, min(max(wanted, -(-LEAST_BYTES // self.state_bytes)), MOST_BYTES // self.state_bytes))

    def record(self) -> dict[str, Any]:
        """The cell for a results file."""
        return {**asdict(self), "state_dtype": str(self.state_dtype).removeprefix("torch.")}


def make_layers(cell: Cell, device: torch.device, count: int | None = None) -> list[Call]:
    """Draw ``count`` layers of the cell on the device (None: as many as :meth:`Cell.layers` says).

    Slot 0 is reserved; rows use the other slots in a random order.
    """
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
    conv = normal(slots, *layout.storage_shape)
    state = normal(slots, heads, DIM, DIM, std=0.3, dtype=cell.state_dtype)
    layers = []
    for _ in range(count or cell.layers(device)):
        order = torch.randperm(batch, generator=generator, device=device) + 1
        arguments = {
            **shared,
            "conv_state": conv_view(conv.clone(), layout, WIDTH - 1),
            "state": state.clone(),
            "state_indices": order.to(torch.int32),
            "out": torch.full((batch, heads, DIM), float("nan"), dtype=torch.bfloat16, device=device),
        }
        layers.append(Call(arguments, tuple(range(batch)), tuple(order.tolist())))
    return layers
