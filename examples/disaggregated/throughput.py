"""How fast slots travel between two processes of this machine, beside a plain NIXL copy of as many bytes.

    python examples/disaggregated/throughput.py
    python examples/disaggregated/throughput.py --device cuda --layers 69

The owner has 24 heads (tensor-parallel size 1), the reader 12 of them (rank 0 of 2), as when each rank of Kimi-K3 at
tensor-parallel size 8 pulls from one of size 4. Rounds are interleaved; the median of each is printed. "read" is
planning and moving the data, "ready" includes the comparison of generations and checksums.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch

from fused_kda.layouts import LAYOUTS, LayoutKind, Shard
from fused_kda.pool import StatePool
from fused_kda.transfer import Offer, TransferAgent
from fused_kda.transfer.pull import CHUNK_BYTES

HEADS, DIM = 24, 128
SIZE = 2


def make_agent(role: str, kind: LayoutKind, size: int, options: argparse.Namespace) -> TransferAgent:
    pool = StatePool(
        options.layers, options.slots + 1, HEADS // size, DIM, layout=kind, page_shared=True, device=options.device
    )
    return TransferAgent(f"{role} {kind}", pool, Shard(HEADS, DIM, size, 0))


def bytes_of_reader(options: argparse.Namespace) -> int:
    """What one round carries: windows (bf16, 3 taps) and states (fp32) of the reader's heads."""
    return options.slots * options.layers * HEADS // SIZE * (3 * DIM * 3 * 2 + DIM * DIM * 4)


def plain_buffer(agent: TransferAgent, nbytes: int, device: str) -> torch.Tensor:
    """Registered memory for the plain copy."""
    buffer = torch.ones(nbytes, dtype=torch.uint8, device=device)
    agent.register([(buffer.data_ptr(), nbytes)], agent.memory)
    return buffer


def own(pipe: Connection, options: argparse.Namespace) -> None:
    """The owner: one agent per layout, the same slots offered again and again."""
    torch.set_num_threads(1)
    agents = {kind: make_agent("owner", kind, 1, options) for kind in LAYOUTS}
    buffer = plain_buffer(agents["DS"], bytes_of_reader(options), options.device)
    for agent in agents.values():
        for index in range(options.layers):
            agent.pool.layer(index).state.normal_()
    pipe.send(({kind: agent.handshake() for kind, agent in agents.items()}, buffer.data_ptr()))
    while kind := pipe.recv():
        agent = agents[kind]
        pipe.send(agent.offer(agent.pool.allocate(options.slots)).to_json())
        while not agent.collect():
            time.sleep(0.0005)
    for agent in agents.values():
        agent.close()


def plain_copy(agent: TransferAgent, remote: int, buffer: torch.Tensor) -> float:
    """Seconds of plain READs of the whole buffer, cut as the transfer cuts."""
    nixl, (memory, device) = agent.nixl, agent.memory
    start = time.perf_counter()
    handles = []
    for first in range(0, buffer.numel(), CHUNK_BYTES):
        nbytes = min(CHUNK_BYTES, buffer.numel() - first)
        local = nixl.get_xfer_descs([(buffer.data_ptr() + first, nbytes, device)], memory)
        there = nixl.get_xfer_descs([(remote + first, nbytes, device)], memory)
        handles.append(nixl.initialize_xfer("READ", local, there, "owner DS"))
        nixl.transfer(handles[-1])
    for handle in handles:
        while (state := nixl.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise RuntimeError("the plain copy failed")
            time.sleep(0.0001)
        handle.release()
    return time.perf_counter() - start


def pull(agent: TransferAgent, offer: str) -> tuple[float, float, int]:
    """Seconds until the data is there and until the slots are ready, and the number of ranges."""
    offered = Offer.from_json(offer)
    start = time.perf_counter()
    pending = agent.start_pull([offered])
    while pending.bytes_done < pending.bytes_total:
        pending.poll()
        time.sleep(0.0001)
    read = time.perf_counter() - start
    for slot in pending.wait():
        agent.pool.free(slot)
    return read, time.perf_counter() - start, pending.ranges


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    owner = context.Process(target=own, args=(theirs, options), daemon=True)
    owner.start()
    theirs.close()
    readers = {kind: make_agent("reader", kind, SIZE, options) for kind in LAYOUTS}
    nbytes = bytes_of_reader(options)
    buffer = plain_buffer(readers["DS"], nbytes, options.device)
    handshakes, remote = pipe.recv()
    for kind, agent in readers.items():
        agent.connect(handshakes[kind])

    plain, reads, readies, ranges = [], {kind: [] for kind in LAYOUTS}, {kind: [] for kind in LAYOUTS}, {}
    for number in range(options.rounds + 1):
        seconds = plain_copy(readers["DS"], remote, buffer)
        if number:  # the first round connects
            plain.append(seconds)
        for kind, agent in readers.items():
            pipe.send(kind)
            read, ready, ranges[kind] = pull(agent, pipe.recv())
            if number:
                reads[kind].append(read)
                readies[kind].append(ready)
    pipe.send(None)
    owner.join()

    where = torch.cuda.get_device_name() if options.device == "cuda" else "host memory"
    print(f"{options.slots} slots of {options.layers} layers, 12 of 24 heads, {nbytes / 1e6:.1f} MB, {where}")
    print(f"{'':<12}{'ranges':>8}{'read ms':>10}{'GB/s':>8}{'of plain':>10}{'ready ms':>10}")
    base = statistics.median(plain)
    print(f"{'plain copy':<12}{'':>8}{base * 1e3:>10.1f}{nbytes / base / 1e9:>8.2f}{'100%':>10}")
    for kind in LAYOUTS[::-1]:
        read, ready = statistics.median(reads[kind]), statistics.median(readies[kind])
        share = f"{base / read:.0%}"
        print(
            f"{kind:<12}{ranges[kind]:>8,}{read * 1e3:>10.1f}{nbytes / read / 1e9:>8.2f}{share:>10}{ready * 1e3:>10.1f}"
        )


if __name__ == "__main__":
    main()
