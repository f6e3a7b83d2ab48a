"""Write docs/gates.md from ``fused_kda.gates``: ``python docs/render_gates.py``. A test holds the page current."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from fused_kda.gates import SWITCHES, TABLE, Row

PAGE = Path(__file__).with_name("gates.md")
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}

TEXT = """\
<!-- Written by docs/render_gates.py from src/fused_kda/gates.py. Edit those. -->
# Gates: who can run a call

A call of `fused_kda_decode` is checked against the contract first. Then each backend has a gate, from the fastest to
the slowest, and the first one that is open takes the call. `backend="..."` asks for one by name and raises
`NotImplementedError`, with the reasons, where its gate is closed.

To see the gates of a call, with the reason for every one that is closed:

```python
import torch
from fused_kda import explain

rows, heads, dim, width, slots = 2, 4, 128, 4, 8
bf16 = torch.bfloat16
print(
    explain(
        x=torch.zeros(rows, 3 * heads * dim, dtype=bf16),
        weight=torch.zeros(3, width, heads * dim),
        bias=None,
        conv_state=torch.zeros(slots, 3 * heads * dim, width - 1, dtype=bf16),
        raw_g=torch.zeros(rows, heads, dim, dtype=bf16),
        raw_beta=torch.zeros(rows, heads, dtype=bf16),
        A_log=torch.zeros(heads),
        dt_bias=torch.zeros(heads * dim),
        state_indices=torch.arange(1, rows + 1, dtype=torch.int32),
        state=torch.zeros(slots, heads, dim, dim),
    )
)
```

`fused-kda doctor` prints the same for this machine as a whole.

Where `auto` passes over a faster backend that has rows for the device's architecture, the first such call warns once
(`FallbackWarning`), naming the closed gates and why; in strict mode it raises instead. `stats()` counts calls by
backend and reason. `warmup(...)`, with a layer or with calls, chooses, and compiles or loads, ahead of the first step
or of a graph capture; `kernel_counts()` then shows that serving compiles nothing ([Deploying](deploying.md)).

A gate also answers for the machine: whether its modules are installed, whether the device has the shared memory that a
program may need, and whether the kernels can be had: compiled here, or held by a prebuilt directory.

## Support

One line per row of the table; a backend may have several. "any" is any value that the contract allows.

{support}

## Environment switches

Read once, at the first call.

{switches}
"""


def render() -> str:
    """The whole page."""
    support = _table(
        (
            "backend",
            "devices",
            "launches",
            "D",
            "W",
            "conv layout",
            "activations",
            "state",
            "conv weight",
            "conv bias",
            "norm weight",
            "slots aligned to",
            "shared memory",
            "needs",
            "compiled",
            "chosen by `auto`",
            "note",
        ),
        map(_row, TABLE),
    )
    switches = _table(
        ("variable", "values", "default", "meaning"),
        ((f"`{s.variable}`", s.values, f"`{s.default}`" if s.default else "unset", s.meaning) for s in SWITCHES),
    )
    return TEXT.format(support=support, switches=switches)


def _row(row: Row) -> tuple[str, ...]:
    return (
        f"`{row.backend}`",
        ", ".join("any" if arch == "*" else arch for arch in row.archs),
        str(row.launches) if row.launches else "-",
        _values(row.head_dims),
        _values(row.conv_widths),
        _values(row.layouts),
        _values(row.dtypes),
        _values(row.state_dtypes),
        _values(row.weight_dtypes),
        _values(row.bias_dtypes),
        _values(row.norm_dtypes),
        f"{row.state_alignment} bytes" if row.state_alignment > 1 else "any",
        f"{row.shared_memory / 1024:g} KiB" if row.shared_memory else "-",
        ", ".join(f"`{module}`" for module in row.modules) or "-",
        "yes" if row.compiler is not None else "no",
        "yes" if row.auto else "no",
        row.note or "-",
    )


def _values(values: Iterable[object] | None) -> str:
    if values is None:
        return "any"
    return ", ".join(SHORT[value] if isinstance(value, torch.dtype) else str(value) for value in values)


def _table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *map(list, body)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(render())
