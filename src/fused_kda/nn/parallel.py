"""Tensor parallelism by head over a ``torch.distributed`` group: gloo on CPUs, NCCL on GPUs.

A rank has its heads' rows of q, k, v, b, f_b and g (or g_b), of the convolutions, A_log and dt_bias, and its heads'
columns of o_proj, whose products are summed over the ranks. f_a, g_a and the norm's weight are on every rank, and so is
everything outside the KDA layer. Each rank's pool holds its heads alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This process's place among the ranks that share a model.

    Attributes:
        size: ranks.
        rank: of this process, 0 to size - 1.
        group: the ranks' process group; None is the default one.
    """

    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> TensorParallel:
        """The place in an initialised process group."""
        return cls(dist.get_world_size(group), dist.get_rank(group), group)


class RowParallelLinear(nn.Linear):
    """A linear layer whose input features are spread over ranks: each multiplies its own, the products are summed.

    Every rank returns the same bits. For inference only.

    Args:
        in_features: of this rank.
        out_features: of the whole layer.
        parallel: the ranks.
        dtype, device: of the weight ``[out_features, in_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parallel: TensorParallel,
        *,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype, device=device)
        self.parallel = parallel

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., in_features]`` of this rank to ``[..., out_features]``, summed over all ranks.

        Raises:
            NotImplementedError: gradients are asked for.
        """
        out: torch.Tensor = super().forward(input)
        if out.requires_grad:
            raise NotImplementedError("o_proj: a tensor-parallel layer is for inference; call it under torch.no_grad()")
        dist.all_reduce(out, group=self.parallel.group)
        return out
