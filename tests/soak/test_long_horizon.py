"""4,096 steps with nothing to correct an error: what decays alone, and what must be remembered.

One row is never written to (its k and v are zero), so its state decays step by step and must be the initial state times
the decay to the 4,096th power. The other row never decays; it is written to under orthogonal keys, one of which is used
once, at the first step, and must be recalled after the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fused_kda import fused_kda_decode
from fused_kda.pool import StatePool

FP32, BF16 = torch.float32, torch.bfloat16
STEPS = 4096
DECAYS, RECALLS = 1, 2  # slots, in the order of the rows
LOWER_BOUND = -5.0


@dataclass(frozen=True)
class Horizon:
    """States ``[slots, H, V, K]`` at the start, after one step and at the end; what was written last and recalled."""

    backend: str
    before: torch.Tensor
    first: torch.Tensor
    after: torch.Tensor
    raw_g: torch.Tensor
    written: torch.Tensor
    recalled: torch.Tensor


def cases() -> list[Any]:
    found: list[Any] = []
    for backend in ("reference", "cuda", "triton", "chain"):
        device, dim = ("cpu", 16) if backend == "reference" else ("cuda", 128)
        marks = [] if device == "cpu" else [pytest.mark.gpu]
        for dtype in (FP32, BF16):
            name = f"{backend}-{str(dtype).removeprefix('torch.')}"
            found.append(pytest.param((backend, device, dim, dtype), id=name, marks=marks))
    return found


@pytest.fixture(scope="module", params=cases())
def horizon(request: pytest.FixtureRequest) -> Horizon:
    backend, device, dim, dtype = request.param
    heads, inner = 2, 2 * dim
    generator = torch.Generator().manual_seed(1)
    pool = StatePool(1, 3, heads, dim, state_dtype=dtype, device=device)
    conv_state, state, _ = pool.layer(0)
    state[DECAYS] = 1.0
    # The convolution takes the new token as it is; SiLU keeps zeros.
    weight = torch.zeros(3, 4, inner)
    weight[:, 3] = 1.0
    # log-decay = -5 sigmoid(raw_g): half of the channels from -1e-5 to -1e-3 a step, half from -0.02 to -0.2.
    slow = torch.linspace(-13.0, -8.5, dim // 2)
    fast = torch.linspace(-5.5, -3.2, dim // 2)
    raw_g = torch.full((2, heads, dim), -200.0)  # the second row: no decay at all
    raw_g[0] = torch.cat((slow, fast))
    keys = torch.randint(1, dim, (STEPS,), generator=generator)
    keys[0] = 0
    values = torch.randn(STEPS, heads, dim, generator=generator).to(BF16)
    x = torch.zeros(2, 3, heads, dim, dtype=BF16, device=device)
    written = torch.zeros(heads, dim, dim)
    common = {
        "weight": weight.to(device), "bias": None, "conv_state": conv_state, "state": state, "lower_bound": LOWER_BOUND,
        "raw_g": raw_g.to(BF16).to(device), "A_log": torch.zeros(heads, device=device),
        "raw_beta": torch.full((2, heads), 30.0, dtype=BF16, device=device),  # sigmoid is 1
        "dt_bias": torch.zeros(inner, device=device), "out": torch.empty(2, heads, dim, dtype=BF16, device=device),
        "state_indices": torch.tensor([DECAYS, RECALLS], dtype=torch.int32, device=device), "backend": backend,
    }  # fmt: skip
    before, first = state.clone(), None
    on_device = values.to(device)
    for step, key in enumerate(keys.tolist()):
        x.zero_()
        x[1, 1, :, key] = 4.0
        x[1, 2] = on_device[step]
        fused_kda_decode(x=x.view(2, -1), **common)
        written[:, :, key] = torch.nn.functional.silu(values[step].double()).float()
        first = state.clone() if first is None else first
    after = state.clone()
    recalled = torch.empty(dim, heads, dim)
    common["raw_beta"] = torch.full_like(common["raw_beta"], -200.0)  # reads, writes nothing
    for key in range(dim):
        x.zero_()
        x[1, 0, :, key] = 4.0
        recalled[key] = fused_kda_decode(x=x.view(2, -1), **common)[1].float().cpu()
    assert first is not None
    return Horizon(backend, before.cpu(), first.cpu(), after.cpu(), common["raw_g"][0].cpu(), written, recalled)


def test_decay(horizon: Horizon) -> None:
    log_decay = LOWER_BOUND * torch.sigmoid(horizon.raw_g.double())  # [H, K]
    got, half = horizon.after[DECAYS].double(), log_decay.shape[-1] // 2
    assert torch.equal(horizon.before[DECAYS], torch.ones_like(horizon.before[DECAYS]))
    assert (got == got[:, :1]).all(), "all value rows decay alike"
    slow, wanted = got[:, 0, :half], (log_decay[:, :half] * STEPS).exp()
    if horizon.after.dtype == FP32:
        # Each step's factor is off by a few roundings (exp, sigmoid, their product, the product with the state), and
        # the same way every time.
        assert ((slow / wanted - 1.0).abs() <= STEPS * 8 * 2.0**-24).all()
    else:
        # Between 1 and its lower neighbour in bf16 lie 2^-8: a factor closer to one than half of that changes nothing.
        assert (log_decay[:, :half].exp() > 1.0 - 2.0**-9).all()
        assert (slow == 1.0).all()
    assert (got[:, 0, half:].abs() < 1e-35).all(), "in either dtype, what decays by a factor below 1 - 2^-8 is gone"


def test_recall(horizon: Horizon) -> None:
    dim = horizon.written.shape[-1]
    # Written at the first step, then 4,095 writes under other keys: not one bit has changed.
    assert horizon.first[RECALLS][:, :, 0].any()
    assert torch.equal(horizon.after[RECALLS][:, :, 0], horizon.first[RECALLS][:, :, 0])
    # Each key gives what was written under it last: off by the state's rounding, and on the way out by that of bf16.
    rounds = horizon.after.dtype == BF16 or horizon.backend == "chain"  # which passes v through memory in bf16
    state_rounding = 2.0**-8 if rounds else 2.0**-20
    error = (horizon.after[RECALLS] - horizon.written).abs()
    assert (error <= state_rounding * horizon.written.abs() + 1e-6).all()
    want = horizon.written.permute(2, 0, 1) * dim**-0.5
    error = (horizon.recalled - want).abs()
    assert (error <= (state_rounding + 2.0**-8) * want.abs() + 1e-6).all()
