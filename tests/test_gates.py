"""The one table: what it says, how a backend is chosen, and that the switches and the page agree with it."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import fake_backend
from fused_kda import FallbackWarning, explain, fused_kda_decode, gates, stats
from fused_kda.contract import DecodeProblem
from fused_kda.gates import Row, Selection
from fused_kda.testing.problems import Draw, draw

BF16, FP32 = torch.bfloat16, torch.float32
ROOT = Path(__file__).resolve().parents[1]
SMALL = Draw(head_dim=16)


def problem(**wanted: Any) -> DecodeProblem:
    return draw(Draw(**{"head_dim": 16, **wanted})).problem


def test_the_table_is_whole() -> None:
    """Backends and rows name each other, every row has devices, and every backend's package is there."""
    assert {row.backend for row in gates.TABLE} == set(gates.BACKENDS)
    assert len(set(gates.BACKENDS)) == len(gates.BACKENDS)
    assert gates.BACKENDS[-1] == "reference"
    extras = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert set(gates.EXTRAS) <= set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE))
    for row in gates.TABLE:
        assert {module.split(".")[0] for module in row.modules} <= set(gates.EXTRAS)
        assert row.archs
        assert row.launches == 0 if row.backend == "reference" else row.launches >= 1
        assert importlib.util.find_spec(f"fused_kda.kernels.{row.backend}") is not None


def test_the_reference_admits_whatever_the_contract_does() -> None:
    for wanted in (
        {"dtype": torch.float64, "state_dtype": torch.float64, "head_dim": 3},
        {"dtype": torch.float16, "conv_width": 2, "layout": "DS", "spare_taps": 3},
        {"state_dtype": BF16, "weight_dtype": BF16, "bias_dtype": BF16, "norm_dtype": None, "guard": 1},
        {"batch": 0},
    ):
        assert "reference" in gates.supported(problem(**wanted))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"head_dims": (128,)}, "head dim 16 is not in 128"),
        ({"head_dims": (64, 128)}, "head dim 16 is not in 64, 128"),
        ({"conv_widths": (2, 3)}, "conv width 4 is not in 2, 3"),
        ({"layouts": ("DS",)}, "conv layout SD is not in DS"),
        ({"dtypes": (torch.float16,)}, "activation dtype bfloat16 is not in float16"),
        ({"state_dtypes": (BF16,)}, "state dtype float32 is not in bfloat16"),
        ({"weight_dtypes": (BF16,)}, "conv weight dtype float32 is not in bfloat16"),
        ({"norm_dtypes": (BF16,)}, "norm weight dtype float32 is not in bfloat16"),
        ({"bias_dtypes": (FP32,)}, "conv bias dtype bfloat16 is not in float32"),
        ({"state_alignment": 16}, "state slots are aligned to 4 bytes, not to 16 (base address or slot pitch)"),
        ({"modules": ("no_such_module",)}, "module no_such_module is not installed"),
        ({"modules": ("no.such.module",)}, "module no.such.module is not installed"),
        ({"modules": ("cuda.absent",)}, "module cuda.absent is not installed (pip install 'fused-kda[cuda]')"),
        ({"condition": lambda: "the driver is too old"}, "the driver is too old"),
        ({"archs": ("sm_90", "gfx942")}, "architecture cpu is not in gfx942, sm_90"),
    ],
)
def test_a_closed_gate_gives_its_reason(monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], reason: str) -> None:
    fake_backend.install(monkeypatch, **row)
    call = problem(guard=1, bias_dtype=BF16)
    fast, reference = gates.explain(call)
    assert (fast.backend, fast.open, fast.reasons) == ("fast", False, (reason,))
    assert str(fast) == f"fast: closed: {reason}"
    assert str(reference) == "reference: open"
    assert gates.supported(call) == ("reference",)
    text = (
        rf"^backend: expected one that can run this problem \(reference\), got fast \(requested\): {re.escape(reason)}$"
    )
    with pytest.raises(NotImplementedError, match=text):
        gates.select(call, "fast")


def test_every_reason_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,), layouts=("DS",), modules=("no_such_module",))
    fast = gates.explain(problem())[0]
    assert len(fast.reasons) == 3


def test_one_open_row_opens_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,))
    wider = Row(backend="fast", archs=("cpu",), launches=1, head_dims=(16,))
    monkeypatch.setattr(gates, "TABLE", (*gates.TABLE, wider))
    assert gates.supported(problem()) == ("fast", "reference")
    assert gates.rows("fast", "cpu") == gates.rows("fast")
    assert gates.rows("fast", "sm_90") == ()


def test_the_gate_answers_for_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, archs=("meta",))
    assert gates.supported(problem()) == ("reference",)
    assert gates.supported(problem(), "meta") == ("fast", "reference")
    assert gates.supported(problem(), torch.device("meta")) == ("fast", "reference")


def test_auto_takes_the_fastest_open_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gates.select(problem()) == Selection("reference", "auto", None)
    fake_backend.install(monkeypatch, head_dims=(16,))
    assert gates.select(problem()) == Selection("fast", "auto", None)
    assert gates.select(problem(), "reference") == Selection("reference", "requested", None)
    taken = gates.select(problem(head_dim=8))
    assert (taken.backend, taken.reason) == ("reference", "auto")
    assert taken.fallback == "fast: closed: head dim 8 is not in 16"


def test_auto_never_takes_a_row_that_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as an interpreter: open, by name alone, and no fallback when passed over."""
    fake_backend.install(monkeypatch, auto=False)
    assert gates.select(problem()) == Selection("reference", "auto", None)
    assert gates.select(problem(), "fast") == Selection("fast", "requested", None)


def test_a_backend_for_other_architectures_is_no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, archs=("sm_90",))
    assert gates.select(problem()) == Selection("reference", "auto", None)


def test_no_backend_at_all_is_an_error_that_lists_every_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,))
    monkeypatch.setattr(gates, "TABLE", (*gates.rows("fast"), Row("reference", ("cpu",), 0, head_dims=(64,))))
    with pytest.raises(
        NotImplementedError,
        match=r"^backend: expected one that can run this problem \(none can\), got auto: "
        r"fast: closed: head dim 16 is not in 128; reference: closed: head dim 16 is not in 64$",
    ):
        gates.select(problem())
    found = explain(**draw(SMALL).arguments)
    assert found.selection is None
    assert str(found).startswith("backend: none\nfast: closed: ")


def test_an_unknown_backend_is_named() -> None:
    known = ", ".join(gates.BACKENDS)
    with pytest.raises(ValueError, match=f"^backend: expected auto or one of {known}, got 'fastest'$"):
        gates.select(problem(), "fastest")


def test_a_fallback_warns_once_per_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(16,))
    text = (
        r"^fused_kda_decode runs on the slower backend reference; faster gates are closed: fast: closed: head dim 8 is"
    )
    calls = [draw(Draw(head_dim=8, batch=batch)).arguments for batch in (3, 4) * 3]
    with pytest.warns(FallbackWarning, match=text) as caught:
        [fused_kda_decode(**arguments) for arguments in calls]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(FallbackWarning, match="head dim 32") as caught:
        fused_kda_decode(**draw(Draw(head_dim=32)).arguments)
    assert len(caught) == 1
    fused_kda_decode(**draw(SMALL).arguments)
    assert stats() == {
        ("reference", "fallback: fast: closed: head dim 8 is not in 16"): 6,
        ("reference", "fallback: fast: closed: head dim 32 is not in 16"): 1,
        ("fast", "auto"): 1,
    }


def test_strict_mode_raises_every_time_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,))
    monkeypatch.setenv("FUSED_KDA_STRICT", "1")
    call = draw(SMALL)
    before = call.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^strict mode: .* head dim 16 is not in 128$"):
            call.run("auto")
    assert call.touched_elsewhere(before) == []
    call.run("reference")
    assert stats() == {("reference", "requested"): 1}


def test_the_environment_chooses_for_auto_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch)
    monkeypatch.setenv("FUSED_KDA_BACKEND", "reference")
    draw(SMALL).run("auto")
    draw(SMALL).run("fast")
    assert stats() == {("reference", "FUSED_KDA_BACKEND"): 1, ("fast", "requested"): 1}


def test_a_backend_from_the_environment_that_cannot_is_blamed_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_backend.install(monkeypatch, head_dims=(128,))
    monkeypatch.setenv("FUSED_KDA_BACKEND", "fast")
    with pytest.raises(NotImplementedError, match=r"got fast \(FUSED_KDA_BACKEND\): head dim 16 is not in 128$"):
        draw(SMALL).run("auto")


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FUSED_KDA_BACKEND", "fastest", "FUSED_KDA_BACKEND: expected auto or one of "),
        ("FUSED_KDA_STRICT", "yes", "FUSED_KDA_STRICT: expected 0 or 1, got 'yes'"),
        ("FUSED_KDA_DEBUG", "", "FUSED_KDA_DEBUG: expected 0 or 1, got ''"),
        ("FUSED_KDA_LOG_LEVEL", "LOUD", "FUSED_KDA_LOG_LEVEL: expected DEBUG, INFO, WARNING or ERROR, got 'LOUD'"),
        ("FUSED_KDA_PREFETCH", "2", "FUSED_KDA_PREFETCH: expected 0 or 1, got '2'"),
        ("FUSED_KDA_VLLM", "on", "FUSED_KDA_VLLM: expected off, fill or replace, got 'on'"),
        ("FUSED_KDA_SGLANG", "on", "FUSED_KDA_SGLANG: expected 0 or 1, got 'on'"),
    ],
)
def test_a_bad_switch_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, text: str) -> None:
    monkeypatch.setenv(variable, value)
    call = draw(SMALL)
    before = call.clone()
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        call.run("auto")
    assert call.touched_elsewhere(before) == []


def test_switches_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gates.settings().backend == "auto"
    monkeypatch.setenv("FUSED_KDA_BACKEND", "reference")
    assert gates.settings().backend == "auto"
    gates.settings.cache_clear()
    assert gates.settings().backend == "reference"


def test_settings_follow_their_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = gates.settings()
    assert (plain.strict, plain.debug, plain.log_level, plain.prefetch) == (False, False, None, None)
    for variable, value in (
        ("FUSED_KDA_STRICT", "1"),
        ("FUSED_KDA_DEBUG", "1"),
        ("FUSED_KDA_LOG_LEVEL", "info"),
        ("FUSED_KDA_PREFETCH", "0"),
        ("FUSED_KDA_CACHE_DIR", str(tmp_path)),
        ("FUSED_KDA_VLLM", "replace"),
        ("FUSED_KDA_SGLANG", "1"),
    ):
        monkeypatch.setenv(variable, value)
    gates.settings.cache_clear()
    changed = gates.settings()
    assert (changed.strict, changed.debug, changed.log_level, changed.prefetch) == (True, True, "INFO", False)
    assert (changed.cache_dir, changed.vllm, changed.sglang) == (tmp_path, "replace", True)
    assert (plain.vllm, plain.sglang) == ("fill", False)


def test_the_cache_directory_has_a_place_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gates.settings().cache_dir == tmp_path / "fused-kda"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    gates.settings.cache_clear()
    assert gates.settings().cache_dir.is_absolute()


def test_every_switch_in_the_source_is_in_the_table() -> None:
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        used |= set(re.findall(r"FUSED_KDA_[A-Z_]+", path.read_text()))
    assert used == {switch.variable for switch in gates.SWITCHES}


def test_the_page_is_current() -> None:
    render = runpy.run_path(str(ROOT / "docs" / "render_gates.py"))["render"]
    page = (ROOT / "docs" / "gates.md").read_text()
    assert page == render(), "docs/gates.md is stale: python docs/render_gates.py"
    for row in gates.TABLE:
        assert f"| `{row.backend}` |" in page
    for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "gates.md", "exec"), {})
