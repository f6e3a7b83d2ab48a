"""The layer: prefill and training against token-by-token decode, in every pool, for both families."""

import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kda import FallbackWarning, api, warmup
from fused_kda.nn import KimiDeltaAttention, kda
from fused_kda.pool import StatePool

HIDDEN, HEADS = 64, 2
FAMILIES = {
    "k3": {"lower_bound": -5.0, "full_rank_gate": True},
    "linear": {"lower_bound": None, "full_rank_gate": False},
}
POOLS = [
    {"layout": "SD"},
    {"layout": "DS"},
    {"layout": "DS", "spare_taps": 2},
    {"layout": "SD", "page_shared": True},
    {"layout": "DS", "page_shared": True},
    {"layout": "DS", "page_shared": True, "spare_taps": 1, "null_slot": -1},
]
pools = pytest.mark.parametrize("options", POOLS, ids=lambda o: "-".join(map(str, o.values())))
families = pytest.mark.parametrize("family", FAMILIES)


def make_layer(family, dtype=torch.float32, heads=HEADS, seed=0):
    torch.manual_seed(seed)
    layer = KimiDeltaAttention(HIDDEN, heads, dtype=dtype, **FAMILIES[family])
    with torch.no_grad():  # strong enough gates that decay, beta and output gate all matter
        layer.in_proj.weight.mul_(3)
        layer.f_b_proj.weight.mul_(3)
    return layer


def make_pool(layer, slots=5, fill=float("nan"), **options):
    """One layer's pool whose every byte is hostile."""
    pool = StatePool(1, slots, layer.num_heads, conv_dtype=layer.in_proj.weight.dtype, **options).layer(0)
    for tensor in (pool.conv_state, pool.state):
        tensor.fill_(fill)
    return pool


def tokens(count, dtype=torch.float32, seed=1):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def decode_all(layer, hidden, pool, slot, started=False):
    """Every token through ``decode``, one after the other."""
    outputs = [
        layer.decode(row[None], pool, torch.tensor([slot]), has_initial_state=torch.tensor([started or t > 0]))
        for t, row in enumerate(hidden)
    ]
    return torch.cat(outputs)


def close(got, want, dtype=torch.float32):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error <= tolerance, f"relative error {error:.1e}"


@families
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_equals_decode_token_by_token(family, dtype):
    layer = make_layer(family, dtype)
    hidden = tokens(40, dtype)
    pool = make_pool(layer, state_dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    close(layer(torch.stack((hidden, hidden.flip(0))))[0], decode_all(layer, hidden, pool, 1), dtype)


@families
@pytest.mark.parametrize(("head_dim", "width"), [(16, 2), (64, 3), (5, 4)])
def test_any_head_dim_and_conv_width(family, head_dim, width):
    torch.manual_seed(0)
    layer = KimiDeltaAttention(HIDDEN, 3, head_dim, width, dtype=torch.float32, **FAMILIES[family])
    hidden = tokens(9)
    pool = StatePool(1, 3, 3, head_dim, width, layout="DS", conv_dtype=torch.float32).layer(0)
    want = layer(hidden[None])[0]
    close(decode_all(layer, hidden, pool, 1), want)
    close(layer.prefill(hidden[:1], pool, [2]), want[:1])
    close(decode_all(layer, hidden[1:], pool, 2, started=True), want[1:])


@pytest.mark.case(9, backend="reference")
@families
@pools
@pytest.mark.parametrize("length", [1, 2, 3, 37])
def test_decode_continues_what_prefill_left(family, options, length):
    """cases.md 9: equal to an all-decode run at every step, the first one after the prompt included."""
    layer = make_layer(family)
    hidden = tokens(length + 4)
    pool = make_pool(layer, **options)
    want = decode_all(layer, hidden, pool, 1)
    out = layer.prefill(hidden[:length], pool, [3])
    close(out, want[:length])
    for t in range(length, length + 4):
        close(layer.decode(hidden[t : t + 1], pool, torch.tensor([3], dtype=torch.int32)), want[t : t + 1])
    close(pool.conv_state[3], pool.conv_state[1])
    close(pool.state[3], pool.state[1])


@families
def test_the_window_is_the_raw_input_bit_for_bit(family):
    layer = make_layer(family, torch.bfloat16)
    hidden = tokens(9, torch.bfloat16)
    pool = make_pool(layer)
    layer.prefill(hidden, pool, [2])
    raw = layer.in_proj(hidden)[:, : layer.columns["v"].stop]
    assert torch.equal(pool.conv_state[2].t(), raw[-3:])


@pytest.mark.case(8, backend="reference")
@pytest.mark.parametrize("fill", [1e30, float("nan")])
@pools
def test_a_reused_slot_starts_from_zero(options, fill):
    """cases.md 8: a one-token prompt in a slot that holds the last tenant's bytes."""
    layer = make_layer("k3")
    hidden = tokens(2)
    want = layer(hidden[None])[0]
    pool = make_pool(layer, fill=fill, **options)
    close(layer.prefill(hidden[:1], pool, [1]), want[:1])
    close(layer.decode(hidden[1:], pool, torch.tensor([1])), want[1:])
    close(layer.decode(hidden[:1], pool, torch.tensor([2]), has_initial_state=torch.tensor([False])), want[:1])


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), pieces=st.integers(1, 3), seed=st.integers(0, 9))
@settings(max_examples=8)
def test_packed_prompts_in_pieces_equal_each_alone(lengths, pieces, seed):
    layer = make_layer("linear", seed=seed)
    prompts = [tokens(length * pieces, seed=seed + n) for n, length in enumerate(lengths)]
    pool = make_pool(layer, slots=len(lengths) + 3, layout="DS", page_shared=True)
    slots = [len(lengths) - n for n in range(len(lengths))]
    outputs = []
    for piece in range(pieces):
        packed = torch.cat([p[piece * n : (piece + 1) * n] for p, n in zip(prompts, lengths, strict=True)])
        initial = [piece > 0] * len(lengths)
        out = layer.prefill(packed, pool, slots, lengths=lengths, has_initial_state=initial)
        outputs.append(out.split(lengths))
    for n, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
        alone = make_pool(layer)
        close(torch.cat([piece[n] for piece in outputs]), layer.prefill(prompt, alone, [1]), torch.float32)
        close(pool.state[slot], alone.state[1])
        close(pool.conv_state[slot], alone.conv_state[1])
    for untouched in (0, len(lengths) + 1, len(lengths) + 2):
        assert pool.state[untouched].isnan().all()
        assert pool.conv_state[untouched].isnan().all()


def test_some_prompts_start_and_others_continue_in_one_call():
    layer = make_layer("k3")
    old, new = tokens(12), tokens(7, seed=2)
    pool = make_pool(layer)
    layer.prefill(old[:5], pool, [1])
    out = layer.prefill(torch.cat((new, old[5:])), pool, [2, 1], lengths=[7, 7], has_initial_state=[False, True])
    close(out[:7], layer(new[None])[0])
    close(out[7:], layer(old[None])[0, 5:])


def test_a_bad_prompt_stays_with_its_own_sequence():
    layer = make_layer("k3")
    good, bad = tokens(6), torch.full((9, HIDDEN), float("nan"))
    pool = make_pool(layer, fill=0.0)
    out = layer.prefill(torch.cat((bad, good)), pool, [1, 2], lengths=[9, 6])
    close(out[9:], layer(good[None])[0])
    assert pool.state[2].isfinite().all()


@families
@pytest.mark.parametrize("options", [POOLS[0], POOLS[4]], ids=["SD", "DS-page"])
def test_rows_join_and_leave_between_steps(family, options):
    """Continuous batching: each of five requests gives what it gives alone, whoever shares its steps and its slot."""
    layer = make_layer(family)
    requests = {n: tokens(length, seed=n) for n, length in enumerate((9, 4, 7, 3, 5))}
    want = {n: layer(hidden[None])[0] for n, hidden in requests.items()}
    pools = StatePool(1, 4, HEADS, conv_dtype=torch.float32, **options)
    pool = pools.layer(0)
    pool.state.fill_(float("nan"))
    pool.conv_state.fill_(float("nan"))
    waiting, running = list(requests), {}
    steps = 0
    while waiting or running:
        while waiting and pools.free_slots:  # two tokens of prompt, the rest is decoded
            n, slot = waiting.pop(0), pools.allocate()
            close(layer.prefill(requests[n][:2], pool, [slot]), want[n][:2])
            running[n] = [slot, 2]
        rows = sorted(running, key=lambda n: -n if steps % 2 else n)
        # A padded row of NaN rides along, as in an engine's fixed batch sizes.
        hidden = torch.stack([requests[n][running[n][1]] for n in rows] + [torch.full((HIDDEN,), float("nan"))])
        indices = torch.tensor([running[n][0] for n in rows] + [0], dtype=torch.int32)
        out = layer.decode(hidden, pool, indices)
        assert (out[-1] == 0).all()
        for n, got in zip(rows, out, strict=False):
            slot, position = running[n]
            close(got, want[n][position])
            running[n][1] += 1
            if position + 1 == len(requests[n]):
                pools.free(slot)
                del running[n]
        steps += 1
    assert pools.free_slots == 3
    assert steps < sum(map(len, requests.values()))


def test_a_bf16_state_pool_is_rounded_once_by_prefill():
    layer = make_layer("k3")
    hidden = tokens(20)
    wide, narrow = make_pool(layer), make_pool(layer, state_dtype=torch.bfloat16)
    close(layer.prefill(hidden, narrow, [1]), layer.prefill(hidden, wide, [1]))
    assert torch.equal(narrow.state[1], wide.state[1].bfloat16())
    close(
        layer.decode(hidden[:1], narrow, torch.tensor([1])),
        layer.decode(hidden[:1], wide, torch.tensor([1])),
        torch.bfloat16,
    )


@families
def test_the_op_gets_slices_of_the_projection_without_a_copy(family, monkeypatch):
    layer = make_layer(family, torch.bfloat16)
    seen = {}
    real = kda.fused_kda_decode

    def spy(**call):
        seen.update(call, beta=call["raw_beta"], gate=call["output_gate"])
        return real(**call)

    monkeypatch.setattr(kda, "fused_kda_decode", spy)
    layer.decode(tokens(3, torch.bfloat16), make_pool(layer, fill=0.0), torch.tensor([1, 2, 3]))
    inner = HEADS * 128
    rows = layer.in_proj.out_features
    storage = seen["x"].untyped_storage().data_ptr()
    assert rows % 16 == 0
    assert seen["x"].stride() == seen["beta"].stride() == (rows, 1)
    assert seen["beta"].untyped_storage().data_ptr() == storage
    assert seen["weight"] is layer.conv_weight
    assert seen["prefetch"] is True
    if family == "k3":
        assert list(layer.columns) == ["q", "k", "v", "g", "f_a", "b"]
        assert seen["gate"].untyped_storage().data_ptr() == storage
        assert seen["gate"].storage_offset() == 3 * inner
        assert seen["beta"].storage_offset() == 4 * inner + 128
    else:
        assert list(layer.columns) == ["q", "k", "v", "b", "f_a", "g_a"]
        assert seen["beta"].storage_offset() == 3 * inner


@families
@pytest.mark.parametrize("mask", [False, True])
def test_what_warmup_is_told_is_what_decode_asks(family, mask):
    """The specialisation and prefetch of the layer's own call, whatever batch it then has."""
    layer = make_layer(family, torch.bfloat16)
    pool = make_pool(layer, layout="DS")
    (told,) = layer.decode_problems(pool, index_dtype=torch.int64, has_initial_state=mask)
    warmup(layer, pool)
    initial = torch.tensor([False, True, True]) if mask else None
    layer.decode(tokens(3, torch.bfloat16), pool, torch.tensor([1, 2, 3]), has_initial_state=initial)
    (asked,) = (plan.problem for plan in api._plans.values())
    assert (told.spec, told.prefetch, told.device) == (asked.spec, asked.prefetch, asked.device)


@families
@pytest.mark.parametrize("autocast", [False, True])
def test_every_parameter_learns(family, autocast):
    layer = make_layer(family)
    hidden = tokens(40).view(2, 20, HIDDEN).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(hidden)
    assert out.dtype == (torch.bfloat16 if autocast else torch.float32)
    out.float().square().sum().backward()
    for name, parameter in [*layer.named_parameters(), ("hidden", hidden)]:
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    used = max(section.stop for section in layer.columns.values())
    assert (layer.in_proj.weight.grad[used:] == 0).all()
    assert (KimiDeltaAttention(HIDDEN, HEADS, **FAMILIES[family]).in_proj.weight[used:] == 0).all()


@families
def test_fresh_parameters_fade_slowly(family):
    layer = KimiDeltaAttention(HIDDEN, 4, dtype=torch.float32, **FAMILIES[family])
    log_decay = layer._log_decay(torch.zeros(4 * 128))
    assert -0.1001 <= log_decay.min() < -0.08
    assert -0.0012 < log_decay.max() <= -0.000999


def test_prefill_refuses_what_does_not_fit_and_writes_nothing():
    layer = make_layer("k3")
    pool = make_pool(layer)
    hidden = tokens(4)
    wrong = {
        r"lengths: expected at least one sequence, each of >= 1 token, got \[4, 0\]": {
            "slots": [1, 2],
            "lengths": [4, 0],
        },
        r"hidden: expected shape \[5, 64\], got \[4, 64\]": {"slots": [1, 2], "lengths": [2, 3]},
        r"slots: expected 1 different slots, each > 0 and < 5, got \[0\]": {"slots": [0]},
        r"slots: expected 1 different slots, each > 0 and < 5, got \[5\]": {"slots": [5]},
        r"slots: expected 2 different slots, .* got \[1, 1\]": {"slots": [1, 1], "lengths": [2, 2]},
        r"has_initial_state: expected 1 values, got 2": {"slots": [1], "has_initial_state": [True, False]},
        r"backend: expected one of auto, torch, fla, got 'cuda'": {"slots": [1], "backend": "cuda"},
    }
    for text, arguments in wrong.items():
        with pytest.raises(ValueError, match=text):
            layer.prefill(hidden, pool, **arguments)
    with pytest.raises(NotImplementedError, match="fla cannot run this prefill: it needs a GPU, the device is cpu"):
        layer.prefill(hidden, pool, [1], backend="fla")
    with pytest.raises(ValueError, match=r"pool\.conv_state: expected shape \[5, 768, 3\], got \[5, 384, 3\]"):
        layer.prefill(hidden, make_pool(make_layer("k3", heads=1)), [1])
    with pytest.raises(TypeError, match=r"pool\.conv_state: expected dtype torch\.float32"):
        layer.prefill(hidden, make_pool(make_layer("k3", torch.bfloat16)), [1])
    assert pool.state.isnan().all()
    assert pool.conv_state.isnan().all()
    for bad in (0.0, 5.0, float("nan"), float("-inf")):
        with pytest.raises(ValueError, match="lower_bound: expected a finite negative number or None"):
            KimiDeltaAttention(HIDDEN, HEADS, lower_bound=bad, full_rank_gate=True)


def test_a_gpu_without_fla_says_so_once(monkeypatch):
    monkeypatch.setattr(kda, "fla_reason", lambda device, dtype: "module fla is not installed")
    monkeypatch.setattr(kda, "_warned", set())
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    layer = make_layer("k3")
    with pytest.warns(FallbackWarning, match="prefill runs in plain PyTorch.*module fla is not installed"):
        assert layer._prefill_backend("auto", on_gpu) == "torch"
    assert layer._prefill_backend("auto", on_gpu) == "torch"  # a second warning would be an error here
    monkeypatch.setattr(kda, "fla_reason", lambda device, dtype: None)
    assert layer._prefill_backend("auto", on_gpu) == "fla"


def test_prefill_is_ten_times_faster_than_decode_at_1000_tokens(capsys):
    layer = make_layer("k3")
    pool = make_pool(layer, fill=0.0)
    hidden = tokens(1000)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole, single = [], []
        for _ in range(3):
            start = time.perf_counter()
            layer.prefill(hidden, pool, [1])
            middle = time.perf_counter()
            decode_all(layer, hidden, pool, 2)
            whole.append(middle - start)
            single.append(time.perf_counter() - middle)
    finally:
        torch.set_num_threads(threads)
    ratio = min(single) / min(whole)
    with capsys.disabled():
        print(
            f"\n1000 tokens, layer of 2 heads, 1 thread: decode {min(single) * 1e3:.0f} ms, "
            f"prefill {min(whole) * 1e3:.1f} ms, {ratio:.1f}x"
        )
    assert ratio >= 10
    close(pool.state[1], pool.state[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@families
@pytest.mark.parametrize("backend", ["torch", "fla"])
def test_on_a_gpu_decode_continues_what_prefill_left(family, backend):
    if backend == "fla":
        pytest.importorskip("fla")
    layer = make_layer(family, torch.bfloat16).cuda()
    hidden = tokens(90, torch.bfloat16).cuda()
    pool = StatePool(1, 3, HEADS, layout="DS", device="cuda").layer(0)
    want = decode_all(layer.cpu(), hidden.cpu(), make_pool(layer), 1)
    layer.cuda()
    out = layer.prefill(hidden[:86], pool, [1], backend=backend)
    step = [layer.decode(hidden[t : t + 1], pool, torch.tensor([1], device="cuda")) for t in range(86, 90)]
    error = (torch.cat((out, *step)).cpu().float() - want.float()).abs().max() / want.float().abs().max()
    assert error < 3e-2
