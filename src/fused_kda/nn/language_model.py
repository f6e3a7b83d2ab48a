"""A small character-level language model of KDA layers: pre-norm, gated MLP, tied embedding.

The residual stream and the logits are fp32; layers run in the model's dtype (bfloat16 unless asked otherwise), so the
op gets what served models give it. Training keeps fp32 parameters and runs the model's ``forward`` under autocast.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from ..layouts import LayoutKind
from ..pool import StatePool
from .checkpoint import CheckpointError, Entry, entry_tensors, layer_entries, load_entries, read_tensors
from .kda import KimiDeltaAttention
from .parallel import TensorParallel

#: Character of every token; a line break ends a question, and ends its solution.
VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
END = "\n"
SHIPPED = "word_problems.safetensors"

_TOKENS = {character: token for token, character in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    """Tokens of a text.

    Raises:
        ValueError: a character is not in the vocabulary (printable ASCII and the line break).
    """
    strange = sorted(set(text) - _TOKENS.keys())
    if strange:
        raise ValueError(f"text: expected printable ASCII, got {', '.join(map(repr, strange))}")
    return [_TOKENS[character] for character in text]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model; the defaults are those of the shipped one. Kimi-K3's kind of gates."""

    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 2
    head_dim: int = 128
    conv_width: int = 4
    mlp_size: int = 512
    lower_bound: float | None = -5.0
    full_rank_gate: bool = True
    norm_eps: float = 1e-5


class Block(nn.Module):
    """Norm, KDA, add; norm, gated MLP, add."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str | None,
        parallel: TensorParallel | None,
    ) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.mlp_size
        self.mixer_norm = nn.RMSNorm(hidden, config.norm_eps, device=device)
        self.mixer = KimiDeltaAttention(
            hidden,
            config.num_heads,
            config.head_dim,
            config.conv_width,
            lower_bound=config.lower_bound,
            full_rank_gate=config.full_rank_gate,
            norm_eps=config.norm_eps,
            dtype=dtype,
            device=device,
            parallel=parallel,
        )
        self.mlp_norm = nn.RMSNorm(hidden, config.norm_eps, device=device)
        self.gate_up = nn.Linear(hidden, 2 * wide, bias=False, dtype=dtype, device=device)
        self.down = nn.Linear(wide, hidden, bias=False, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The residual stream ``[B, T, C]`` (fp32) after the block, from zero state. Differentiable."""
        hidden = hidden + self.mixer(self.mixer_input(hidden))
        return hidden + self.mlp(hidden)

    def mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., C]`` fp32 to ``[..., C]`` in the layer's dtype."""
        gate, up = self.gate_up(self.mlp_norm(hidden).to(self.gate_up.weight.dtype)).chunk(2, -1)
        out: torch.Tensor = self.down(functional.silu(gate) * up)
        return out

    def mixer_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., C]`` fp32 to what the KDA layer takes."""
        normed: torch.Tensor = self.mixer_norm(hidden)
        return normed.to(self.gate_up.weight.dtype)

    def entries(self, prefix: str) -> dict[str, Entry]:
        """Tensors of the block by the names that Hugging Face checkpoints give them."""
        hidden, wide = self.down.weight.shape
        gate_up = self.gate_up.weight.detach()
        return {
            f"{prefix}input_layernorm.weight": Entry(self.mixer_norm.weight.detach(), ((hidden,),)),
            **layer_entries(self.mixer, f"{prefix}self_attn."),
            f"{prefix}post_attention_layernorm.weight": Entry(self.mlp_norm.weight.detach(), ((hidden,),)),
            f"{prefix}mlp.gate_proj.weight": Entry(gate_up[:wide], ((wide, hidden),)),
            f"{prefix}mlp.up_proj.weight": Entry(gate_up[wide:], ((wide, hidden),)),
            f"{prefix}mlp.down_proj.weight": Entry(self.down.weight.detach(), ((hidden, wide),)),
        }


class LanguageModel(nn.Module):
    """The model.

    Args:
        config: its sizes.
        dtype: of the projections and the op's activations: bfloat16, or float32.
        device: where the parameters are made.
        parallel: the ranks that share the KDA layers' heads, see :mod:`fused_kda.nn.parallel`; all else is on every
            rank, and every rank computes the same logits.

    Symbols below: B rows, T tokens, V = ``len(VOCABULARY)``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        parallel: TensorParallel | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embedding = nn.Parameter(torch.empty(len(VOCABULARY), config.hidden_size, device=device))
        nn.init.normal_(self.embedding, std=config.hidden_size**-0.5)
        self.blocks = nn.ModuleList(Block(config, dtype, device, parallel) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps, device=device)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.embedding.device

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, V]`` (fp32) of the token after each of ``tokens [B, T]`` (int64). Differentiable."""
        hidden = functional.embedding(tokens, self.embedding)
        for block in self._blocks():
            hidden = block(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            return self._logits(hidden)

    @torch.inference_mode()
    def prefill(
        self, tokens: torch.Tensor, pool: StatePool, slots: Sequence[int], *, lengths: Sequence[int]
    ) -> torch.Tensor:
        """Run prompts from zero state and leave their windows and states in the pool.

        Args:
            tokens: ``[sum(lengths)]`` int64, the prompts one after the other.
            pool: **mutated** in the named slots, in every layer.
            slots: each prompt's slot.
            lengths: tokens of each prompt, >= 1.

        Returns:
            Logits ``[len(lengths), V]`` of the token after each prompt.
        """
        hidden = functional.embedding(tokens, self.embedding)
        for index, block in enumerate(self._blocks()):
            mixed = block.mixer.prefill(block.mixer_input(hidden), pool.layer(index), slots, lengths=lengths)
            hidden = hidden + mixed
            hidden = hidden + block.mlp(hidden)
        ends = torch.tensor(lengths, device=tokens.device).cumsum(0) - 1
        return self._logits(hidden[ends])

    @torch.inference_mode()
    def decode(
        self, tokens: torch.Tensor, pool: StatePool, state_indices: torch.Tensor, *, backend: str = "auto"
    ) -> torch.Tensor:
        """Advance a batch of sequences by one token.

        Args:
            tokens: ``[B]`` int64, the newest token of each row.
            pool: **mutated** in the named slots, in every layer.
            state_indices: ``[B]`` int32 or int64, each row's slot.
            backend: of :func:`fused_kda.fused_kda_decode`.

        Returns:
            Logits ``[B, V]`` of the next token.
        """
        hidden = functional.embedding(tokens, self.embedding)
        for index, block in enumerate(self._blocks()):
            hidden = hidden + block.mixer.decode(
                block.mixer_input(hidden), pool.layer(index), state_indices, backend=backend
            )
            hidden = hidden + block.mlp(hidden)
        return self._logits(hidden)

    def new_pool(self, slots: int, *, layout: LayoutKind = "SD", state_dtype: torch.dtype = torch.float32) -> StatePool:
        """A pool for ``slots`` sequences of this model (one more slot is reserved)."""
        config = self.config
        return StatePool(
            config.num_layers,
            slots + 1,
            self._blocks()[0].mixer.num_heads,
            config.head_dim,
            config.conv_width,
            layout=layout,
            conv_dtype=self.dtype,
            state_dtype=state_dtype,
            device=self.device,
        )

    def entries(self) -> dict[str, Entry]:
        """Every tensor of the model by its name in the checkpoint."""
        entries = {"model.embed_tokens.weight": Entry(self.embedding.detach(), (tuple(self.embedding.shape),))}
        for index, block in enumerate(self._blocks()):
            entries |= block.entries(f"model.layers.{index}.")
        entries["model.norm.weight"] = Entry(self.norm.weight.detach(), (tuple(self.norm.weight.shape),))
        return entries

    def _blocks(self) -> list[Block]:
        return list(self.blocks)  # type: ignore[arg-type]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.norm(hidden), self.embedding)


def save_model(model: LanguageModel, path: Path, notes: dict[str, str] | None = None) -> None:
    """Write a model as bf16 safetensors with its configuration.

    Args:
        model: in any dtype; what the layer keeps in fp32 (A_log, dt_bias, conv and norm weights) is written as fp32.
        path: the file.
        notes: further metadata: how it was trained.
    """
    kept = ("A_log", "dt_bias", "norm.weight", "conv1d.weight", "layernorm.weight")
    tensors = {
        name: tensor.cpu() if name.endswith(kept) else tensor.to(torch.bfloat16).cpu()
        for name, tensor in entry_tensors(model.entries()).items()
    }
    save_file(tensors, path, metadata={"config": json.dumps(asdict(model.config)), **(notes or {})})


def read_model(
    path: Path | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    parallel: TensorParallel | None = None,
) -> LanguageModel:
    """Read a model that :func:`save_model` wrote, or one rank's part of it; None is the shipped one.

    Raises:
        CheckpointError: the file has no configuration, or its tensors do not fit it.
    """
    if path is None:
        with as_file(files(__package__).joinpath(SHIPPED)) as shipped:
            return read_model(shipped, dtype=dtype, device=device, parallel=parallel)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if "config" not in metadata:
        raise CheckpointError(f"{path.name}: expected the model's configuration in its metadata, found none")
    model = LanguageModel(ModelConfig(**json.loads(metadata["config"])), dtype=dtype, device=device, parallel=parallel)
    load_entries(model.entries(), read_tensors([path]))
    return model.eval().requires_grad_(False)
