"""Calls that are refused: every argument wrong in every way, the exact text, and proof that nothing was touched."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fused_kda import explain, fused_kda_decode, warmup
from fused_kda.contract import Tensors
from fused_kda.gates import BACKENDS
from fused_kda.testing.problems import Call, Draw, draw

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# B = 3, H = 2, D = 8, so P = 16; W = 4; six slots.
BASE = Draw(head_dim=8, bias_dtype=FP32, mask=True, guard=4)
OPTIONAL = ("bias", "out", "output_gate", "norm_weight", "has_initial_state")

Change = Callable[[Any], Any]
INVALID: list[tuple[type[Exception], str, dict[str, Change]]] = []


def invalid(error: type[Exception], text: str, **changes: Change) -> None:
    """A call that differs from the base in ``changes`` must raise ``error`` with exactly this text."""
    INVALID.append((error, text, changes))


def to(dtype: torch.dtype) -> Change:
    return lambda tensor: tensor.to(dtype)


def put(value: Any) -> Change:
    return lambda old: value


def zeros(*shape: int) -> Change:
    """Zeros of another shape, in the old tensor's dtype."""
    return lambda old: old.new_zeros(shape)


def strided(*strides: int) -> Change:
    """Zeros of the old shape with other strides."""

    def change(old: torch.Tensor) -> torch.Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(old.shape, strides, strict=True))
        return torch.as_strided(old.new_zeros(size), old.shape, strides)

    return change


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a buffer."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


# Not a tensor at all, or not a dense one.
for name in Tensors._fields:
    if name in OPTIONAL:
        invalid(TypeError, f"{name}: expected a tensor or None, got float", **{name: put(1.0)})
    else:
        invalid(TypeError, f"{name}: expected a tensor, got NoneType", **{name: put(None)})
        invalid(TypeError, f"{name}: expected a tensor, got list", **{name: put([1.0])})
for name in ("x", "state", "norm_weight"):
    invalid(
        TypeError,
        f"{name}: expected a dense (strided) tensor, got torch.sparse_coo",
        **{name: lambda tensor: tensor.to_sparse()},
    )

# Another device.
for name in Tensors._fields:
    if name != "x":
        invalid(
            TypeError,
            f"{name}: expected device cpu (x's), got meta",
            **{name: lambda tensor: torch.empty_like(tensor, device="meta")},
        )

# Dtypes.
for wrong in ("int32", "float8_e4m3fn", "complex64"):
    invalid(
        TypeError,
        f"x: expected dtype bfloat16 or float16 or float32 or float64, got {wrong}",
        x=to(getattr(torch, wrong)),
    )
invalid(TypeError, "conv_state: expected dtype float32 (x's), got bfloat16", x=to(FP32))
for name in ("conv_state", "raw_g", "raw_beta", "out", "output_gate"):
    for wrong in ("float32", "float16"):
        invalid(
            TypeError,
            f"{name}: expected dtype bfloat16 (x's), got {wrong}",
            **{name: to(getattr(torch, wrong))},
        )
invalid(
    TypeError,
    "conv_state: expected dtype bfloat16 (x's), got int16",
    conv_state=lambda pool: pool.view(torch.int16),
)
for name in ("weight", "bias", "norm_weight", "state"):
    for wrong in ("float16", "float64"):
        invalid(
            TypeError,
            f"{name}: expected dtype float32 or bfloat16, got {wrong}",
            **{name: to(getattr(torch, wrong))},
        )
for name in ("A_log", "dt_bias"):
    for wrong in ("bfloat16", "float64"):
        invalid(TypeError, f"{name}: expected dtype float32, got {wrong}", **{name: to(getattr(torch, wrong))})
for wrong in ("int16", "uint8", "float32", "bool"):
    invalid(
        TypeError,
        f"state_indices: expected dtype int32 or int64, got {wrong}",
        state_indices=to(getattr(torch, wrong)),
    )
invalid(TypeError, "has_initial_state: expected dtype bool, got uint8", has_initial_state=to(torch.uint8))

# Gradients.
for name in ("x", "weight", "bias", "conv_state", "raw_g", "A_log", "state", "norm_weight"):
    invalid(
        ValueError,
        f"{name}: expected a tensor without requires_grad (the op has no backward; call it under torch.no_grad() or "
        "detach), got requires_grad=True",
        **{name: lambda tensor: tensor.detach().requires_grad_()},
    )

# Scalars.
for value in (0.0, -0.0, 5.0, 1):
    invalid(ValueError, f"lower_bound: expected a negative number, got {value}", lower_bound=put(value))
for name in ("lower_bound", "norm_eps", "scale"):
    for value in (math.nan, math.inf, -math.inf):
        invalid(ValueError, f"{name}: expected a finite number, got {value}", **{name: put(value)})
    for value in (True, "1", [1.0], {}, torch.tensor(-1.0)):
        invalid(TypeError, f"{name}: expected a number, got {type(value).__name__}", **{name: put(value)})
invalid(TypeError, "norm_eps: expected a number, got NoneType", norm_eps=put(None))
invalid(ValueError, "norm_eps: expected a number >= 0, got -1e-06", norm_eps=put(-1e-6))
for value in (-2, -(2**31), 2**31):
    invalid(
        ValueError,
        f"null_slot: expected -1 (slot 0 is live) or more, below 2**31, got {value}",
        null_slot=put(value),
    )
for value in (0.0, True, None, "0"):
    invalid(TypeError, f"null_slot: expected an int, got {type(value).__name__}", null_slot=put(value))
for value in (2, None, "yes"):
    invalid(TypeError, f"prefetch: expected a bool, got {type(value).__name__}", prefetch=put(value))
for value in (3, None, ["reference"]):
    invalid(TypeError, f"backend: expected a string, got {type(value).__name__}", backend=put(value))
invalid(
    ValueError,
    "output_gate: expected a tensor because norm_weight is given (both or neither), got None",
    output_gate=put(None),
)
invalid(
    ValueError,
    "norm_weight: expected a tensor because output_gate is given (both or neither), got None",
    norm_weight=put(None),
)

# The recurrent pool, which names H and D, and x.
for shape in ((6, 16, 8), (6, 2, 8, 4), (6, 0, 8, 8), (6, 2, 0, 0)):
    invalid(ValueError, f"state: expected shape [slots, H, D, D], got {list(shape)}", state=zeros(*shape))
for strides in ((200, 64, 1, 8), (200, 80, 8, 1), (200, 80, 10, 1), (400, 128, 16, 2)):
    invalid(
        ValueError,
        f"state: expected strides (pitch, 64, 8, 1), each slot dense, got {strides}",
        state=strided(*strides),
    )
for pitch in (127, 0):
    invalid(
        ValueError,
        f"state: expected a slot pitch >= 128 (slots must not overlap), got {pitch}",
        state=strided(pitch, 64, 8, 1),
    )
invalid(ValueError, "x: expected shape [B, 72] (3 * H * D with H=3, D=8), got [3, 48]", state=zeros(6, 3, 8, 8))
for shape in ((144,), (1, 3, 48), (3, 47), (3, 16)):
    invalid(ValueError, f"x: expected shape [B, 48] (3 * H * D with H=2, D=8), got {list(shape)}", x=zeros(*shape))
invalid(
    ValueError,
    "x: expected dense rows (last stride 1, any row stride), got strides (96, 2) for shape [3, 48]",
    x=spread,
)

# Convolution: weight, bias, pool.
for shape in ((4, 3, 16), (192,), (3, 5, 16), (48, 1), (48, 1, 1), (48, 5), (3, 4, 8), (48, 2, 4), (16, 4)):
    invalid(
        ValueError,
        "weight: expected shape [3, W, 16], [48, W] or [48, 1, W] with W in (2, 3, 4), " + f"got {list(shape)}",
        weight=zeros(*shape),
    )
invalid(ValueError, "bias: expected 48 elements, got shape [47]", bias=zeros(47))
invalid(ValueError, "bias: expected a contiguous tensor, got strides (2,)", bias=spread)
for shape in ((6, 3, 48), (6, 48, 4), (5, 48, 3), (7, 48, 3), (6, 144), (6, 48, 2)):
    invalid(
        ValueError,
        f"conv_state: expected shape [6, 48, 3] (slots of state, 3 * H * D, W - 1), got {list(shape)}",
        conv_state=zeros(*shape),
    )
invalid(
    ValueError,
    "conv_state: expected shape [6, 48, 2] (slots of state, 3 * H * D, W - 1), got [6, 48, 3]",
    weight=zeros(3, 3, 16),
)
for strides in ((300, 2, 96), (300, 2, 1), (300, 1, 50), (300, 3, 2), (300, 0, 1), (300, 1, 1), (300, 1, 0)):
    invalid(
        ValueError,
        f"conv_state: expected strides (pitch, 1, 48) for SD or (pitch, taps, 1) with taps >= 3 for DS, got {strides}",
        conv_state=strided(*strides),
    )
for pitch, inner in ((143, (1, 48)), (143, (3, 1)), (0, (3, 1))):
    invalid(
        ValueError,
        f"conv_state: expected a slot pitch >= 144 (slots must not overlap), got {pitch}",
        conv_state=strided(pitch, *inner),
    )

# Row inputs, out and the per-channel vectors.
for name in ("raw_g", "output_gate", "out"):
    for shape in ((1, 4, 2, 8), (3, 8, 2), (4, 16), (2, 3, 2, 8), (1, 1, 3, 2, 8), (48,)):
        invalid(
            ValueError,
            f"{name}: expected shape [1, 3, 2, 8] or [3, 2, 8] or [3, 16], got {list(shape)}",
            **{name: zeros(*shape)},
        )
for name in ("output_gate", "out"):
    for strides in ((32, 16, 2), (60, 20, 1)):
        invalid(
            ValueError,
            f"{name}: expected dense rows (last stride 1, any row stride), got strides {strides} for shape [3, 2, 8]",
            **{name: strided(*strides)},
        )
invalid(
    ValueError,
    "raw_g: expected dense rows (last stride 1, any row stride), got strides (96, 32, 16, 2) for shape [1, 3, 2, 8]",
    raw_g=spread,
)
for stride in (15, 0):
    invalid(
        ValueError,
        f"out: expected rows that do not overlap (row stride >= 16), got row stride {stride}",
        out=strided(stride, 8, 1),
    )
for shape in ((6,), (3, 2, 1), (1, 4, 2), (3, 1)):
    invalid(ValueError, f"raw_beta: expected shape [1, 3, 2] or [3, 2], got {list(shape)}", raw_beta=zeros(*shape))
invalid(
    ValueError,
    "raw_beta: expected dense rows (last stride 1, any row stride), got strides (1, 3) for shape [3, 2]",
    raw_beta=strided(1, 3),
)
invalid(ValueError, "A_log: expected 2 elements, got shape [128]", A_log=zeros(128))
invalid(ValueError, "A_log: expected a contiguous tensor, got strides (2,)", A_log=spread)
invalid(ValueError, "dt_bias: expected 16 elements, got shape [8]", dt_bias=zeros(8))
invalid(
    ValueError,
    "dt_bias: expected a contiguous tensor, got strides (1, 8)",
    dt_bias=lambda bias: bias.view(2, 8).t(),
)
invalid(ValueError, "norm_weight: expected 8 elements, got shape [2, 8]", norm_weight=zeros(2, 8))
invalid(ValueError, "norm_weight: expected a contiguous tensor, got strides (2,)", norm_weight=spread)

# Indices and mask.
for shape in ((), (3, 2), (1, 3), (2,), (4,), (3, 1, 1)):
    text = f"state_indices: expected shape [3] or [3, 1], got {list(shape)}"
    invalid(ValueError, text, state_indices=zeros(*shape))
for shape in ((), (2,), (3, 1)):
    invalid(ValueError, f"has_initial_state: expected shape [3], got {list(shape)}", has_initial_state=zeros(*shape))


# What the tables above leave of "each argument, wrong in each way".
for name in ("x", "weight", "bias", "A_log", "dt_bias", "norm_weight", "has_initial_state", "out"):
    invalid(
        TypeError, f"{name}: expected a tensor{' or None' if name in OPTIONAL else ''}, got str", **{name: put("x")}
    )
for name, count in (("bias", 48), ("A_log", 2), ("dt_bias", 16), ("norm_weight", 8)):
    for shape in ((), (0,), (count + 1,), (count, 2)):
        invalid(ValueError, f"{name}: expected {count} elements, got shape {list(shape)}", **{name: zeros(*shape)})
for name in ("weight", "conv_state", "out"):
    invalid(
        TypeError,
        f"{name}: expected a dense (strided) tensor, got torch.sparse_coo",
        **{name: lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).to_sparse()},
    )
for name in ("bias", "norm_weight", "weight"):
    invalid(TypeError, f"{name}: expected dtype float32 or bfloat16, got int8", **{name: to(torch.int8)})
invalid(TypeError, "has_initial_state: expected dtype bool, got int64", has_initial_state=to(torch.int64))
invalid(ValueError, "x: expected shape [B, 48] (3 * H * D with H=2, D=8), got []", x=zeros())
invalid(ValueError, "raw_beta: expected shape [1, 3, 2] or [3, 2], got [4, 2]", raw_beta=zeros(4, 2))
invalid(ValueError, "raw_beta: expected shape [1, 3, 2] or [3, 2], got []", raw_beta=zeros())
invalid(
    ValueError,
    "weight: expected shape [3, W, 16], [48, W] or [48, 1, W] with W in (2, 3, 4), got [3, 4, 2, 8]",
    weight=zeros(3, 4, 2, 8),
)
for value in (-math.inf, -5.0 - 1e308 * 10):
    invalid(ValueError, f"scale: expected a finite number, got {value}", scale=put(value))
for value in ("", "Reference", "gpu"):
    invalid(ValueError, f"backend: expected auto or one of {', '.join(BACKENDS)}, got {value!r}", backend=put(value))


def way(text: str) -> str:
    """In which way the argument of a message is wrong."""
    wanted, _, got = text.partition(": expected ")[2].rpartition(", got ")
    if got == "NoneType" or wanted.startswith("a tensor because"):
        return "None"
    if wanted.startswith(("a tensor", "a dense")):
        return "gradient" if "requires_grad" in wanted else "sparse" if "dense" in wanted else "not a tensor"
    for word in ("dtype", "device"):
        if wanted.startswith(word):
            return word
    if re.search(r"stride|dense rows|contiguous|pitch|overlap", wanted):
        return "stride"
    if "shape" in wanted or "elements" in wanted:
        return "size"
    if got in ("nan", "inf", "-inf"):
        return got
    return "type" if re.match(r"(a number|an int|a bool|a string)$", wanted) else "range"


#: Ways in which an argument cannot be wrong, since every such value is sound.
SOUND = {
    ("x", "device"): "every other argument is compared with x",
    ("weight", "stride"): "weights are read with whatever strides they have",
    ("state_indices", "stride"): "indices are read with any stride",
    ("has_initial_state", "stride"): "the mask is read with any stride",
    ("bias", "None"): "no bias",
    ("out", "None"): "the op allocates",
    ("has_initial_state", "None"): "all rows have a state",
    ("lower_bound", "None"): "the softplus gate",
    ("scale", "None"): "D ** -0.5",
    ("scale", "range"): "any finite factor",
}


def test_each_argument_is_wrong_in_each_way() -> None:
    found = {(next(iter(changes)), way(text)) for _, text, changes in INVALID}
    tensors = ("not a tensor", "None", "dtype", "device", "size", "stride")
    numbers = ("None", "type", "nan", "inf", "-inf", "range")
    wanted = {(name, how) for name in Tensors._fields for how in tensors}
    wanted |= {(name, how) for name in ("lower_bound", "norm_eps", "scale") for how in numbers}
    wanted |= {("null_slot", "type"), ("null_slot", "range"), ("prefetch", "type")}
    wanted |= {("backend", "type"), ("backend", "range")}
    assert wanted - found == set(SOUND)
    assert len({(text, next(iter(changes))) for _, text, changes in INVALID}) >= 120


def test_every_text_has_the_agreed_form() -> None:
    for _, text, changes in INVALID:
        assert re.fullmatch(r"(\w+): expected .+, got .+", text, re.DOTALL), text
        assert len(changes) == 1


def refused(call: Call, error: type[Exception], text: str, changes: dict[str, Change]) -> None:
    """The changed call raises exactly this from every entrance, and no byte under any of its tensors changes."""
    for name, change in changes.items():
        call.arguments[name] = change(call.arguments.get(name))
    before = {name: buffer(value).clone() for name, value in call.arguments.items() if has_buffer(value)}
    for function in (fused_kda_decode, lambda **arguments: warmup(arguments), explain):
        with pytest.raises(error, match=f"^{re.escape(text)}$") as caught:
            function(**call.arguments)
        assert type(caught.value) is error
    for name, value in before.items():
        assert torch.equal(value, buffer(call.arguments[name])), name


def has_buffer(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.device.type != "meta"


def buffer(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory under a tensor, whatever it shows of them."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


@pytest.mark.parametrize(
    ("error", "text", "changes"), INVALID, ids=[f"{number}-{'-'.join(case[2])}" for number, case in enumerate(INVALID)]
)
def test_an_unsound_call_is_named_and_touches_nothing(
    error: type[Exception], text: str, changes: dict[str, Change]
) -> None:
    call = draw(BASE)
    call.clone().run("auto")  # a sound call before it must not open the door to an unsound one
    refused(call, error, text, changes)


@pytest.mark.gpu
def test_the_same_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    sound = draw(BASE, device)
    sound.clone().run("reference")
    for error, text, changes in INVALID:
        refused(sound.clone(), error, text.replace("expected device cpu", f"expected device {device}"), changes)
    for name in Tensors._fields:
        if name != "x":
            text = f"{name}: expected device {device} (x's), got cpu"
            refused(sound.clone(), TypeError, text, {name: lambda tensor: tensor.cpu()})
