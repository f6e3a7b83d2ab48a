"""The decode op's contract: every argument check, on metadata alone, and the problem that the checks leave.

:func:`decode_problem` looks at shapes, strides, dtypes and devices, never at data, and raises before anything is
touched:

* ``TypeError`` for what is not a tensor, has a wrong dtype or lives on another device;
* ``ValueError`` for a wrong shape, stride, layout or range, and for inputs that want a gradient.

Every message reads ``name: expected ..., got ...``. Whether a backend can run a sound problem is not asked here but in
:mod:`fused_kda.gates`.

Symbols: B rows; H heads; D head dim (K = V = D); W conv width; P = H * D. Strides and pitches are in elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .layouts import ConvLayout, LayoutKind, detect_conv_layout

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)
CONV_WIDTHS = (2, 3, 4)
#: Added to the sum of squares of q and of k before the root.
QK_NORM_EPS = 1e-6


class Tensors(NamedTuple):
    """The op's tensors, in the order in which every backend's launch takes them. ``out`` is always given here."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    conv_state: torch.Tensor
    raw_g: torch.Tensor
    raw_beta: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    state_indices: torch.Tensor
    state: torch.Tensor
    out: torch.Tensor
    output_gate: torch.Tensor | None
    norm_weight: torch.Tensor | None
    has_initial_state: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Specialization:
    """What a compiled kernel is specialised on. Batch, slots, pitches, row strides and scalars stay at run time.

    Attributes:
        heads, head_dim, conv_width: H, D, W.
        conv_layout: gives the compile-time channel and tap strides of the conv pool.
        weight_strides: (plane q|k|v, tap, channel) strides of the conv weight.
        dtype: activations (x, raw_g, raw_beta, output_gate, out) and the conv pool.
        weight_dtype, bias_dtype, norm_dtype: of conv weight, conv bias, norm weight; None where there is none. A norm
            dtype means that the gated norm runs.
        param_dtype: of A_log and dt_bias.
        state_dtype: of the recurrent pool.
        index_dtype: of state_indices.
        bounded: True for the gate with a lower bound, False for the softplus gate.
        has_initial_state: whether a mask of rows with a usable old state is given.
        state_alignment, conv_alignment: 16 where every slot of the pool starts at a multiple of 16 bytes, else the
            element size: whether a kernel may use 16-byte loads and stores.
    """

    heads: int
    head_dim: int
    conv_width: int
    conv_layout: ConvLayout
    weight_strides: tuple[int, int, int]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    norm_dtype: torch.dtype | None
    param_dtype: torch.dtype
    state_dtype: torch.dtype
    index_dtype: torch.dtype
    bounded: bool
    has_initial_state: bool
    state_alignment: int
    conv_alignment: int


@dataclass(frozen=True, slots=True)
class DecodeProblem:
    """One sound call: what a kernel is specialised on, and the run-time numbers that its launch passes.

    Attributes:
        spec: the compile-time part.
        device: where every tensor lives.
        batch: B.
        slots: pool size.
        conv_pitch, state_pitch: elements between slots (the dense size where there is one slot).
        x_row, g_row, beta_row, gate_row, out_row: elements between rows (0 where B <= 1 or the tensor is absent).
        index_stride, initial_stride: elements between entries of state_indices and has_initial_state (0 likewise).
        lower_bound: None for the softplus gate.
        norm_eps, scale, null_slot, prefetch: as in the call; scale resolved to D**-0.5 where None.
    """

    spec: Specialization
    device: torch.device
    batch: int
    slots: int
    conv_pitch: int
    state_pitch: int
    x_row: int
    g_row: int
    beta_row: int
    gate_row: int
    out_row: int
    index_stride: int
    initial_stride: int
    lower_bound: float | None
    norm_eps: float
    scale: float
    null_slot: int
    prefetch: bool

    @property
    def layout(self) -> LayoutKind:
        return self.spec.conv_layout.kind

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state that one step reads, and as many that it writes, if every row is live."""
        return self.batch * self.spec.heads * self.spec.head_dim**2 * self.spec.state_dtype.itemsize


def decode_problem(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    raw_g: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state_indices: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lower_bound: float | None = None,
    output_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-5,
    scale: float | None = None,
    null_slot: int = 0,
    has_initial_state: torch.Tensor | None = None,
    prefetch: bool = False,
) -> DecodeProblem:
    """Check one call of the op by its metadata. The arguments are those of :func:`fused_kda.fused_kda_decode`.

    Returns:
        The problem, with strides of size-1 dimensions made canonical.

    Raises:
        TypeError, ValueError: as the module says. Nothing is allocated, read or written.
    """
    given = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "conv_state": conv_state,
        "raw_g": raw_g,
        "raw_beta": raw_beta,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "state_indices": state_indices,
        "state": state,
        "out": out,
        "output_gate": output_gate,
        "norm_weight": norm_weight,
        "has_initial_state": has_initial_state,
    }
    _check_kinds(given)
    _check_types(x, given)
    if A_log.dtype != dt_bias.dtype:
        raise TypeError(f"dt_bias: expected dtype {_name(A_log.dtype)} (A_log's), got {_name(dt_bias.dtype)}")
    if torch.is_grad_enabled():
        _check_gradients(given)
    _check_scalars(lower_bound, norm_eps, scale, null_slot, prefetch)
    if (output_gate is None) != (norm_weight is None):
        missing, present = ("output_gate", "norm_weight") if output_gate is None else ("norm_weight", "output_gate")
        raise ValueError(f"{missing}: expected a tensor because {present} is given (both or neither), got None")

    # The pool of states is the anchor: it alone names H and D without ambiguity.
    if state.ndim != 4 or state.shape[2] != state.shape[3] or 0 in state.shape[1:]:
        raise ValueError(f"state: expected shape [slots, H, D, D], got {list(state.shape)}")
    slots, heads, dim, _ = state.shape
    inner = heads * dim
    if x.ndim != 2 or x.shape[1] != 3 * inner:
        raise ValueError(f"x: expected shape [B, {3 * inner}] (3 * H * D with H={heads}, D={dim}), got {list(x.shape)}")
    batch = x.shape[0]
    x_row = _row_stride("x", x, batch, (3 * inner,))

    width, weight_strides = _weight_geometry(weight, heads, dim)
    if bias is not None:
        _check_vector("bias", bias, 3 * inner)
    layout, conv_pitch = _conv_geometry(conv_state, slots, inner, width)
    state_pitch = _state_pitch(state, slots, heads, dim)

    g_row = _row_stride("raw_g", raw_g, batch, (heads, dim))
    beta_row = _row_stride("raw_beta", raw_beta, batch, (heads,))
    _check_vector("A_log", A_log, heads)
    _check_vector("dt_bias", dt_bias, inner)
    index_stride = _index_stride("state_indices", state_indices, batch)
    out_row = _row_stride("out", out, batch, (heads, dim)) if out is not None else (inner if batch > 1 else 0)
    if out is not None and batch > 1 and out_row < inner:
        raise ValueError(f"out: expected rows that do not overlap (row stride >= {inner}), got row stride {out_row}")
    gate_row = _row_stride("output_gate", output_gate, batch, (heads, dim)) if output_gate is not None else 0
    if norm_weight is not None:
        _check_vector("norm_weight", norm_weight, dim)
    initial_stride = 0
    if has_initial_state is not None:
        initial_stride = _index_stride("has_initial_state", has_initial_state, batch)

    spec = Specialization(
        heads=heads,
        head_dim=dim,
        conv_width=width,
        conv_layout=layout,
        weight_strides=weight_strides,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        norm_dtype=None if norm_weight is None else norm_weight.dtype,
        param_dtype=A_log.dtype,
        state_dtype=state.dtype,
        index_dtype=state_indices.dtype,
        bounded=lower_bound is not None,
        has_initial_state=has_initial_state is not None,
        state_alignment=_alignment(state, state_pitch),
        conv_alignment=_alignment(conv_state, conv_pitch),
    )
    return DecodeProblem(
        spec=spec,
        device=x.device,
        batch=batch,
        slots=slots,
        conv_pitch=conv_pitch,
        state_pitch=state_pitch,
        x_row=x_row,
        g_row=g_row,
        beta_row=beta_row,
        gate_row=gate_row,
        out_row=out_row,
        index_stride=index_stride,
        initial_stride=initial_stride,
        lower_bound=None if lower_bound is None else float(lower_bound),
        norm_eps=float(norm_eps),
        scale=dim**-0.5 if scale is None else float(scale),
        null_slot=int(null_slot),
        prefetch=prefetch,
    )


_OPTIONAL = frozenset({"bias", "out", "output_gate", "norm_weight", "has_initial_state"})
_LIKE_X = ("conv_state", "raw_g", "raw_beta", "out", "output_gate")


def _check_kinds(given: dict[str, torch.Tensor | None]) -> None:
    """Each argument a dense tensor, or None where it may be left out."""
    for name, tensor in given.items():
        if tensor is None and name in _OPTIONAL:
            continue
        if not isinstance(tensor, torch.Tensor):
            wanted = "a tensor or None" if name in _OPTIONAL else "a tensor"
            raise TypeError(f"{name}: expected {wanted}, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense (strided) tensor, got {tensor.layout}")


def _check_types(x: torch.Tensor, given: dict[str, torch.Tensor | None]) -> None:
    """Each tensor of a dtype that goes with x's, and on x's device."""
    allowed: dict[str, tuple[torch.dtype, ...]] = {"x": ACTIVATION_DTYPES}
    if x.dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"x: expected dtype {_names(ACTIVATION_DTYPES)}, got {_name(x.dtype)}")
    wide = (torch.float64,) if x.dtype == torch.float64 else ()
    params = (torch.float32, torch.bfloat16, *((x.dtype,) if x.dtype not in (torch.float32, torch.bfloat16) else ()))
    allowed.update(dict.fromkeys(_LIKE_X, (x.dtype,)))
    allowed.update({"weight": params, "bias": params, "norm_weight": params})
    allowed.update({"A_log": (torch.float32, *wide), "dt_bias": (torch.float32, *wide)})
    allowed.update({"state": (torch.float32, torch.bfloat16, *wide)})
    allowed.update({"state_indices": INDEX_DTYPES, "has_initial_state": (torch.bool,)})
    for name, tensor in given.items():
        if tensor is None:
            continue
        if tensor.dtype not in allowed[name]:
            like = " (x's)" if name in _LIKE_X else ""
            raise TypeError(f"{name}: expected dtype {_names(allowed[name])}{like}, got {_name(tensor.dtype)}")
        if tensor.device != x.device:
            raise TypeError(f"{name}: expected device {x.device} (x's), got {tensor.device}")


def _check_gradients(given: dict[str, torch.Tensor | None]) -> None:
    for name, tensor in given.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor without requires_grad (the op has no backward; "
                "call it under torch.no_grad() or detach), got requires_grad=True"
            )


def _check_scalars(
    lower_bound: float | None, norm_eps: float, scale: float | None, null_slot: int, prefetch: bool
) -> None:
    for name, value in (("lower_bound", lower_bound), ("norm_eps", norm_eps), ("scale", scale)):
        if value is None and name != "norm_eps":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
        if not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound: expected a negative number, got {lower_bound}")
    if norm_eps < 0:
        raise ValueError(f"norm_eps: expected a number >= 0, got {norm_eps}")
    if isinstance(null_slot, bool) or not isinstance(null_slot, int):
        raise TypeError(f"null_slot: expected an int, got {type(null_slot).__name__}")
    if not -1 <= null_slot < 2**31:
        raise ValueError(f"null_slot: expected -1 (slot 0 is live) or more, below 2**31, got {null_slot}")
    if not isinstance(prefetch, bool):
        raise TypeError(f"prefetch: expected a bool, got {type(prefetch).__name__}")


def _weight_geometry(weight: torch.Tensor, heads: int, dim: int) -> tuple[int, tuple[int, int, int]]:
    """Conv width and the (plane, tap, channel) strides of either weight form."""
    inner = heads * dim
    shape, stride = tuple(weight.shape), weight.stride()
    if len(shape) == 3 and shape[0] == 3 and shape[2] == inner and shape[1] in CONV_WIDTHS:
        return shape[1], (stride[0], stride[1], stride[2])
    checkpoint = (len(shape) == 3 and shape[1] == 1) or len(shape) == 2
    if checkpoint and shape[0] == 3 * inner and shape[-1] in CONV_WIDTHS:
        return shape[-1], (inner * stride[0], stride[-1], stride[0])
    raise ValueError(
        f"weight: expected shape [3, W, {inner}], [{3 * inner}, W] or [{3 * inner}, 1, W] with W in {CONV_WIDTHS}, "
        f"got {list(shape)}"
    )


def _conv_geometry(conv_state: torch.Tensor, slots: int, inner: int, width: int) -> tuple[ConvLayout, int]:
    """Layout and slot pitch of the conv pool."""
    shape, stride = tuple(conv_state.shape), conv_state.stride()
    if shape != (slots, 3 * inner, width - 1):
        raise ValueError(
            f"conv_state: expected shape [{slots}, {3 * inner}, {width - 1}] "
            f"(slots of state, 3 * H * D, W - 1), got {list(shape)}"
        )
    layout = detect_conv_layout(shape, stride)
    if layout is None:
        raise ValueError(
            f"conv_state: expected strides (pitch, 1, {3 * inner}) for SD or (pitch, taps, 1) with taps >= {width - 1} "
            f"for DS, got {stride}"
        )
    span = layout.span(width - 1)
    if slots <= 1:
        return layout, span
    if stride[0] < span:
        raise ValueError(f"conv_state: expected a slot pitch >= {span} (slots must not overlap), got {stride[0]}")
    return layout, stride[0]


def _state_pitch(state: torch.Tensor, slots: int, heads: int, dim: int) -> int:
    stride = state.stride()
    dense = heads * dim * dim
    wanted = (dim * dim, dim, 1)
    if any(size > 1 and got != want for size, got, want in zip(state.shape[1:], stride[1:], wanted, strict=True)):
        raise ValueError(f"state: expected strides (pitch, {dim * dim}, {dim}, 1), each slot dense, got {stride}")
    if slots <= 1:
        return dense
    if stride[0] < dense:
        raise ValueError(f"state: expected a slot pitch >= {dense} (slots must not overlap), got {stride[0]}")
    return stride[0]


def _row_stride(name: str, tensor: torch.Tensor, batch: int, inner: tuple[int, ...]) -> int:
    """Row stride of a ``[B, *inner]``, ``[1, B, *inner]`` or (two inner sizes) flat ``[B, prod(inner)]`` tensor.

    Inside a row the elements must be dense; strides of size-1 dimensions mean nothing and are not looked at.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    flat = (batch, math.prod(inner))
    if shape == (1, batch, *inner):
        shape, stride = shape[1:], stride[1:]
    elif shape == flat:
        inner = (flat[1],)
    elif shape != (batch, *inner):
        forms = [f"[1, {batch}, {', '.join(map(str, inner))}]"] if name != "x" else []
        forms += [f"[{batch}, {', '.join(map(str, inner))}]"]
        forms += [f"[{batch}, {flat[1]}]"] if len(inner) > 1 else []
        raise ValueError(f"{name}: expected shape {' or '.join(forms)}, got {list(tensor.shape)}")
    dense = 1
    for size, step in zip(reversed(inner), reversed(stride[1:]), strict=True):
        if size > 1 and step != dense and batch > 0:
            raise ValueError(
                f"{name}: expected dense rows (last stride 1, any row stride), got strides {tensor.stride()} "
                f"for shape {list(tensor.shape)}"
            )
        dense *= size
    return stride[0] if batch > 1 else 0


def _index_stride(name: str, tensor: torch.Tensor, batch: int) -> int:
    shape, stride = tuple(tensor.shape), tensor.stride()
    if shape not in ((batch,), (batch, 1)) or (name == "has_initial_state" and shape != (batch,)):
        forms = f"[{batch}]" if name == "has_initial_state" else f"[{batch}] or [{batch}, 1]"
        raise ValueError(f"{name}: expected shape {forms}, got {list(shape)}")
    return stride[0] if batch > 1 else 0


def _alignment(pool: torch.Tensor, pitch: int) -> int:
    aligned = pool.data_ptr() % 16 == 0 and (pool.shape[0] <= 1 or pitch * pool.itemsize % 16 == 0)
    return 16 if aligned else pool.itemsize


def _check_vector(name: str, tensor: torch.Tensor, count: int) -> None:
    if tensor.numel() != count:
        raise ValueError(f"{name}: expected {count} elements, got shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(_name(dtype) for dtype in dtypes)
