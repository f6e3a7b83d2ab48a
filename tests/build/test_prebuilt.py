"""Prebuilt directories at run time, as far as a machine without a GPU can show: lookup, integrity, gates, launches."""

from __future__ import annotations

import json
import logging
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_kda import api, binaries, build, fused_kda_decode, gates, kernel_counts, warmup
from fused_kda.binaries import PrebuiltSet
from fused_kda.cli import doctor
from fused_kda.testing.problems import Draw, draw

pytest.importorskip("cuda.core")
pytest.importorskip("triton")

from fused_kda.kernels import driver, jit
from fused_kda.kernels.chain import launch as chain
from fused_kda.kernels.cuda import launch as cuda
from fused_kda.kernels.resources import cuobjdump

pytestmark = pytest.mark.case(18)
ARCH = "sm_80"
DRAW = Draw(heads=1)
SPEC = build.specialization(1)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of one specialisation: cuda and chain for sm_80, chain for gfx942."""
    directory = tmp_path_factory.mktemp("built")
    wanted = build.requests([ARCH], [SPEC], ["cuda", "chain"]) + build.requests(["gfx942"], [SPEC], ["chain"])
    build.write(directory, wanted)
    return directory


@pytest.fixture
def directory(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(built, tmp_path / "prebuilt")
    return tmp_path / "prebuilt"


@pytest.fixture(autouse=True)
def an_sm_80(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Gates take the CPU for an sm_80; kernels are kept in a cache of the test's own."""
    monkeypatch.setattr(gates, "architecture", lambda device: ARCH)
    monkeypatch.setenv("FUSED_KDA_CACHE_DIR", str(tmp_path / "cache"))
    for cached in (cuda.loaded_kernel, jit._loaded, jit._triton_loaded, jit.compiled):
        cached.cache_clear()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The machine code that would have been loaded into the device."""
    found: list[bytes] = []

    def load(code: bytes, name: str, device: int, shared: int) -> driver.Loaded:
        found.append(code)
        return driver.Loaded(len(found), None)

    monkeypatch.setattr(cuda, "load", load)
    return found


def use(monkeypatch: pytest.MonkeyPatch, directory: Path, compiling: str = "allow") -> None:
    monkeypatch.setenv("FUSED_KDA_PREBUILT", str(directory))
    monkeypatch.setenv("FUSED_KDA_COMPILE", compiling)
    api.reset()


def verdict(backend: str, wanted: Draw = DRAW) -> gates.Verdict:
    return next(v for v in gates.explain(draw(wanted).problem) if v.backend == backend)


def cubin(directory: Path) -> Path:
    """The file of the cuda kernel without prefetch."""
    key = binaries.identity(cuda.recipe(SPEC, cuda_shape(), False, ARCH))
    return directory / f"cuda/{ARCH}/{key}.cubin"


def cuda_shape() -> Any:
    from fused_kda.kernels.cuda.shape import shapes

    (shape,) = shapes(SPEC, ARCH, False)
    return shape


def load_cuda() -> driver.Loaded:
    return cuda.loaded_kernel(SPEC, cuda_shape(), False, ARCH, 0)


def test_a_held_problem_is_open_without_a_compiler(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    use(monkeypatch, built, "never")
    for backend in ("cuda", "chain"):
        found = verdict(backend)
        assert (found.open, found.prebuilt) == (True, str(built))
        assert str(found) == f"{backend}: open (prebuilt in {built})"
    held = doctor.gate("cuda", torch.device("cpu"))
    assert held.covers == "prebuilt alone (compiling is switched off (FUSED_KDA_COMPILE=never)): H 1, SD, state fp32"
    (report,) = doctor.examine()["prebuilt"]
    assert (report["directory"], report["architectures"], report["stale"]) == (str(built), ["gfx942", ARCH], [])


def test_what_is_not_held_is_closed_and_says_so(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    use(monkeypatch, built, "never")
    off = "compiling is switched off (FUSED_KDA_COMPILE=never)"
    lacking = f"{built} holds no kernel for this specialisation on {ARCH}"
    for wanted in (replace(DRAW, heads=2), replace(DRAW, layout="DS"), replace(DRAW, mask=True)):
        assert verdict("cuda", wanted).reasons == (off, lacking)
    assert verdict("triton").reasons == (off, lacking)
    assert doctor.gate("triton", torch.device("cpu")).reasons == (off,)
    with pytest.raises(NotImplementedError, match=f"^backend: .* got cuda .requested.: {re.escape(off)}; "):
        fused_kda_decode(**draw(replace(DRAW, heads=2)).arguments, backend="cuda")
    use(monkeypatch, built)
    assert verdict("cuda", replace(DRAW, heads=2)).open


def test_without_nvrtc_the_gate_is_that_of_the_directory(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    rows = tuple(
        replace(row, compiler=lambda: "NVRTC cannot be loaded") if row.backend == "cuda" else row for row in gates.TABLE
    )
    monkeypatch.setattr(gates, "TABLE", rows)
    use(monkeypatch, built)
    assert verdict("cuda").open
    closed = verdict("cuda", replace(DRAW, heads=2)).reasons
    assert closed == ("NVRTC cannot be loaded", f"{built} holds no kernel for this specialisation on {ARCH}")


def test_the_argument_comes_before_the_environment_and_that_before_the_wheel(
    monkeypatch: pytest.MonkeyPatch, built: Path, tmp_path: Path
) -> None:
    places = {name: tmp_path / name for name in ("argument", "environment", "wheel")}
    for place in places.values():
        shutil.copytree(built, place)
    monkeypatch.setattr(binaries, "INSIDE", places["wheel"])
    use(monkeypatch, places["environment"])
    monkeypatch.delenv("FUSED_KDA_PREBUILT")
    gates.reset()
    assert verdict("cuda").prebuilt == str(places["wheel"])
    use(monkeypatch, places["environment"])
    assert verdict("cuda").prebuilt == str(places["environment"])
    warmup([], prebuilt=places["argument"])
    assert verdict("cuda").prebuilt == str(places["argument"])
    assert [one.directory for one in gates.prebuilt_sets()] == list(places.values())
    cubin(places["argument"]).unlink()  # the next one that holds the kernel whole
    assert verdict("cuda").prebuilt == str(places["environment"])
    api.reset()
    assert verdict("cuda").prebuilt == str(places["environment"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}'])
def test_what_is_no_prebuilt_directory_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    if text:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=f"^prebuilt: expected a directory .* got {tmp_path} "):
        warmup([], prebuilt=tmp_path)
    use(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"^prebuilt: expected a directory"):
        draw(DRAW).run("auto")


def test_the_files_of_the_directory_are_what_is_loaded(
    monkeypatch: pytest.MonkeyPatch, built: Path, loads: list[bytes]
) -> None:
    use(monkeypatch, built, "never")
    load_cuda()
    assert loads == [cubin(built).read_bytes()]
    assert kernel_counts() == {"prebuilt": 1, "cache": 0, "compiled": 0}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is not what was built"),
    "altered": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"), "is not what was built"),
    "emptied": (lambda path: path.write_bytes(b""), "is not what was built"),
    "gone": (lambda path: path.unlink(), "cannot be read"),
    "led outside": (
        lambda path: path.symlink_to(shutil.move(path, path.parents[3] / path.name)),
        "cannot be read (outside the directory)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name_and_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, directory: Path, loads: list[bytes], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    whole = cubin(directory).read_bytes()
    harm, text = DAMAGES[damage]
    harm(cubin(directory))
    use(monkeypatch, directory)
    found = verdict("cuda")
    assert (found.open, found.prebuilt) == (True, "")
    with caplog.at_level(logging.WARNING, "fused_kda"):
        load_cuda()
    assert loads == [whole]
    assert kernel_counts() == {"prebuilt": 0, "cache": 0, "compiled": 1}
    (record,) = caplog.records
    assert str(cubin(directory)) in record.getMessage()
    assert text in record.getMessage()


def test_a_damaged_file_closes_the_gate_where_nothing_compiles(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    cubin(directory).write_bytes(b"\x7fELF")
    use(monkeypatch, directory, "never")
    off, named = verdict("cuda").reasons
    assert off.startswith("compiling is switched off")
    assert named.startswith(f"{cubin(directory)} is not what was built: expected SHA-256 ")
    assert verdict("cuda", replace(DRAW, prefetch=True)).open, "its own file is whole"
    assert verdict("chain").open


def test_other_sources_make_a_directory_stale(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["sources"]["cuda"] = "0" * 64
    (directory / "manifest.json").write_text(json.dumps(manifest))
    use(monkeypatch, directory, "never")
    text = f"{directory} was built from other sources of cuda (fused-kda {manifest['fused_kda']})"
    assert text in verdict("cuda").reasons
    assert verdict("chain").open
    assert doctor.examine()["prebuilt"][0]["stale"] == [text]
    assert PrebuiltSet(directory).held("cuda", ARCH) == []


def test_the_sources_of_a_kernel_are_in_the_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "fused_kda"
    shutil.copytree(Path(binaries.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(binaries, "__file__", str(package / "binaries.py"))
    before = {backend: binaries.source_hash(backend) for backend in ("cuda", "triton", "chain")}
    for name, moved in {
        "kernels/cuda/fused_decode.cu": {"cuda"},
        "kernels/cuda/shape.py": {"cuda"},
        "kernels/triton/kernel.py": {"triton"},
        "kernels/device.py": {"cuda", "triton", "chain"},
        "kernels/cuda/inspect.py": set(),
        "pool.py": set(),
    }.items():
        with (package / name).open("a") as file:
            file.write("\n")
        now = {backend: binaries.source_hash(backend) for backend in before}
        assert {backend for backend in before if now[backend] != before[backend]} == moved, name
        before = now


def test_code_that_the_device_refuses_is_not_offered_again(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    """Compiled here if that can be; where it cannot, the gate closes with the driver's answer."""

    def refuse(*_: Any) -> driver.Loaded:
        raise gates.Unloadable("the driver was asked for the code to load, and answered CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(cuda, "load", refuse)
    use(monkeypatch, built, "never")
    with pytest.raises(gates.Unloadable) as caught:
        load_cuda()
    assert caught.value.prebuilt
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in verdict("cuda").reasons[1]
    use(monkeypatch, built)
    with pytest.raises(gates.Unloadable):
        load_cuda()
    with pytest.raises(gates.Unloadable) as caught:
        load_cuda()
    assert not caught.value.prebuilt
    assert kernel_counts()["compiled"] == 1


def test_a_backend_whose_code_cannot_be_loaded_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """``auto`` goes on to the next gate and says why; asked for by name, it is a closed gate."""
    monkeypatch.setattr(gates, "architecture", lambda device: "cpu")
    import fake_backend

    backend = fake_backend.install(monkeypatch)
    reason = "the driver was asked for the code to load, and answered CUDA_ERROR_INVALID_IMAGE"

    def refuse(problem: Any) -> Any:
        raise gates.Unloadable(reason)

    monkeypatch.setattr(sys.modules["fused_kda.kernels.fast"], "prepare", refuse)
    with pytest.warns(api.FallbackWarning, match=reason):
        draw(DRAW).run("auto")
    with pytest.raises(NotImplementedError, match=rf"got fast \(requested\): {reason}$"):
        draw(DRAW).run("fast")
    assert backend.launches == 0


def test_a_device_with_less_shared_memory_closes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {arch: row.shared_memory for row in gates.rows("cuda") for arch in row.archs}
    for arch, limit in (("sm_80", 4096), ("sm_90", 48 * 1024)):
        monkeypatch.setattr(gates, "architecture", lambda device, arch=arch: arch)
        monkeypatch.setattr(gates, "shared_memory_limit", lambda device, limit=limit: limit)
        text = f"the device has {limit} bytes of shared memory per program, {needed[arch]} are needed"
        assert verdict("cuda").reasons == (text,)
        assert doctor.gate("cuda", torch.device("cpu")).reasons == (text,)
        monkeypatch.setattr(gates, "shared_memory_limit", lambda device, arch=arch: needed[arch])
        assert verdict("cuda").open


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_rows_ask_for_the_shared_memory_that_the_locked_kernels_use(backend: str) -> None:
    root = Path(__file__).resolve().parents[2] / "locks" / backend
    for row in gates.rows(backend):
        used = []
        for path in (root / f"{arch}.json" for arch in row.archs):
            if path.exists():
                lock = json.loads(path.read_text())
                entries = lock["entries"] if backend == "cuda" else lock["cases"]
                used += [
                    e["shared"] + e["dynamic"] if backend == "cuda" else e["shared_bytes"] for e in entries.values()
                ]
        if used:
            assert max(used) <= row.shared_memory < 2 * max(used)


HIDDEN = """
import sys
sys.path.insert(0, sys.argv[2])
from prebuilt_process import NoCompiler
sys.meta_path.insert(0, NoCompiler())
import importlib
try:
    importlib.import_module("cuda.core")
    raise SystemExit("cuda.core is not hidden")
except ModuleNotFoundError:
    pass
from fused_kda import api, build, gates, kernel_counts
gates.architecture = lambda device: "sm_80"
from fused_kda.kernels import driver
from fused_kda.kernels.cuda import launch
from fused_kda.kernels.cuda.shape import REGISTERS
launch.load = lambda code, *_: code
spec = build.specialization(1)
assert not gates.rows("cuda", "sm_80")[0].launch_reasons()
assert "NVRTC cannot be loaded" in gates.rows("cuda", "sm_80")[0].compile_reason()
print(len(launch.loaded_kernel(spec, REGISTERS, False, "sm_80", 0)), kernel_counts())
"""


def test_nothing_of_nvrtc_is_imported(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    use(monkeypatch, built)
    command = [sys.executable, "-c", HIDDEN, "-", str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    size = cubin(built).stat().st_size
    assert done.stdout.split("\n")[0] == f"{size} {{'prebuilt': 1, 'cache': 0, 'compiled': 0}}"


# ---- Triton's kernels through the driver.


def norm_build() -> jit.Build:
    return chain._norm(SPEC, chain.SHAPE)


def parameter_sizes(code: bytes, tmp_path: Path) -> tuple[int, ...]:
    """Sizes of a kernel's parameters in order, as its machine code states them."""
    tool = cuobjdump()
    assert tool is not None
    (tmp_path / "kernel.cubin").write_bytes(code)
    text = subprocess.run([tool, "-elf", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    found = {
        int(m[1], 16): int(m[2], 16) for m in re.finditer(r"Ordinal : (\w+)\s+Offset  : \w+\s+Size    : (\w+)", text)
    }
    return tuple(found[place] for place in sorted(found))


class Prepared:
    """Stands for :class:`driver.Prepared`: the buffer as it would be, and what would be launched."""

    def __init__(
        self, configuration: driver.Configuration, loaded: driver.Loaded, numbers: bytes, addresses: int, offsets: Any
    ) -> None:
        self.configuration, self.offsets = configuration, offsets
        self.params = bytearray(8 * addresses) + bytearray(numbers)
        self.streams: list[int] = []

    def launch(self, stream: int) -> None:
        self.streams.append(stream)


def test_a_triton_kernel_gets_its_parameters_in_place(
    monkeypatch: pytest.MonkeyPatch, built: Path, tmp_path: Path
) -> None:
    """From the directory, through the driver: the order and width of every argument as the machine code has them."""
    use(monkeypatch, built, "never")
    one = norm_build()
    made: list[Prepared] = []

    def load(code: bytes, name: str, device: int, shared: int) -> driver.Loaded:
        assert name == "normalise"
        return driver.Loaded(7, parameter_sizes(code, tmp_path))

    def prepare(*arguments: Any) -> Prepared:
        made.append(Prepared(*arguments))
        return made[-1]

    monkeypatch.setattr(driver, "load", load)
    monkeypatch.setattr(driver, "Prepared", prepare)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    problem = draw(replace(DRAW, batch=4)).problem
    numbers = jit.scalars(problem, one.kernel)
    launch = jit.bind(one, ARCH, torch.device("cuda", 0), 4, numbers)
    assert kernel_counts() == {"prebuilt": 1, "cache": 0, "compiled": 0}
    tensors = {name: torch.empty(8) for name, dtype in one.pointers if dtype is not None}
    launch(tensors)
    (prepared,) = made
    assert prepared.streams == [5]
    assert prepared.configuration == driver.Configuration(device=0, grid=4, threads=32, shared=256, dependent=False)
    names = [name for name in one.kernel.arg_names if name not in dict(one.constants)]
    assert len(prepared.offsets) == len(names) + 2
    for name, offset in zip(names, prepared.offsets, strict=False):
        if name in tensors:
            (got,) = struct.unpack_from("<Q", prepared.params, offset)
            assert got == tensors[name].data_ptr(), name
        else:
            (got,) = struct.unpack_from("<f" if name in jit.FLOATS else "<q", prepared.params, offset)
            assert got == pytest.approx(numbers[name], rel=1e-7), name
    for offset in prepared.offsets[-2:]:
        assert struct.unpack_from("<Q", prepared.params, offset) == (0,)


def test_a_kernel_with_other_parameters_goes_to_tritons_own_launcher(
    monkeypatch: pytest.MonkeyPatch, built: Path
) -> None:
    """Such as one by a Triton that adds a third hidden argument: nothing may be passed that is not known."""
    use(monkeypatch, built)
    monkeypatch.setattr(driver, "load", lambda *_: driver.Loaded(7, (8, 8, 8)))
    assert jit._loaded(norm_build(), ARCH, 0) is None
    kernel = jit._triton_loaded(norm_build(), ARCH, 0)
    assert kernel.metadata.name == "normalise"
    key = binaries.identity(jit.recipe(norm_build(), ARCH))
    assert kernel.kernel == (built / f"chain/{ARCH}/{key}.cubin").read_bytes()


def test_an_amd_kernel_of_the_directory_reaches_tritons_loader(monkeypatch: pytest.MonkeyPatch, built: Path) -> None:
    """As far as it goes without the hardware: machine code and metadata, and nothing compiled."""
    use(monkeypatch, built, "never")
    monkeypatch.setattr(jit, "compile_kernel", None)
    kernel = jit._triton_loaded(norm_build(), "gfx942", 0)
    key = binaries.identity(jit.recipe(norm_build(), "gfx942"))
    assert kernel.kernel == (built / f"chain/gfx942/{key}.hsaco").read_bytes()
    assert (kernel.metadata.name, kernel.metadata.target.arch) == ("normalise", "gfx942")
    assert kernel_counts() == {"prebuilt": 1, "cache": 0, "compiled": 0}


def test_line_numbers_are_all_that_a_prebuilt_triton_kernel_lacks(built: Path, tmp_path: Path) -> None:
    key = binaries.identity(jit.recipe(norm_build(), ARCH))
    code = []
    for binary in ((built / f"chain/{ARCH}/{key}.cubin").read_bytes(), jit.compiled(norm_build(), ARCH).kernel):
        (tmp_path / "kernel.cubin").write_bytes(binary)
        listing = [str(cuobjdump()), "-sass", str(tmp_path / "kernel.cubin")]
        text = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        code.append(re.findall(r"/\* 0x[0-9a-f]+ \*/|^\s+/\*[0-9a-f]{4}\*/.*$", text, re.MULTILINE))
    assert code[0]
    assert code[0] == code[1]
