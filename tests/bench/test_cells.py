"""What is measured: bytes that match the tensors, layers that outgrow the cache and fit the memory."""

from __future__ import annotations

import pytest
import torch

from fused_kda.bench import cells
from fused_kda.bench.cells import Cell, make_layers

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_step_are_those_of_its_tensors(layout: str, state_dtype: torch.dtype) -> None:
    cell = Cell(2, 3, layout, state_dtype)  # type: ignore[arg-type]
    given = make_layers(cell, CPU, 1)[0].arguments
    once = ("x", "weight", "raw_g", "raw_beta", "A_log", "dt_bias", "output_gate", "norm_weight", "out")
    live = 3 / 4  # of the pool's slots; slot 0 is reserved
    pools = 2 * live * (given["state"].nbytes + given["conv_state"].numel() * given["conv_state"].itemsize)
    assert cell.step_bytes == sum(given[name].nbytes for name in once) + pools
    assert cell.state_bytes == live * given["state"].nbytes


def test_layers_outgrow_the_cache_and_fit_the_card() -> None:
    for heads, batches in cells.SIZES.items():
        for batch in batches:
            cell = Cell(heads, batch)
            assert 256 << 20 <= cell.layers(GPU) * cell.state_bytes <= 12 << 30
    assert Cell(12, 64).layers(GPU, 100) == 100
    assert Cell(12, 1).layers(GPU, 4) == 342  # four would lie in L2


def test_a_cpu_replays_the_layers_asked_for_within_its_memory() -> None:
    assert Cell(12, 1).layers(CPU, 5) == 5
    assert Cell(96, 256).layers(CPU) == 2


def test_layers_share_inputs_and_own_their_pools() -> None:
    first, second = (layer.arguments for layer in make_layers(Cell(1, 2), CPU, 2))
    assert first["x"].data_ptr() == second["x"].data_ptr()
    for name in ("state", "conv_state", "out"):
        assert first[name].data_ptr() != second[name].data_ptr()


def test_a_layout_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="layout: expected one of"):
        Cell(1, 1, "HD")  # type: ignore[arg-type]
