"""Times the decode step of one cell: backends and other projects' steps beside the limit and a copy, all in turns.

Correctness comes first: what fails its check against float64 is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import gates
from ..contract import DecodeProblem
from ..testing.compare import Expected, Mismatch, check_call, expected
from ..testing.problems import Call
from . import peers
from .cells import MODEL_LAYERS, Cell, make_layers
from .limit import copy_steps, limit_steps
from .timing import Step, Timing, capture, time_providers

#: Providers that are measures, not steps.
MEASURES = ("limit", "copy")


class _Wanted:
    """What one call must leave behind; evaluated when first asked, by whether the unfused chain's rounding is meant."""

    def __init__(self, layer: Call) -> None:
        self.layer = layer
        self._found: dict[bool, Expected] = {}

    def check(self, call: Call, out: torch.Tensor, *, chain: bool) -> None:
        if chain not in self._found:
            self._found[chain] = expected(self.layer, chain=chain)
        check_call(call, out, self._found[chain])


def measure(
    cell: Cell,
    backends: Sequence[str],
    *,
    device: torch.device,
    against: Sequence[str] = (),
    model_layers: int = MODEL_LAYERS,
    replays: int = 30,
    graph: bool = True,
    prefetch: bool = True,
    by_name: bool = True,
) -> list[dict[str, Any]]:
    """Measure one cell.

    Args:
        cell: what is measured.
        backends: of :data:`fused_kda.gates.BACKENDS`.
        device: where.
        against: names of :data:`fused_kda.bench.peers.PEERS`.
        model_layers: KDA layers of a model: at least so many are replayed (memory permitting), and a step's saving is
            given for so many.
        replays: rounds that are kept.
        graph: replay CUDA graphs (a CPU has none).
        prefetch: of the op.
        by_name: whether the backends were asked for by name; else those that ``auto`` would never take are left out.

    Returns:
        One record per provider: the limit and the copy first, then what was timed, then what was not, with
        ``not_timed`` (why) and ``failed`` (whether that was its check).
    """
    layers = make_layers(cell, device, cell.layers(device, model_layers))
    for layer in layers:
        layer.arguments["prefetch"] = prefetch
    wanted = _Wanted(layers[0])
    limits = limit_steps(layers)
    providers: dict[str, Sequence[Step]] = {**limits, "copy": copy_steps(layers)}
    left_out: dict[str, tuple[str, bool]] = {}
    for backend in backends:
        reason = _closed(backend, layers[0].problem, graph, by_name)
        if reason is not None:
            left_out[backend] = (reason, False)
            continue
        try:
            call = layers[0].clone()
            wanted.check(call, call.run(backend), chain=backend == "chain")
        except Mismatch as mismatch:
            left_out[backend] = (f"wrong: {mismatch}", True)
            continue
        providers[backend] = [_step(layer, backend) for layer in layers]
    for name in against:
        try:
            providers[name] = _peer(name, layers, wanted, graph)
        except Mismatch as mismatch:
            left_out[name] = (f"wrong: {mismatch}", True)
        except peers.NotHere as missing:
            left_out[name] = (str(missing), False)
        except Exception as error:  # whatever another project's op raises: it is reported and not timed
            left_out[name] = (f"{type(error).__name__}: {error}", False)
    times = time_providers(providers, device, replays=replays, graph=graph)
    least = min(limits, key=lambda name: times[name].median)
    times = {"limit": times[least]} | {name: timing for name, timing in times.items() if name not in limits}
    common = {**cell.record(), "prefetch": prefetch, "layers": len(layers)}
    records = [{**common, "provider": name, **figures(cell, name, times, model_layers)} for name in times]
    for name, (reason, failed) in left_out.items():
        records.append({**common, "provider": name, "not_timed": reason, "failed": failed})
    return records


def figures(cell: Cell, name: str, times: Mapping[str, Timing], model_layers: int) -> dict[str, Any]:
    """A provider's figures: µs per layer, GB/s over the named bytes, time over the limit and over the chain, launches.

    ``chain_over`` is the chain's time over this one, ``saved_us`` the difference for a model's layers; None without a
    chain.
    """
    timing, chain = times[name], times.get("chain")
    moved = 2 * cell.state_bytes if name in MEASURES else cell.step_bytes
    step = name not in MEASURES
    return {
        "us": timing.record(),
        "gb_per_s": moved / timing.median / 1e3,
        "over_limit": timing.median / times["limit"].median,
        "launches": timing.launches,
        "chain_over": chain.median / timing.median if chain and step else None,
        "saved_us": (chain.median - timing.median) * model_layers if chain and step else None,
    }


def geometric_means(records: Sequence[Mapping[str, Any]], figure: str = "over_limit") -> dict[str, float]:
    """Geometric mean of a figure per provider, layout, state dtype and prefetch, measures left out."""
    groups: dict[str, list[float]] = {}
    for record in records:
        if record["provider"] not in MEASURES and record.get(figure) is not None:
            early = "" if record["prefetch"] else " no prefetch"
            key = f"{record['provider']} {record['layout']} {record['state_dtype']}{early}"
            groups.setdefault(key, []).append(record[figure])
    return {key: geometric_mean(values) for key, values in groups.items()}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _closed(backend: str, problem: DecodeProblem, graph: bool, by_name: bool) -> str | None:
    """Why a backend cannot be timed, or None."""
    verdict = next(verdict for verdict in gates.explain(problem) if verdict.backend == backend)
    if not verdict.open:
        return "; ".join(verdict.reasons)
    if not verdict.auto and not by_name:
        return "only where it is asked for by name"
    if graph and problem.device.type == "cuda":
        rows = gates.rows(backend, gates.architecture(problem.device))
        if all(row.launches == 0 for row in rows):
            return "not a kernel: it synchronises the device, so no graph can hold it"
    return None


def _step(layer: Call, backend: str) -> Step:
    return lambda: layer.run(backend)


def _peer(name: str, layers: Sequence[Call], wanted: _Wanted, graph: bool) -> list[Step]:
    """The peer's steps, after its check. Its first run may tune itself on its caches, so that one is thrown away.

    One that a graph cannot hold fails here, by itself, and not when all providers are captured.
    """
    peers.bind(name, layers[0].clone()).step()
    call = layers[0].clone()
    bound = peers.bind(name, call)
    bound.step()
    wanted.check(call, bound.collect(), chain=True)
    device = call.arguments["x"].device
    if graph and device.type == "cuda":
        capture([bound.step], device)
    return [peers.bind(name, layer).step for layer in layers]
