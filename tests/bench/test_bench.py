"""What the bench says about itself: bytes that match the tensors, checks that can fail, a page that is current."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_kda.bench import cells
from fused_kda.bench.cells import Cell, make_layers
from fused_kda.bench.page import render
from fused_kda.testing.compare import Mismatch

pytest.importorskip("cuda.core")

from fused_kda.bench import decode

ROOT = Path(__file__).parents[2]


@pytest.fixture
def few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LEAST_BYTES", 1)
    monkeypatch.setattr(cells, "MODEL_LAYERS", 2)


@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_of_a_step_are_those_of_its_tensors(few_layers: None, layout: str, state_dtype: torch.dtype) -> None:
    cell = Cell(2, 3, layout, state_dtype)  # type: ignore[arg-type]
    given = make_layers(cell, torch.device("cpu"))[0].arguments
    once = ("x", "weight", "raw_g", "raw_beta", "A_log", "dt_bias", "output_gate", "norm_weight", "out")
    live = 3 / 4  # of the pool's slots; slot 0 is reserved
    pools = 2 * live * (given["state"].nbytes + given["conv_state"].numel() * given["conv_state"].itemsize)
    assert cell.step_bytes == sum(given[name].nbytes for name in once) + pools
    assert cell.state_bytes == live * given["state"].nbytes


def test_layers_outgrow_the_cache_and_fit_the_card() -> None:
    for heads, batch in cells.TABLE:
        cell = Cell(heads, batch)
        assert 256 << 20 <= cell.layers * cell.state_bytes <= 12 << 30
        assert cell.layers >= 29


def test_layers_share_inputs_and_own_their_pools(few_layers: None) -> None:
    first, second = (layer.arguments for layer in make_layers(Cell(1, 2), torch.device("cpu")))
    assert first["x"].data_ptr() == second["x"].data_ptr()
    for name in ("state", "conv_state", "out"):
        assert first[name].data_ptr() != second[name].data_ptr()


def test_a_backend_that_fails_its_check_is_refused(few_layers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layers(Cell(1, 2), torch.device("cpu"))[0]
    decode.check("reference", layer)
    kind = type(layer)
    honest = kind.run

    def off_by_a_little(self: object, backend: str) -> torch.Tensor:
        out = honest(self, backend)  # type: ignore[arg-type]
        out.view(-1)[5] *= 1.05
        return out

    monkeypatch.setattr(kind, "run", off_by_a_little)
    with pytest.raises(Mismatch, match="out: 1 of 256"):
        decode.check("reference", layer)


def test_geometric_means_leave_out_the_limit_and_what_was_not_timed() -> None:
    def record(provider: str, **more: object) -> dict[str, object]:
        return {"provider": provider, "layout": "SD", "state_dtype": "float32", "prefetch": True, **more}

    records = [record("limit", over_limit=1.0), record("cuda", over_limit=2.0), record("cuda", over_limit=8.0)]
    records.append(record("chain", not_timed="wrong"))
    assert decode.geometric_means(records) == {"cuda SD float32": pytest.approx(4.0)}


def test_a_results_file_names_its_command_without_its_own_path() -> None:
    given = ["--heads", "12", "--json", "somewhere/else.json", "--layout", "SD,DS"]
    assert decode.command_line("decode", given) == "python -m fused_kda.bench.decode --heads 12 --layout SD,DS"


def test_the_performance_page_is_current() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page == render(ROOT / "benchmarks" / "results"), "docs/performance.md is stale: make docs"
