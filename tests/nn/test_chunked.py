"""The chunked delta rule against the step-by-step recurrence."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kda.nn.chunked import delta_rule, fla_delta_rule, fla_reason

NAMES = ("q", "k", "v", "log_decay", "beta", "initial_state")


def step_by_step(q, k, v, log_decay, beta, initial_state):
    """The recurrence as it is defined, one token after the other, in the inputs' dtype."""
    batch, steps, heads, dim = q.shape
    state = q.new_zeros(batch, heads, dim, dim) if initial_state is None else initial_state
    outputs = []
    for t in range(steps):
        state = state * log_decay[:, t].exp().unsqueeze(-2)
        read = (state @ k[:, t].unsqueeze(-1)).squeeze(-1)
        delta = (v[:, t] - read) * beta[:, t].unsqueeze(-1)
        state = state + delta.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        outputs.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    return torch.stack(outputs, 1), state


def draw(batch, steps, heads, dim, decay, with_state=True, seed=0, dtype=torch.float32):
    """Inputs as a layer makes them. ``decay`` names how strongly the state fades."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    shape = (batch, steps, heads, dim)
    log_decay = {
        "none": lambda: torch.zeros(shape, dtype=dtype),
        "bounded": lambda: -5 * torch.sigmoid(2 * normal(*shape) - 1),
        "softplus": lambda: -20 * torch.nn.functional.softplus(4 * normal(*shape)),
        # z = 80 and A_log = 3 give -1607 per step; next to it, steps that do not fade at all.
        "abrupt": lambda: torch.where(normal(*shape) > 1, -1607.0, -1e-3 * normal(*shape).abs()).to(dtype),
    }[decay]()
    return (
        torch.nn.functional.normalize(normal(*shape), dim=-1) * dim**-0.5,
        torch.nn.functional.normalize(normal(*shape), dim=-1),
        normal(*shape),
        log_decay,
        torch.rand(shape[:3], generator=generator, dtype=dtype),
        normal(batch, heads, dim, dim) if with_state else None,
    )


def relative_error(got, want):
    return float((got.double() - want).abs().max() / want.abs().max())


@given(
    batch=st.integers(1, 2),
    steps=st.integers(1, 100),
    heads=st.integers(1, 2),
    dim=st.sampled_from((1, 4, 32)),
    chunk=st.sampled_from((1, 2, 16, 32, 64)),
    decay=st.sampled_from(("none", "bounded", "softplus", "abrupt")),
    with_state=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=50)
def test_equals_the_recurrence(batch, steps, heads, dim, chunk, decay, with_state, seed):
    inputs = draw(batch, steps, heads, dim, decay, with_state, seed)
    before = [None if tensor is None else tensor.clone() for tensor in inputs]
    o, state = delta_rule(*inputs, chunk=chunk)
    want_o, want_state = step_by_step(*(None if tensor is None else tensor.double() for tensor in inputs))
    assert o.shape == want_o.shape
    assert o.dtype == state.dtype == torch.float32
    assert relative_error(o, want_o) < 1e-4
    assert relative_error(state, want_state) < 1e-4
    for name, tensor, old in zip(NAMES, inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, old), f"{name} was overwritten"


def test_a_thousand_steps_to_1e_6_with_the_default_chunk():
    inputs = draw(1, 1000, 1, 128, "bounded")
    o, state = delta_rule(*inputs)
    want_o, want_state = step_by_step(*(tensor.double() for tensor in inputs))
    assert relative_error(o, want_o) < 1e-6
    assert relative_error(state, want_state) < 1e-6


@pytest.mark.parametrize("decay", ["bounded", "softplus", "abrupt"])
def test_gradients_equal_those_of_the_recurrence(decay):
    inputs = draw(2, 21, 2, 8, decay, dtype=torch.float64)
    gradients = []
    for rule in (lambda *given: delta_rule(*given, chunk=8), step_by_step):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        o, state = rule(*leaves)
        weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).view(o.shape)
        loss = (o * weights).sum() + state.square().sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for name, got, want in zip(NAMES, *gradients, strict=True):
        assert torch.isfinite(got).all(), name
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def test_with_and_without_gradients_the_values_are_the_same_bits():
    inputs = draw(1, 50, 2, 16, "bounded")
    plain = delta_rule(*inputs)
    tracked = delta_rule(*(tensor.clone().requires_grad_() for tensor in inputs))
    assert all(torch.equal(a, b) for a, b in zip(plain, tracked, strict=True))


def test_two_pieces_with_the_state_between_equal_one():
    inputs = draw(2, 75, 1, 16, "bounded")
    whole_o, whole_state = delta_rule(*inputs)
    first = [tensor[:, :33] for tensor in inputs[:5]]
    second = [tensor[:, 33:] for tensor in inputs[:5]]
    o_first, state = delta_rule(*first, inputs[5])
    o_second, state = delta_rule(*second, state)
    torch.testing.assert_close(torch.cat((o_first, o_second), 1), whole_o, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, whole_state, rtol=1e-5, atol=1e-6)


def test_steps_with_no_beta_and_no_decay_change_nothing():
    q, k, v, log_decay, beta, state = draw(1, 40, 1, 16, "bounded")
    beta[:, 25:] = 0
    log_decay[:, 25:] = 0
    _, padded = delta_rule(q, k, v, log_decay, beta, state)
    _, short = delta_rule(*(tensor[:, :25] for tensor in (q, k, v, log_decay, beta)), state)
    torch.testing.assert_close(padded, short, rtol=1e-5, atol=1e-6)


def test_faster_than_the_recurrence_at_1000_tokens(capsys):
    """Prints the ratio. The bar is half of the ten times that an idle core passes: other work on the machine hits the
    large tensors of the chunked rule harder than the loop's small ones."""
    inputs = draw(1, 1000, 2, 128, "bounded")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ratio must not hang on who else uses the other cores
    times = {delta_rule: [], step_by_step: []}
    try:
        with torch.no_grad():
            for _ in range(6):
                for rule, taken in times.items():
                    start = time.perf_counter()
                    rule(*inputs)
                    taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    chunked, loop = min(times[delta_rule]), min(times[step_by_step])
    with capsys.disabled():
        print(
            f"\n1000 tokens, 2 heads, 1 thread: recurrence {loop * 1e3:.1f} ms, chunked {chunked * 1e3:.1f} ms, "
            f"{loop / chunked:.1f}x"
        )
    assert loop / chunked >= 5


def test_where_fla_cannot_run_a_reason_is_given():
    assert fla_reason(torch.device("cpu"), torch.bfloat16) == "it needs a GPU, the device is cpu"
    assert "float32" in fla_reason(torch.device("cuda"), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("decay", ["bounded", "softplus"])
def test_fla_equals_the_recurrence(decay):
    pytest.importorskip("fla")
    inputs = [tensor.cuda() for tensor in draw(2, 150, 2, 128, decay)]
    inputs[:3] = [tensor.bfloat16().float() for tensor in inputs[:3]]
    o, state = fla_delta_rule(*inputs, dtype=torch.bfloat16, bounded=decay == "bounded")
    want_o, want_state = step_by_step(*(tensor.double() for tensor in inputs))
    assert relative_error(o, want_o) < 2e-2  # its products are in bf16
    assert relative_error(state, want_state) < 2e-2
