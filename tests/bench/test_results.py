"""Results files: what they say about where they come from, how they are named, and that they survive being read."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from fused_kda.bench import results

CPU = torch.device("cpu")


def test_a_document_names_machine_versions_code_and_command(tmp_path: Path) -> None:
    result = results.document("bench", "fused-kda bench", CPU, cells=[{"heads": 1}, {"heads": 2}], replays=3)
    assert result["machine"]["architecture"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__
    assert result["command"] == "fused-kda bench"
    assert len(result["source"]) == 16
    assert json.loads(results.text(result)) == result
    assert '\n  {"heads": 1},\n  {"heads": 2}\n' in results.text(result)
    assert results.read(results.write(result, tmp_path / "new" / "file.json")) == result


def test_in_a_directory_the_file_is_named_by_machine_date_and_kind(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA H200 (PCIe)", "date": "2026-11-29"}
    written = [results.write({"kind": kind, "machine": machine}, tmp_path).name for kind in ("bench", "model")]
    assert written == ["nvidia-h200-pcie-2026-11-29.json", "nvidia-h200-pcie-2026-11-29-model.json"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"cells": []}', "\x00\xff"])
def test_what_is_no_results_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"other\.json: expected a results file"):
        results.read(path)


def test_the_commit_is_the_checkouts_own_and_says_whether_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", *identity, "-C", str(tmp_path), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert results.commit(package) == "unknown"
    git("init", "-q")
    (tmp_path / "other").write_text("")
    git("add", "other")
    git("commit", "-qm", "one")
    assert results.commit(package) == "unknown"  # a repository around it that does not hold it
    git("add", "package")
    git("commit", "-qm", "two")
    git("tag", "v1")
    head = git("rev-parse", "HEAD")
    assert head.startswith(results.commit(package))
    (package / "__init__.py").write_text("x = 1")
    assert results.commit(package) == f"{head[:12]}-dirty"


def test_the_digest_changes_with_the_code_and_not_with_anything_else(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    first = results.source_digest(tmp_path)
    (tmp_path / "note.md").write_text("1")
    assert results.source_digest(tmp_path) == first
    (tmp_path / "b.cu").write_text("1")
    assert results.source_digest(tmp_path) != first
