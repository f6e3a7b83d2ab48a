"""How fast slots travel between two processes of this machine, beside a plain NIXL copy of as many bytes.

The plain copy reads from and writes to the same pools, one range per layer: what the memory allows.

    python examples/disaggregated/throughput.py
    python examples/disaggregated/throughput.py --device cuda --layers 69

The owner has 24 heads (tensor-parallel size 1), the reader 12 of them (rank 0 of 2), as when each rank of Kimi-K3 at
tensor-parallel size 8 pulls from one of size 4. Rounds are interleaved; the best of each is printed. "read" is planning
and moving the data, "ready" includes the comparison of generations and checksums.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import torch

from fused_kda.layouts import LayoutKind, Shard
from fused_kda.pool import StatePool
from fused_kda.transfer import Offer, TransferAgent
from fused_kda.transfer.pull import Peer

HEADS, DIM = 24, 128
SIZE = 2


def make_agent(role: str, kind: LayoutKind, size: int, options: argparse.Namespace) -> TransferAgent:
    pool = StatePool(
        options.layers, options.slots + 1, HEADS // size, DIM, layout=kind, page_shared=True, device=options.device
    )
    return TransferAgent(role, pool, Shard(HEADS, DIM, size, 0))


def bytes_of_reader(options: argparse.Namespace) -> int:
    """What one round carries: windows (bf16, 3 taps) and states (fp32) of the reader's heads."""
    return options.slots * options.layers * HEADS // SIZE * (3 * DIM * 3 * 2 + DIM * DIM * 4)


def own(pipe: Connection, kind: LayoutKind, options: argparse.Namespace) -> None:
    """The owner: the same slots offered again and again."""
    torch.set_num_threads(1)
    agent = make_agent("owner", kind, 1, options)
    for index in range(options.layers):
        agent.pool.layer(index).state.normal_()
    pipe.send(agent.handshake())
    while pipe.recv():
        pipe.send(agent.offer(agent.pool.allocate(options.slots)).to_json())
        while not agent.collect():
            time.sleep(0.01)
    agent.close()


def plain_copy(agent: TransferAgent, owner: Peer) -> float:
    """Seconds of READs of as many bytes from and to the same pools, one range per layer (no slot is in use)."""
    nixl, (memory, device) = agent.nixl, agent.memory
    nbytes = (agent.layout.slots - 1) * (agent.layout.conv_bytes + agent.layout.state_bytes)
    local = [(place.offset + place.pitch, nbytes, device) for place in agent.layout.conv]
    remote = [(place.offset + place.pitch, nbytes, owner.memory[1]) for place in owner.layout.conv]
    start = time.perf_counter()
    handle = nixl.initialize_xfer(
        "READ", nixl.get_xfer_descs(local, memory), nixl.get_xfer_descs(remote, owner.memory[0]), owner.name
    )
    state = nixl.transfer(handle)
    while state != "DONE":
        if state == "ERR":
            raise RuntimeError("the plain copy failed")
        time.sleep(0.0001)
        state = nixl.check_xfer_state(handle)
    seconds = time.perf_counter() - start
    handle.release()
    return seconds


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


def measure(kind: LayoutKind, options: argparse.Namespace) -> tuple[float, float, float, int]:
    """Best seconds of a plain copy, of a pull until the data is there and until it is ready; and the pull's ranges."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, kind, options), daemon=True)
    process.start()
    theirs.close()
    agent = make_agent("reader", kind, SIZE, options)
    owner = agent.peer(agent.connect(pipe.recv()))
    plain, pulls = [], []
    for number in range(options.rounds + 1):
        seconds = plain_copy(agent, owner)
        pipe.send(True)
        timed = pull(agent, pipe.recv())
        if number:  # the first round connects
            plain.append(seconds)
            pulls.append(timed)
    pipe.send(False)
    process.join()
    agent.close()
    reads, readies, ranges = zip(*pulls, strict=True)
    return min(plain), min(reads), min(readies), ranges[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    torch.set_num_threads(1)

    nbytes = bytes_of_reader(options)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "host memory"
    print(f"{options.slots} slots of {options.layers} layers, 12 of 24 heads, {nbytes / 1e6:.1f} MB, {where}")
    print(f"{'':<8}{'ranges':>8}{'plain ms':>10}{'GB/s':>8}{'read ms':>10}{'GB/s':>8}{'of plain':>10}{'ready ms':>10}")
    for kind in ("DS", "SD"):
        plain, read, ready, ranges = measure(kind, options)
        print(
            f"{kind:<8}{ranges:>8,}{plain * 1e3:>10.1f}{nbytes / plain / 1e9:>8.2f}{read * 1e3:>10.1f}"
            f"{nbytes / read / 1e9:>8.2f}{plain / read:>10.0%}{ready * 1e3:>10.1f}"
        )


if __name__ == "__main__":
    main()
