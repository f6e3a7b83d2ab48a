"""The cache of compiled kernels: private, checked, shared by many processes, and never an obstacle."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fused_kda import api, build, gates, kernel_counts
from fused_kda.cli import app

pytest.importorskip("cuda.core")
pytest.importorskip("triton")

from triton.runtime.cache import FileCacheManager

from fused_kda.kernels import cache, jit, triton_cache
from fused_kda.kernels.chain import launch as chain
from fused_kda.kernels.cuda import compile as compiling
from fused_kda.kernels.cuda.shape import REGISTERS

pytestmark = pytest.mark.case(25)
SPEC = build.specialization(1)
PROCESS = Path(__file__).with_name("cold_processes.py")


def from_nvrtc() -> bytes:
    return compiling.compile_cubin(SPEC, REGISTERS, False, "sm_80")


def from_triton() -> bytes:
    jit.compiled.cache_clear()
    return bytes(jit.compiled(chain._norm(SPEC, chain.SHAPE), "gfx942").kernel)


KINDS: dict[str, Callable[[], bytes]] = {"cuda": from_nvrtc, "triton": from_triton}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache is tried, not the kernel: a small one compiles at once."""
    (tmp_path / "small.cu").write_text('extern "C" __global__ void fused_kda_decode(float* x) { x[0] *= 2.0f; }\n')
    monkeypatch.setattr(compiling, "SOURCE", tmp_path / "small.cu")


def use(monkeypatch: pytest.MonkeyPatch, directory: Path, compiling_is: str = "allow") -> None:
    """Begin anew, as another process would, with this cache directory."""
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(directory))
    monkeypatch.setenv("FUSED_KDA_COMPILE", compiling_is)
    for cached in (compiling._caches, cache.private_directory, cache._warn):
        cached.cache_clear()
    cache._reasons.clear()
    api.reset()


def files(directory: Path, kind: str) -> list[Path]:
    return [path for path in (directory / kind).rglob("*") if path.is_file()]


@kinds
def test_a_second_time_comes_from_a_private_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    use(monkeypatch, tmp_path / "cache")
    first = KINDS[kind]()
    assert kernel_counts() == {"prebuilt": 0, "cache": 0, "compiled": 1}
    assert stat.S_IMODE((tmp_path / "cache" / kind).stat().st_mode) == 0o700
    use(monkeypatch, tmp_path / "cache", "never")
    assert KINDS[kind]() == first
    assert kernel_counts() == {"prebuilt": 0, "cache": 1, "compiled": 0}


def test_without_a_given_directory_it_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path)
    monkeypatch.delenv("FUSED_KDA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    gates.reset()
    from_nvrtc()
    assert files(tmp_path / "xdg" / "fused-kda", "cuda")


@kinds
@pytest.mark.parametrize("compiling_is", ["never", "warmup"])
def test_a_compilation_that_is_forbidden_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, compiling_is: str
) -> None:
    use(monkeypatch, tmp_path / "cache", compiling_is)
    with pytest.raises(RuntimeError, match=rf"^FUSED_KDA_COMPILE={compiling_is}: .* fused_kda\.warmup"):
        KINDS[kind]()
    assert kernel_counts()["compiled"] == 0
    mark = gates.warming.set(True)
    try:
        if compiling_is == "warmup":
            KINDS[kind]()
            assert kernel_counts()["compiled"] == 1
        else:
            with pytest.raises(RuntimeError, match="FUSED_KDA_COMPILE=never"):
                KINDS[kind]()
    finally:
        gates.warming.reset(mark)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "altered": lambda content: content[:-9] + bytes(byte ^ 1 for byte in content[-9:]),
}


@kinds
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: str
) -> None:
    """Each file of the entry in turn, the machine code, Triton's metadata and its own list of files among them."""
    use(monkeypatch, tmp_path / "cache")
    first = KINDS[kind]()
    damaged = files(tmp_path / "cache", kind)
    assert len(damaged) == 1 if kind == "cuda" else len(damaged) >= 4
    if kind == "triton":  # what is loaded, and what says so
        damaged = [path for path in damaged if path.suffix in (".hsaco", ".json", ".sha256")]
        assert len(damaged) == 4
    for path in damaged:
        whole = path.read_bytes()
        path.write_bytes(DAMAGES[damage](whole))
        use(monkeypatch, tmp_path / "cache")
        with caplog.at_level(logging.WARNING, "fused_kda"):
            assert KINDS[kind]() == first, path
        assert kernel_counts() == {"prebuilt": 0, "cache": 0, "compiled": 1}, path
        assert "a damaged entry" in caplog.text
        caplog.clear()
        use(monkeypatch, tmp_path / "cache", "never")
        assert KINDS[kind]() == first, "the entry is whole again"


def test_an_entry_of_another_key_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole entry in another's place: its hash holds for its own key alone."""
    use(monkeypatch, tmp_path / "cache")
    first = from_nvrtc()
    (one,) = files(tmp_path / "cache", "cuda")
    other = compiling.compile_cubin(build.specialization(2), REGISTERS, False, "sm_90")
    assert other != first
    (second,) = set(files(tmp_path / "cache", "cuda")) - {one}
    one.write_bytes(second.read_bytes())
    use(monkeypatch, tmp_path / "cache")
    assert from_nvrtc() == first
    assert kernel_counts()["compiled"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@kinds
def test_another_users_entry_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    use(monkeypatch, tmp_path / "cache")
    first = KINDS[kind]()
    for path in files(tmp_path / "cache", kind):
        os.chown(path, 12345, -1)
    use(monkeypatch, tmp_path / "cache")
    with caplog.at_level(logging.WARNING, "fused_kda"):
        assert KINDS[kind]() == first
    assert "belongs to another user" in caplog.text
    assert kernel_counts()["compiled"] == 1
    assert {path.stat().st_uid for path in files(tmp_path / "cache", kind)} == {0}


@kinds
def test_another_users_directory_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    use(monkeypatch, tmp_path / "cache")
    first = KINDS[kind]()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    use(monkeypatch, tmp_path / "cache")
    with caplog.at_level(logging.WARNING, "fused_kda"):
        assert KINDS[kind]() == first
    assert kernel_counts() == {"prebuilt": 0, "cache": 0, "compiled": 1}
    assert "is not a directory of user 54321" in caplog.text


def test_a_directory_open_to_others_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir(mode=0o777)
    (tmp_path / "cuda").chmod(0o777)
    use(monkeypatch, tmp_path)
    from_nvrtc()
    assert stat.S_IMODE((tmp_path / "cuda").stat().st_mode) == 0o700


def one_warning(caplog: pytest.LogCaptureFixture, *words: str) -> None:
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(word in record.getMessage() for word in words), record.getMessage()


@pytest.mark.parametrize("place", ["a file/cache", "/proc/self/cache"])
def test_where_no_directory_can_be_made_memory_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    (tmp_path / "a file").write_text("")
    use(monkeypatch, tmp_path / place)
    with caplog.at_level(logging.WARNING, "fused_kda"):
        for make in KINDS.values():
            make()
        from_nvrtc()
    one_warning(caplog, str(tmp_path / place), "kept in memory")
    assert kernel_counts() == {"prebuilt": 0, "cache": 1, "compiled": 2}


def test_on_a_full_disk_memory_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Directories can be made, but no file gets its content."""
    root = tmp_path / "cache"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    put = FileCacheManager.put

    def put_elsewhere(self: Any, *arguments: Any, **options: Any) -> Any:
        return full() if str(root) in self.cache_dir else put(self, *arguments, **options)

    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(FileCacheManager, "put", put_elsewhere)
    use(monkeypatch, root)
    with caplog.at_level(logging.WARNING, "fused_kda"):
        first = [make() for make in KINDS.values()]
        again = [make() for make in KINDS.values()]
    assert first == again
    one_warning(caplog, str(root), "No space left on device")
    assert files(root, "cuda") == []


@kinds
def test_sixteen_cold_processes_share_one_directory(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, str(PROCESS), kind, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["codes"] == [0] * 16
    assert len({digest for digest, _ in report["answers"]}) == 1
    compiled = [counts["compiled"] for _, counts in report["answers"]]
    assert max(compiled) == 1
    assert all(counts["compiled"] + counts["cache"] == 1 for _, counts in report["answers"])
    left = [path.name for path in (tmp_path / "cache" / kind).rglob("*") if "tmp" in path.name and path.is_file()]
    assert left == []


def test_triton_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its knobs and environment outside this package's kernels."""
    use(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "theirs"))
    before = dict(os.environ)
    from_triton()
    assert dict(os.environ) == before
    knobs = triton_cache.triton.knobs.cache
    assert (knobs.dir, knobs.manager_class) == (str(tmp_path / "theirs"), None)
    assert not (tmp_path / "theirs").exists()


def test_the_command_shows_and_clears_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use(monkeypatch, tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "notes").write_text("not a kernel")
    for make in KINDS.values():
        make()
    shown = json.loads(CliRunner().invoke(app, ["cache", "info", "--json"]).stdout)
    assert [one["kind"] for one in shown] == ["cuda", "triton"]
    assert all(one["files"] == len(files(tmp_path / "cache", one["kind"])) > 0 for one in shown)
    cleared = CliRunner().invoke(app, ["cache", "clear"])
    assert cleared.exit_code == 0, cleared.output
    assert f"{sum(one['files'] for one in shown)} files removed from {tmp_path / 'cache'}" in cleared.stdout.replace(
        "\n", ""
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["notes"]
    assert "empty" in CliRunner().invoke(app, ["cache", "info"]).stdout
    from_nvrtc()
    assert len(files(tmp_path / "cache", "cuda")) == 1
