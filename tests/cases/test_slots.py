"""Slots: reused, continued by another route, in the wrong dtype, far away in memory. Public faults 8, 9, 11 and 12."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import pytest
import torch

from fused_kda.nn import KimiDeltaAttention
from fused_kda.pool import StatePool
from fused_kda.testing.battery import Subject
from fused_kda.testing.compare import check_equal

STEP_INPUTS = ("x", "raw_g", "raw_beta", "output_gate")


@pytest.mark.case(8)
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("old", [1e30, float("nan"), float("inf")])
def test_a_reused_slot_forgets_its_last_tenant(subject: Subject, layout: str, old: float) -> None:
    call = subject.draw(layout=layout, mask=True)
    call.arguments["has_initial_state"].zero_()
    for name in ("conv_state", "state"):
        call.arguments[name].fill_(old)
    zeroed = call.clone()
    zeroed.arguments["has_initial_state"] = None
    for name in ("conv_state", "state"):
        zeroed.arguments[name].zero_()
    subject.agree(call)
    check_equal("out", call.arguments["out"], zeroed.run(subject.backend))
    for name in ("conv_state", "state"):
        slots = list(call.slots)
        check_equal(name, call.arguments[name][slots], zeroed.arguments[name][slots])


@pytest.mark.case(9)
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_the_window_is_the_last_inputs_oldest_first(subject: Subject, layout: str) -> None:
    """What prefill must leave behind, and what decode finds: a pool filled from outside continues to the bit."""
    seen = []
    call = subject.draw(layout=layout, seed=0)
    for seed in range(4):
        fresh = subject.draw(layout=layout, seed=seed).arguments
        call.arguments.update({name: fresh[name] for name in STEP_INPUTS})
        seen.append(fresh["x"])
        call.run(subject.backend)
    slots = list(call.slots)
    window = torch.stack(seen[-3:], dim=-1)
    check_equal("window", call.arguments["conv_state"][slots], window[list(call.live)])

    filled = subject.draw(layout=layout, seed=0)
    filled.arguments["conv_state"][slots] = window[list(call.live)]
    filled.arguments["state"][slots] = call.arguments["state"][slots]
    fresh = subject.draw(layout=layout, seed=9).arguments
    for one in (call, filled):
        one.arguments.update({name: fresh[name] for name in STEP_INPUTS})
    check_equal("out", filled.run(subject.backend), call.run(subject.backend))


@pytest.mark.case(9)
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_backends_take_turns_on_one_pool(subject: Subject, layout: str) -> None:
    """Every step, the first included, is within the tolerance of the float64 truth for the pool as it stands."""
    call = subject.draw(layout=layout)
    for step in range(4):
        fresh = subject.draw(layout=layout, seed=step).arguments
        call.arguments.update({name: fresh[name] for name in STEP_INPUTS})
        if step % 2:
            call.run("reference")
        else:
            subject.agree(call)


@pytest.mark.case(9)
@pytest.mark.parametrize("layout", ["SD", "DS"])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_decode_continues_what_prefill_left(subject: Subject, layout: Any, lower_bound: float | None) -> None:
    """The layer's prefill writes the pool; four steps continue it beside an all-reference run."""
    torch.manual_seed(0)
    device, dim = subject.device, subject.size.head_dim
    layer = KimiDeltaAttention(
        64, 1, dim, lower_bound=lower_bound, full_rank_gate=lower_bound is not None, device=device
    )
    pools = [StatePool(1, 4, 1, dim, layout=layout, device=device).layer(0) for _ in range(2)]
    hidden = torch.randn(9, 64, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for pool in pools:
            for tensor in (pool.conv_state, pool.state):
                tensor.fill_(float("nan"))
            layer.prefill(hidden[:5], pool, [2], backend="torch")
        for name in ("conv_state", "state"):
            check_equal(f"{name} after prefill", getattr(pools[0], name), getattr(pools[1], name))
        for token in hidden[5:].split(1):
            got, want = (
                layer.decode(token, pool, torch.tensor([2], device=device), backend=backend)
                for pool, backend in zip(pools, (subject.backend, "reference"), strict=True)
            )
            check_equal("window", pools[0].conv_state[2], pools[1].conv_state[2])
            assert (got.float() - want.float()).abs().max() <= 2**-6 * want.float().abs().max()
            off = (pools[0].state[2] - pools[1].state[2]).abs().max() / pools[1].state[2].abs().max()
            assert off <= (2**-6 if subject.backend == "chain" else 2**-18)


@pytest.mark.case(11)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["SD", "DS"])
def test_a_pool_is_read_in_its_own_dtype(subject: Subject, layout: str, state_dtype: torch.dtype) -> None:
    subject.agree(subject.draw(layout=layout, state_dtype=state_dtype))


@pytest.mark.case(11)
@pytest.mark.parametrize("wrong", [torch.float16, torch.float64, torch.float8_e4m3fn, torch.int16])
@pytest.mark.parametrize("name", ["state", "conv_state"])
def test_a_pool_in_another_dtype_is_refused(subject: Subject, name: str, wrong: torch.dtype) -> None:
    call = subject.draw()
    before = call.clone()
    with pytest.raises(TypeError, match=f"^{name}: expected dtype "):
        call.run(subject.backend, **{name: call.arguments[name].to(wrong)})
    assert call.touched_elsewhere(before) == []


@pytest.mark.case(11)
def test_a_pool_is_never_reinterpreted(subject: Subject) -> None:
    """The bytes of an fp32 pool seen as bf16 are twice as many elements: the shape gives it away."""
    call = subject.draw()
    before = call.clone()
    with pytest.raises(ValueError, match=r"^state: expected shape"):
        call.run(subject.backend, state=call.arguments["state"].view(torch.bfloat16))
    paged = subject.draw(page_shared=True)
    state = paged.arguments["state"]
    bytes_again = torch.empty(0, dtype=torch.bfloat16, device=subject.device)
    pitch, head, row, _ = state.stride()
    bytes_again.set_(state.untyped_storage(), 0, state.shape, (2 * pitch, 2 * head, 2 * row, 1))
    with pytest.raises(ValueError, match=r"^state: expected strides"):
        paged.run(subject.backend, state=bytes_again)
    assert call.touched_elsewhere(before) == []


@pytest.mark.large
@pytest.mark.case(12)
@pytest.mark.parametrize("route", ["pages", "state alone"])
def test_offsets_beyond_two_to_the_31(subject: Subject, route: str) -> None:
    """Slots on either side of the first whose element offset, and byte offset, passes 2**31."""
    page = 1 << 29  # bytes: slot 4 starts at 2**31 bytes, slot 16 at 2**31 fp32 elements, slot 8 at 2**31 bf16 elements
    slots = 18
    call = subject.draw(batch=6, layout="DS", slots=slots, guard=0)
    heads, dim = call.problem.spec.heads, call.problem.spec.head_dim
    channels = 3 * heads * dim
    storage = far_storage(slots * page, subject.device)
    start = 4 * (channels * 3 * 2 // 4) if route == "pages" else 0
    state = storage.view(torch.float32).as_strided((slots, heads, dim, dim), (page // 4, dim * dim, dim, 1), start // 4)
    conv = call.arguments["conv_state"]
    if route == "pages":
        conv = storage.view(torch.bfloat16).as_strided((slots, channels, 3), (page // 2, 3, 1))
    chosen = [3, 4, 7, 8, 15, 16]
    near = subject.draw(batch=6, layout="DS", slots=slots, guard=0)
    near.arguments["state_indices"].copy_(torch.tensor(chosen))
    for slot, source in zip(chosen, call.slots, strict=True):
        for target in (state, near.arguments["state"]):
            target[slot] = call.arguments["state"][source]
        for target in (conv, near.arguments["conv_state"]):
            target[slot] = call.arguments["conv_state"][source].clone()
    call.arguments["state_indices"].copy_(torch.tensor(chosen))
    call.arguments.update(conv_state=conv, state=state)
    check_equal("out", call.run(subject.backend), near.run(subject.backend))
    for name in ("conv_state", "state"):
        check_equal(name, call.arguments[name][chosen], near.arguments[name][chosen])
        others = [slot for slot in range(slots) if slot not in chosen]
        if route == "pages" or name == "state":
            assert all(torch.count_nonzero(call.arguments[name][slot]) == 0 for slot in others)


def far_storage(size: int, device: torch.device) -> torch.Tensor:
    """Zeros, as bytes; on a CPU only address space, of which the test touches a few pages."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if sys.platform != "linux" or sys.maxsize < 2**40:
        pytest.skip("needs address space that costs no memory until it is touched")
    no_reserve = 0x4000
    space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(space, dtype=torch.uint8)
