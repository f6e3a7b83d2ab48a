"""Separate processes: the answers of one process, and what a reader does when the owner dies under it."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fused_kda.pool import StatePool
from fused_kda.transfer import Offer, TransferAgent, TransferError
from fused_kda.transfer import pull as pull_module

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NIXL exists for Linux alone")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "disaggregated" / "run.py"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("layout", "prefill", "decode", "ranges"),
    [
        ("DS", 1, 1, 4 * (1 + 1)),  # two neighbouring slots in four layers; window and state are whole
        ("SD", 2, 1, 2 * 2 * 4 * (9 + 1)),
        ("DS", 1, 2, 2 * 4 * (3 + 1)),
    ],
)
def test_workers_answer_as_one_process_does(layout: str, prefill: int, decode: int, ranges: int, device: str) -> None:
    command = [sys.executable, str(EXAMPLE), "--layout", layout, "--device", device]
    command += ["--prefill-tp", str(prefill), "--decode-tp", str(decode)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the same as in one process, token for token: yes" in run.stdout
    assert "all slots freed: yes" in run.stdout
    reports = re.findall(r"decode rank \d: 2 slots, .* bytes in (\d+) ranges", run.stdout)
    assert reports == [str(ranges)] * decode
    assert "#### 57" in run.stdout
    assert "#### 4" in run.stdout


def own_slots(pipe: Connection, device: str) -> None:
    """Offer slots and do nothing more."""
    pool = StatePool(8, 5, 8, device=device)
    agent = TransferAgent("owner", pool)
    slots = pool.allocate(4)
    for index in range(pool.layers):
        pool.layer(index).conv_state.fill_(2.0)
        pool.layer(index).state.fill_(1.0 + index)
    pipe.send((agent.handshake(), agent.offer(slots).to_json()))
    time.sleep(300)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the two processes need a CUDA device each")
def test_slots_travel_from_one_device_to_another() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own_slots, args=(theirs, "cuda:0"), daemon=True)
    owner.start()
    theirs.close()  # so that this process sees the end of an owner that dies
    pool = StatePool(8, 9, 8, device="cuda:1")
    target = TransferAgent("reader", pool)
    handshake, offered = ours.recv()
    target.connect(handshake)
    slots = target.pull([Offer.from_json(offered)])
    for index in range(pool.layers):
        layer = pool.layer(index)
        assert (layer.conv_state[slots] == 2.0).all()
        assert (layer.state[slots] == 1.0 + index).all()
        assert not layer.state[[slot for slot in range(pool.slots) if slot not in slots]].any()
    target.close()
    owner.kill()
    owner.join()


def test_an_owner_that_is_killed_in_mid_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_module, "CHUNK_BYTES", 2**20)
    monkeypatch.setattr(pull_module, "WINDOW", 1)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=own_slots, args=(theirs, "cpu"), daemon=True)
    owner.start()
    theirs.close()  # so that this process sees the end of an owner that dies
    pool = StatePool(8, 5, 8)
    target = TransferAgent("reader", pool, timeout=5.0)
    handshake, offered = ours.recv()
    target.connect(handshake)
    seen: list[int] = []

    def kill_the_owner(done: int, total: int) -> None:
        assert done < total
        if not seen:
            os.kill(owner.pid or 0, signal.SIGKILL)
            owner.join()
        seen.append(done)

    start = time.monotonic()
    with pytest.raises(TransferError, match="owner"):
        target.pull([Offer.from_json(offered)], progress=kill_the_owner)
    assert seen
    assert time.monotonic() - start < 20
    assert pool.free_slots == pool.capacity
    for index in range(pool.layers):
        assert not pool.layer(index).state.any()
    target.close()
