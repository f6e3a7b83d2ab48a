"""How fast slots travel between two processes of this machine, beside a plain NIXL copy of as many bytes.

The plain copy is one contiguous READ by the same two agents, from one buffer into another: what NIXL and memory allow.

    python examples/disaggregated/throughput.py
    python examples/disaggregated/throughput.py --device cuda --layers 69
    python examples/disaggregated/throughput.py --device cuda --layers 69 --size 1

The owner has 24 heads (tensor-parallel size 1), the reader 12 of them (rank 0 of 2), as when each rank of Kimi-K3 at
tensor-parallel size 8 pulls from one of size 4. With --size 1 it has all, as between equal sizes. Rounds of both are
interleaved. "read" is planning and moving the data, "ready" also compares generations and checksums; connecting is part
of neither. Times are medians; "of plain" is the median, and the quartiles, of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch

from fused_kda.layouts import LayoutKind, Shard
from fused_kda.pool import StatePool
from fused_kda.transfer import Offer, TransferAgent

HEADS, DIM = 24, 128


def make_agent(
    role: str, kind: LayoutKind, size: int, options: argparse.Namespace
) -> tuple[TransferAgent, torch.Tensor]:
    """An agent with a pool, and a registered buffer for the plain copy."""
    pool = StatePool(
        options.layers, options.slots + 1, HEADS // size, DIM, layout=kind, page_shared=True, device=options.device
    )
    for index in range(options.layers):
        pool.layer(index).state.normal_()
    agent = TransferAgent(role, pool, Shard(HEADS, DIM, size, 0))
    buffer = torch.ones(bytes_of_reader(options), dtype=torch.uint8, device=options.device)
    agent.register([(buffer.data_ptr(), buffer.numel())], agent.memory)
    return agent, buffer


def bytes_of_reader(options: argparse.Namespace) -> int:
    """What one round carries: windows (bf16, 3 taps) and states (fp32) of the reader's heads."""
    return options.slots * options.layers * HEADS // options.size * (3 * DIM * 3 * 2 + DIM * DIM * 4)


def own(pipe: Connection, kind: LayoutKind, options: argparse.Namespace) -> None:
    """The owner: the same slots offered again and again."""
    torch.set_num_threads(1)
    agent, buffer = make_agent("owner", kind, 1, options)
    pipe.send((agent.handshake(), buffer.data_ptr()))
    while pipe.recv():
        pipe.send(agent.offer(agent.pool.allocate(options.slots)).to_json())
        while not agent.collect():
            time.sleep(0.01)
    agent.close()


def plain_copy(agent: TransferAgent, source: int, target: torch.Tensor) -> float:
    """Seconds of one READ from the address of the owner's buffer into this agent's."""
    nixl, (memory, device) = agent.nixl, agent.memory
    owner, nbytes = agent.peer("owner"), target.numel()
    start = time.perf_counter()
    local = nixl.get_xfer_descs([(target.data_ptr(), nbytes, device)], memory)
    remote = nixl.get_xfer_descs([(source, nbytes, owner.memory[1])], owner.memory[0])
    handle = nixl.initialize_xfer("READ", local, remote, owner.name)
    state = nixl.transfer(handle)
    while state != "DONE":
        if state == "ERR":
            raise RuntimeError("the plain copy failed")
        time.sleep(0.0001)
        state = nixl.check_xfer_state(handle)
    seconds = time.perf_counter() - start
    handle.release()
    return seconds


def pull(agent: TransferAgent, offer: Offer) -> tuple[float, float, int]:
    """Seconds until the data is there and until the slots are ready, and the number of ranges."""
    start = time.perf_counter()
    pending = agent.start_pull([offer])
    while pending.bytes_done < pending.bytes_total:
        pending.poll()
        time.sleep(0.0001)
    read = time.perf_counter() - start
    slots = pending.wait()
    ready = time.perf_counter() - start
    for slot in slots:
        agent.pool.free(slot)
    return read, ready, pending.ranges


def measure(kind: LayoutKind, options: argparse.Namespace) -> str:
    """Run the rounds of one layout; its row of the table."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=own, args=(theirs, kind, options), daemon=True)
    process.start()
    theirs.close()
    agent, target = make_agent("reader", kind, options.size, options)
    handshake, source = pipe.recv()
    agent.connect(handshake)
    nbytes, ranges = bytes_of_reader(options), 0
    plain, read, ready = [], [], []
    for number in range(options.rounds + 1):
        pipe.send(True)
        offer = Offer.from_json(pipe.recv())
        copied = plain_copy(agent, source, target)
        here, checked, ranges = pull(agent, offer)
        if number:  # the first round connects
            plain.append(copied)
            read.append(here)
            ready.append(checked)
    pipe.send(False)
    process.join()
    agent.close()
    row = f"{kind:<6}{ranges:>8,}"
    for times in (plain, read, ready):
        middle = statistics.median(times)
        row += f"{middle * 1e3:>10.1f}{nbytes / middle / 1e9:>9.2f}"
        if times is not plain:
            low, ratio, high = statistics.quantiles([p / t for p, t in zip(plain, times, strict=True)], n=4)
            row += f"{f'{ratio:.0%} ({low:.0%}-{high:.0%})':>18}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--size", type=int, choices=(1, 2), default=2, help="the reader's tensor-parallel size")
    parser.add_argument("--rounds", type=int, default=15, help="at least 2")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    torch.set_num_threads(1)

    nbytes, heads = bytes_of_reader(options), HEADS // options.size
    where = torch.cuda.get_device_name() if options.device == "cuda" else "host memory"
    print(f"{options.slots} slots of {options.layers} layers, {heads} of {HEADS} heads, {nbytes / 1e6:.1f} MB, {where}")
    print(f"{'':<6}{'ranges':>8}{'plain ms':>10}{'GB/s':>9}", end="")
    print("".join(f"{f'{name} ms':>10}{'GB/s':>9}{'of plain':>18}" for name in ("read", "ready")))
    for kind in ("DS", "SD"):
        print(measure(kind, options))


if __name__ == "__main__":
    main()
