"""Write docs/engines.md from the gates and the adapters: ``python docs/render_engines.py``. A test holds it current."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch

from fused_kda import gates
from fused_kda.engines.table import TABLE, Entry

PAGE = Path(__file__).with_name("engines.md")
SHORT = {torch.bfloat16: "bf16", torch.float32: "fp32"}

TEXT = """\
<!-- Written by docs/render_engines.py from src/fused_kda/gates.py and src/fused_kda/engines/table.py. Edit those. -->
# Engines

An adapter lets an engine run its own KDA decode step through the op. It replaces one step, not the model: prefill,
mixed batches and speculation stay the engine's. Each adapter is importable without its engine and raises nothing
while it registers; a step that it does not take runs the engine's own code, is counted, and its reason is logged once.

* [vLLM](engines-vllm.md): a plug-in that is on when it is installed
* [SGLang](engines-sglang.md): a plug-in that has to be asked for
* [fla and Hugging Face transformers](engines-fla.md): `patch(model)`

To see what happened in a process, and what this machine's gates say to each engine's models:

```python
from fused_kda import engines

print(engines.stats())  # {{(engine, "fused (cuda)" or "refused: reason"): steps}}
print(engines.surfaces)  # what each plug-in changed, where
```

    fused-kda doctor --engine vllm

The op believes the index buffer: a graph that is replayed for fewer rows than it was captured with reads its tail as
well, and a slot that an earlier step left there advances. So the whole buffer has to be rewritten at each step. vLLM
fills the tail with 0 and SGLang with -1, which the adapters take for null rows; fla's adapter makes its indices anew.

## Compatibility

Every number of heads on a rank that a tensor-parallel size can give is meant: {k3} for Kimi-K3,
{linear} for Kimi-Linear. The last column names the backends of one launch, fastest first, by
architecture; an engine is never given a slower one unless it is asked for by name. What has been run on hardware is
said in [gates.md](gates.md).

{table}
"""


def render() -> str:
    """The whole page."""
    archs = sorted({arch for row in gates.TABLE if row.launches == 1 and row.auto for arch in row.archs}, key=_order)
    lines = [
        "| engine | versions | model | how | conv layout | state | backends |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entry in TABLE:
        for layout in entry.layouts:
            cells = [(dtype, _backends(entry, archs, layout, dtype)) for dtype in entry.state_dtypes]
            for answer, group in groupby(cells, key=lambda cell: cell[1]):
                dtypes = ", ".join(SHORT[dtype] for dtype, _ in group)
                row = (entry.engine, entry.versions, entry.model, entry.route or "-", layout, dtypes, answer)
                lines.append(f"| {' | '.join(row)} |")
    heads = {entry.model: ", ".join(map(str, entry.heads)) for entry in TABLE}
    return TEXT.format(table="\n".join(lines), k3=heads["Kimi-K3"], linear=heads["Kimi-Linear"])


def _backends(entry: Entry, archs: list[str], layout: str, dtype: torch.dtype) -> str:
    if entry.refusal:
        return f"none: {entry.refusal}"
    answers = {arch: entry.backends(arch, layout, dtype) for arch in archs}
    parts = []
    for backends, group in groupby(archs, key=answers.__getitem__):
        parts.append(f"{', '.join(group)}: {', '.join(f'`{name}`' for name in backends) or 'none'}")
    return "; ".join(parts)


def _order(arch: str) -> tuple[bool, int, str]:
    """NVIDIA first, by number."""
    number = arch.removeprefix("sm_")
    return (not arch.startswith("sm_"), int(number) if number.isdigit() else 0, arch)


if __name__ == "__main__":
    PAGE.write_text(render())
