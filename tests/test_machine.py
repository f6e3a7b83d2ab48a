"""What gates ask of the machine: each answer a reason that helps, or None."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from fused_kda import gates, machine


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, None),
        (13000, None),
        (13020, None),
        (12080, "the driver supports CUDA 12.8, NVRTC makes code for CUDA 13"),
    ],
)
def test_code_that_is_too_new_for_the_driver_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, reason: str | None
) -> None:
    pytest.importorskip("cuda.core")
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    monkeypatch.setattr(machine, "_driver_version", lambda: driver)
    assert machine.nvrtc_problem() == reason


def test_an_nvrtc_that_is_too_old_or_broken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.core")
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 12, 8))
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", nvrtc)
    assert machine.nvrtc_problem() == "NVRTC 12.8 is older than 12.9"
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    assert str(machine.nvrtc_problem()).startswith("NVRTC cannot be loaded (ModuleNotFoundError: ")


def test_triton_can_launch_with_a_c_compiler_or_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine, "importable", lambda module: True)
    assert machine.no_launcher() is None
    assert machine.no_c_compiler() == "Triton builds its launcher at first use and needs a C compiler on PATH"
    monkeypatch.setattr(machine, "importable", lambda module: False)
    assert str(machine.no_launcher()).endswith("on PATH, or cuda-bindings (pip install 'fused-kda[cuda]')")
    monkeypatch.setenv("CC", "/opt/cc")
    assert machine.no_launcher() is None


def test_without_a_gpu_there_is_no_limit_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.shared_memory_limit(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for properties, limit in (
        ({"shared_memory_per_block_optin": 232448, "shared_memory_per_block": 49152}, 232448),
        ({"shared_memory_per_block": 65536}, 65536),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: SimpleNamespace(**p))
        assert gates.shared_memory_limit(torch.device("cuda", 0)) == limit
