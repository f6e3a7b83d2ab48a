"""Prefill in one set of processes, decode in another: the states travel by NIXL, the answers are those of one process.

    python examples/disaggregated/run.py
    python examples/disaggregated/run.py --prefill-tp 2 --decode-tp 1 --layout SD

This process stands for the router. It starts one process per rank, carries handshakes and offers between them as text,
and never touches a state. At the end it runs the model itself and compares, token for token.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fused_kda.layouts import LayoutKind, Shard
from fused_kda.nn.generation import MAX_CHARACTERS
from fused_kda.nn.language_model import END, VOCABULARY, LanguageModel, encode, read_model
from fused_kda.nn.parallel import TensorParallel
from fused_kda.pool import StatePool
from fused_kda.transfer import Offer, TransferAgent, explain_plan, source_ranks

QUESTIONS = (
    "Mia has 20 nuts. Priya has 17 more nuts than Mia. How many nuts do Mia and Priya have in total?",
    "A farmer has 9 hens. Each hen lays 9 eggs. Sofia uses 77. How many eggs are left?",
)


@dataclass(frozen=True)
class Rank:
    """One worker process: its place and what it runs with."""

    role: str
    size: int
    rank: int
    model: Path | None
    dtype: torch.dtype
    layout: LayoutKind
    device: str
    prompts: tuple[tuple[int, ...], ...]
    folder: str

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


def join_ranks(place: Rank) -> TensorParallel | None:
    """Meet the other ranks of the same role."""
    torch.set_num_threads(1)
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)
    if place.size == 1:
        return None
    # NCCL wants a GPU for each rank; gloo shares one.
    backend = "nccl" if 0 < place.size <= torch.cuda.device_count() and place.device.startswith("cuda") else "gloo"
    store = dist.FileStore(f"{place.folder}/{place.role}", place.size)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
    return TensorParallel.of()


def open_model(place: Rank) -> tuple[LanguageModel, StatePool, TransferAgent]:
    """The rank's share of the model, its pool, and the agent that makes the pool known."""
    model = read_model(place.model, dtype=place.dtype, device=place.device, parallel=join_ranks(place))
    pool = model.new_pool(len(place.prompts), layout=place.layout)
    shard = Shard(model.config.num_heads, model.config.head_dim, place.size, place.rank)
    return model, pool, TransferAgent(place.name, pool, shard)


def prefill(model: LanguageModel, pool: StatePool, prompts: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Run the prompts; their slots and first tokens."""
    slots = pool.allocate(len(prompts))
    tokens = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    logits = model.prefill(tokens, pool, slots, lengths=[len(prompt) for prompt in prompts])
    return slots, logits.argmax(-1).tolist()


def decode(model: LanguageModel, pool: StatePool, slots: list[int], first: list[int]) -> list[str]:
    """Continue greedily until every text has ended."""
    indices = torch.tensor(slots, dtype=torch.int32, device=model.device)
    tokens, texts = first, [""] * len(first)
    ended = [False] * len(first)
    for _ in range(MAX_CHARACTERS):
        for row, token in enumerate(tokens):
            ended[row] = ended[row] or VOCABULARY[token] == END
            texts[row] += "" if ended[row] else VOCABULARY[token]
        if all(ended):
            break
        tokens = model.decode(torch.tensor(tokens, device=model.device), pool, indices).argmax(-1).tolist()
    return texts


def prefill_worker(place: Rank, pipe: Connection, readers: int) -> None:
    """Fill slots, offer them, and keep them until every reader has them."""
    model, pool, agent = open_model(place)
    pipe.send(agent.handshake())
    slots, first = prefill(model, pool, place.prompts)
    pipe.send((agent.offer(slots, readers=readers).to_json(), first))
    settled = []
    while not settled:
        settled = agent.collect()
        time.sleep(0.001)
    agent.close()
    pipe.send((settled[0].pulled, pool.free_slots == pool.capacity))


def decode_worker(place: Rank, pipe: Connection) -> None:
    """Pull the slots from the prefill ranks that have this rank's heads, and go on."""
    model, pool, agent = open_model(place)
    handshakes = pipe.recv()
    peers = source_ranks(len(handshakes), agent.layout.shard)
    names = [agent.connect(handshakes[peer]) for peer in peers]
    texts, first = pipe.recv()
    start = time.perf_counter()
    pull = agent.start_pull([Offer.from_json(texts[peer]) for peer in peers])
    slots = pull.wait()  # checksums of every slot, layer and head have been compared
    seconds = time.perf_counter() - start
    source = agent.peer(names[0]).layout
    report = {
        "plan": explain_plan(source, agent.layout),
        "ranges": pull.ranges,
        "bytes": pull.bytes_total,
        "seconds": seconds,
    }
    pipe.send((decode(model, pool, slots, first), report))
    agent.close()


def start(context: Any, worker: Any, place: Rank, *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Start a worker; returns the process and the router's end of its pipe."""
    ours, theirs = context.Pipe()
    process = context.Process(target=worker, args=(place, theirs, *arguments), name=place.name, daemon=True)
    process.start()
    theirs.close()  # so that the router sees the end of a worker that dies
    return process, ours


def receive(worker: tuple[BaseProcess, Connection]) -> Any:
    """The next message of a worker."""
    process, pipe = worker
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit(f"{process.name} ended before its work was done; its error stands above") from None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", nargs="+", default=QUESTIONS, help="one or more word problems")
    parser.add_argument("--prefill-tp", type=int, default=1, help="prefill ranks")
    parser.add_argument("--decode-tp", type=int, default=1, help="decode ranks")
    parser.add_argument("--layout", choices=("DS", "SD"), default="DS")
    parser.add_argument("--model", type=Path, help="safetensors file; the shipped model if left out")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: ranks take the GPUs in turn")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    prompts = tuple(tuple(encode(question + END)) for question in options.question)
    dtype = getattr(torch, options.dtype)
    context = multiprocessing.get_context("forkserver")  # one import of torch for all workers
    context.set_forkserver_preload(["fused_kda.nn.generation", "fused_kda.transfer"])

    with tempfile.TemporaryDirectory() as folder:

        def place(role: str, size: int, rank: int, number: int) -> Rank:
            gpus = torch.cuda.device_count()
            device = f"cuda:{number % gpus}" if options.device == "cuda" else "cpu"
            return Rank(role, size, rank, options.model, dtype, options.layout, device, prompts, folder)

        sources, targets = options.prefill_tp, options.decode_tp
        readers = max(1, targets // sources)
        prefillers = [
            start(context, prefill_worker, place("prefill", sources, rank, rank), readers) for rank in range(sources)
        ]
        decoders = [
            start(context, decode_worker, place("decode", targets, rank, sources + rank)) for rank in range(targets)
        ]
        handshakes = [receive(worker) for worker in prefillers]
        for _, pipe in decoders:
            pipe.send(handshakes)
        offers = [receive(worker) for worker in prefillers]
        for _, pipe in decoders:
            pipe.send(([offer for offer, _ in offers], offers[0][1]))
        results = [receive(worker) for worker in decoders]
        freed = [receive(worker) for worker in prefillers]
        for process, _ in (*prefillers, *decoders):
            process.join()

    answers, report = results[0]
    print(report["plan"])
    for rank, (_, own) in enumerate(results):
        rate = own["bytes"] / own["seconds"] / 1e9
        print(
            f"decode rank {rank}: {len(prompts)} slots, {own['bytes']:,} bytes in {own['ranges']} ranges, "
            f"{own['seconds'] * 1e3:.1f} ms with connecting and checking ({rate:.2f} GB/s)"
        )
    print(f"prefill ranks: all readers confirmed and all slots freed: {'yes' if all(map(all, freed)) else 'no'}")
    for question, answer in zip(options.question, answers, strict=True):
        print(f"\n{question}\n{answer}")

    model = read_model(options.model, dtype=dtype, device=options.device)
    pool = model.new_pool(len(prompts), layout=options.layout)
    expected = decode(model, pool, *prefill(model, pool, prompts))
    same = all(texts == expected for texts, _ in results)
    print(f"\nthe same as in one process, token for token: {'yes' if same else 'no: ' + json.dumps(expected)}")
    if not same or not all(map(all, freed)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
