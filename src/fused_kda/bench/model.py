"""A decode step of a whole stack of KDA layers: what a faster op is worth to a model, and where its time goes.

Only KDA layers: norm, merged input projection, f_b (and g_b), the op, output projection with the residual added in its
epilogue. No attention, MLP, experts or all-reduce between them, so a share of this step is an upper bound of the share
of a model's. Random weights; pools are never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .. import gates
from ..api import fused_kda_decode
from ..layouts import LayoutKind
from ..nn.kda import KimiDeltaAttention
from ..pool import LayerPool, StatePool
from ..testing.compare import Mismatch, check_call, expected
from ..testing.problems import Call
from .timing import Step, Timing, time_providers


@dataclass(frozen=True, slots=True)
class StackConfig:
    """Sizes of a stack: hidden width, heads on this rank, KDA layers, the kind of both gates."""

    name: str
    hidden: int
    heads: int
    layers: int
    lower_bound: float | None
    full_rank_gate: bool


#: One rank of Kimi-K3 under 8-way tensor parallelism, and Kimi-Linear-48B on one.
STACKS = (
    StackConfig("k3-tp8", 7168, 12, 69, -5.0, full_rank_gate=True),
    StackConfig("kimi-linear", 2304, 32, 20, None, full_rank_gate=False),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs between the steps that are compared."""

    backend: str
    layout: LayoutKind = "SD"
    state_dtype: torch.dtype = torch.float32
    prefetch: bool = True

    @property
    def name(self) -> str:
        early = "" if self.prefetch else " no prefetch"
        return f"{self.backend} {self.layout} {str(self.state_dtype).removeprefix('torch.')}{early}"


def variants(fused: Sequence[str]) -> list[Variant]:
    """The first backend with one thing changed at a time; the other backends with either state dtype."""
    first, *others = fused
    bf16 = torch.bfloat16
    changed = [
        Variant(first),
        Variant(first, prefetch=False),
        Variant(first, layout="DS"),
        Variant(first, state_dtype=bf16),
    ]
    return changed + [Variant(name, state_dtype=dtype) for name in others for dtype in (torch.float32, bf16)]


class Stack:
    """The layers and their weights, bf16, on one device."""

    def __init__(self, config: StackConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            self.layers = [
                KimiDeltaAttention(
                    config.hidden,
                    config.heads,
                    lower_bound=config.lower_bound,
                    full_rank_gate=config.full_rank_gate,
                    device=device,
                ).requires_grad_(False)
                for _ in range(config.layers)
            ]
        self.norm_weight = torch.ones(config.hidden, dtype=torch.bfloat16, device=device)

    def measure(
        self, batch: int, wanted: Sequence[Variant], *, replays: int = 50, graph: bool = True
    ) -> list[dict[str, Any]]:
        """One record per variant: TPOT, tokens per second, launches, and how much of the step GEMMs and op take alone.

        A variant whose gate is closed or whose op fails its check is not timed; its record says why.
        """
        run = _Run(self, batch)
        steps: dict[str, Step] = {"gemms": run.gemms}
        left_out: dict[Variant, tuple[str, bool]] = {}
        for variant in wanted:
            reason = run.refusal(variant)
            if reason is not None:
                left_out[variant] = reason
                continue
            steps[variant.name] = run.whole(variant)
            steps[f"op {variant.name}"] = run.op_alone(variant)
        times = time_providers(
            {name: [step] for name, step in steps.items()}, self.device, replays=replays, graph=graph
        )
        return [self._record(batch, variant, times, left_out.get(variant)) for variant in wanted]

    def _record(
        self, batch: int, variant: Variant, times: dict[str, Timing], left_out: tuple[str, bool] | None
    ) -> dict[str, Any]:
        config = self.config
        record: dict[str, Any] = {
            "model": config.name,
            "layers": config.layers,
            "hidden": config.hidden,
            "heads": config.heads,
            "batch": batch,
            "layout": variant.layout,
            "state_dtype": str(variant.state_dtype).removeprefix("torch."),
            "prefetch": variant.prefetch,
            "backend": variant.backend,
        }
        if left_out is not None:
            return {**record, "not_timed": left_out[0], "failed": left_out[1]}
        step, op, gemms = times[variant.name], times[f"op {variant.name}"], times["gemms"]
        return {
            **record,
            "us": {**step.record(), "mean": step.mean},
            "tokens_per_s": batch / step.mean * 1e6,
            "launches": step.launches,
            "op_us": op.median,
            "gemms_us": gemms.median,
        }


class _Run:
    """The stack at one batch size: its buffers, and one set of pools for each layout and state dtype."""

    def __init__(self, stack: Stack, batch: int) -> None:
        self.stack, self.batch = stack, batch
        config, device = stack.config, stack.device
        self.generator = torch.Generator(device).manual_seed(batch)
        self.embedded = self._normal(batch, config.hidden)
        self.hidden = self.embedded.clone()
        self.index = (torch.randperm(batch, generator=self.generator, device=device) + 1).to(torch.int32)
        self.out = self._normal(batch, config.heads * stack.layers[0].head_dim)
        self.projected = self._normal(batch, stack.layers[0].in_proj.out_features)
        self._pools: dict[tuple[LayoutKind, torch.dtype], StatePool] = {}

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.stack.device)
        return drawn.to(torch.bfloat16)

    def pool(self, variant: Variant) -> StatePool:
        key = (variant.layout, variant.state_dtype)
        if key not in self._pools:
            config = self.stack.config
            pool = StatePool(
                config.layers,
                self.batch + 1,
                config.heads,
                layout=variant.layout,
                state_dtype=variant.state_dtype,
                device=self.stack.device,
            )
            for number in range(config.layers):
                pool.layer(number).state.normal_(0, 0.3, generator=self.generator)
                pool.layer(number).conv_state.normal_(generator=self.generator)
            self._pools[key] = pool
        return self._pools[key]

    def whole(self, variant: Variant) -> Step:
        """The step: embedding in, every layer, hidden states out."""
        pool, hidden = self.pool(variant), self.hidden

        def step() -> None:
            hidden.copy_(self.embedded)
            for number, layer in enumerate(self.stack.layers):
                normed = functional.rms_norm(hidden, hidden.shape[1:], self.stack.norm_weight, layer.norm_eps)
                projected = layer.in_proj(normed)
                y = fused_kda_decode(
                    **self._call(layer, projected, pool.layer(number), variant), backend=variant.backend
                )
                hidden.addmm_(y, layer.o_proj.weight.t())

        return step

    def op_alone(self, variant: Variant) -> Step:
        """Every layer's op, nothing between."""
        pool = self.pool(variant)
        calls = [
            self._call(layer, self.projected, pool.layer(number), variant)
            for number, layer in enumerate(self.stack.layers)
        ]

        def step() -> None:
            for call in calls:
                fused_kda_decode(**call, backend=variant.backend)

        return step

    def gemms(self) -> None:
        """Every layer's projections, nothing between."""
        for layer in self.stack.layers:
            projected = layer.in_proj(self.embedded)
            _gates(layer, projected)
            self.hidden.addmm_(self.out, layer.o_proj.weight.t())

    def refusal(self, variant: Variant) -> tuple[str, bool] | None:
        """Why the variant cannot be timed, and whether that is its check."""
        layer, pool = self.stack.layers[0], self.pool(variant)
        arguments = self._call(layer, self.projected, pool.layer(0), variant) | {"has_initial_state": None}
        call = Call(arguments, tuple(range(self.batch)), tuple(self.index.tolist()))
        verdict = next(one for one in gates.explain(call.problem) if one.backend == variant.backend)
        if not verdict.open:
            return "; ".join(verdict.reasons), False
        call = call.clone()
        wanted = expected(call, chain=variant.backend == "chain")
        try:
            check_call(call, call.run(variant.backend), wanted)
        except Mismatch as mismatch:
            return f"wrong: {mismatch}", True
        return None

    def _call(
        self, layer: KimiDeltaAttention, projected: torch.Tensor, pool: LayerPool, variant: Variant
    ) -> dict[str, Any]:
        raw_g, gate = _gates(layer, projected)
        return {
            "x": projected[:, : layer.columns["v"].stop],
            "weight": layer.conv_weight,
            "bias": None,
            "conv_state": pool.conv_state,
            "raw_g": raw_g,
            "raw_beta": projected[:, layer.columns["b"]],
            "A_log": layer.A_log,
            "dt_bias": layer.dt_bias,
            "state_indices": self.index,
            "state": pool.state,
            "out": self.out,
            "lower_bound": layer.lower_bound,
            "output_gate": gate,
            "norm_weight": layer.norm_weight,
            "norm_eps": layer.norm_eps,
            "null_slot": pool.null_slot,
            "prefetch": variant.prefetch,
        }


def _gates(layer: KimiDeltaAttention, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """raw_g and the output gate ``[B, P]``."""
    raw_g = layer.f_b_proj(projected[:, layer.columns["f_a"]])
    if layer.g_b_proj is None:
        return raw_g, projected[:, layer.columns["g"]]
    return raw_g, layer.g_b_proj(projected[:, layer.columns["g_a"]])


def measure_stacks(
    configs: Sequence[StackConfig],
    batches: Sequence[int],
    wanted: Sequence[Variant],
    device: torch.device,
    *,
    replays: int = 50,
    graph: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> list[dict[str, Any]]:
    """Records of :meth:`Stack.measure` for every stack and batch size; ``progress`` is called before each."""
    records = []
    for config in configs:
        stack = Stack(config, device)
        for batch in batches:
            progress(f"{config.name}, B {batch}")
            records += stack.measure(batch, wanted, replays=replays, graph=graph)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return records
