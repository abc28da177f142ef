"""One check per operation: every fault of a call is found and reported at once, before anything is built or launched.

Fake tensors (torch.compile, meta) go through the same checks; only what needs an address is left out for them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deepgemm_jit.errors import ContextMismatchError, OperandError
from deepgemm_jit.spec import MAX_EXPERTS, MAX_GROUPS

SCALE_BLOCK = 128
MAX_TOP_K = 16
SIZE_LIMIT = 2**31
"""Coordinates of the copy engine are signed 32-bit numbers."""
_INDEX_DTYPES = (torch.int64, torch.int32)
_ROUTING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_GRID_LIMIT = 65535
_CAST_COLUMNS_PER_BLOCK = 128
_COPY_ALIGNMENT_BYTES = 16
_DTYPE_NAMES = {torch.float8_e4m3fn: "e4m3", torch.bfloat16: "bf16", torch.float32: "f32"}


class GroupData(NamedTuple):
    """The int32 tensor that says which rows belong to which group."""

    name: str
    tensor: torch.Tensor
    per_row: bool
    """One number per row of A, otherwise one per group."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """Return the first multiple of b that is not below a."""
    return ceil_div(a, b) * b


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that specs use for a dtype, or torch's own where they have none."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def check_gemm(
    operation: str,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    groups: GroupData | None = None,
    *,
    masked: bool = False,
    n_major: bool = False,
    alignment: int = SCALE_BLOCK,
    fake: bool = False,
) -> None:
    """Check the operands of ``D = A @ B`` in any layout: FP8 with the scales of A and B, BF16 without.

    Raises:
        OperandError: all that is wrong with dtypes, ranks, shapes, strides, alignment, devices or gradients.
        ContextMismatchError: operands on different CUDA devices.
    """
    faults = Faults(operation, fake)
    dtype, k_step = (torch.bfloat16, 8) if scales is None else (torch.float8_e4m3fn, 16)
    a_rank, b_rank = 3 if masked else 2, 2 if groups is None else 3
    expected = [("a", a, dtype, a_rank), ("b", b, dtype, b_rank), ("out", out, torch.bfloat16, a_rank)]
    if scales is not None:
        expected.insert(1, ("a_scale", scales[0], torch.float32, a_rank))
        expected.insert(3, ("b_scale", scales[1], torch.float32, b_rank))
    if groups is not None:
        expected.append((groups.name, groups.tensor, torch.int32, 1))
    looked_at = [faults.look_at(*what) for what in expected]  # all of them: every fault is wanted
    if not all(looked_at):
        faults.raise_if_any()
    faults.look_at_devices({name: tensor for name, tensor, _, _ in expected})

    m, k = a.shape[-2], a.shape[-1]
    n, group_count = b.shape[-1 if n_major else -2], b.shape[0]
    a_lead, a_words = ((group_count,), "G, M") if masked else ((), "M")
    b_lead, b_words = ((), "") if groups is None else ((group_count,), "G, ")
    sizes_fit = faults.look_at_size("N", n, 8) & faults.look_at_size("K", k, k_step)
    if m >= SIZE_LIMIT:
        faults.add(f"M = {m} must be below 2^31")
    faults.look_at_shape("a", a, (*a_lead, m, k), f"({a_words}, K)")
    faults.look_at_shape("b", b, (*b_lead, k, n) if n_major else (*b_lead, n, k), f"({b_words}{'K, N' if n_major else 'N, K'})")
    faults.look_at_shape("out", out, (*a_lead, m, n), f"({a_words}, N)")
    if scales is not None:
        k_blocks, n_blocks = ceil_div(k, SCALE_BLOCK), ceil_div(n, SCALE_BLOCK)
        b_blocks, words = ((k_blocks, n_blocks), "K / 128), ceil(N") if n_major else ((n_blocks, k_blocks), "N / 128), ceil(K")
        faults.look_at_shape("a_scale", scales[0], (*a_lead, m, k_blocks), f"({a_words}, ceil(K / 128))")
        faults.look_at_shape("b_scale", scales[1], (*b_lead, *b_blocks), f"({b_words}ceil({words} / 128))")
        if scales[1].numel() and scales[1].size(-1) > 1 and scales[1].stride(-1) != 1:
            faults.add(f"b_scale must have its last dimension contiguous, not strides {scales[1].stride()}")
    if groups is not None:
        row_step = 64 if scales is None else 16
        faults.look_at_groups(groups, m if groups.per_row else group_count, group_count, alignment, row_step)
    if sizes_fit:
        faults.look_at_rows("a", a, k_step)
        faults.look_at_rows("b", b, 8 if n_major else k_step)
        if faults.look_at_rows("out", out, 8):
            faults.look_at_output("out", out, groups)
    faults.raise_if_any()


def check_experts(
    hidden: torch.Tensor,
    topk_index: torch.Tensor,
    topk_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    quantized: bool,
    n_major: bool,
    columns_per_column: int | None,
    fake: bool = False,
) -> None:
    """Check all operands of an experts forward, those of its second half too: nothing is launched when one is wrong.

    ``columns_per_column`` of the first GEMM's output make one of the second's input; None: a callback does as it likes.

    Raises:
        OperandError: all that is wrong with dtypes, ranks, shapes, strides, alignment, devices or gradients.
        ContextMismatchError: operands on different CUDA devices.
    """
    faults = Faults("the experts forward", fake)
    weight_dtype, step = (torch.float8_e4m3fn, 16) if quantized else (torch.bfloat16, 8)
    looked_at = [
        faults.look_at("hidden", hidden, torch.bfloat16, 2),
        faults.look_at("topk_index", topk_index, _INDEX_DTYPES, 2),
        faults.look_at("topk_weights", topk_weights, _ROUTING_DTYPES, 2),
        faults.look_at("gate_up weights", up, weight_dtype, 3),
        faults.look_at("down weights", down, weight_dtype, 3),
    ]
    if not all(looked_at):
        faults.raise_if_any()
    faults.look_at_devices(
        {"hidden": hidden, "topk_index": topk_index, "topk_weights": topk_weights, "gate_up weights": up, "down weights": down}
    )
    (tokens, hidden_size), top_k, experts = hidden.shape, topk_index.shape[1], up.shape[0]
    intermediate = down.shape[1 if n_major else 2]
    wide = up.shape[2 if n_major else 1] if columns_per_column is None else columns_per_column * intermediate
    up_k = up.shape[1 if n_major else 2]
    if hidden_size != up_k:
        faults.add(f"hidden has {hidden_size} columns and the gate_up weights take {up_k}")
    if n_major:
        faults.look_at_shape("gate_up weights", up, (experts, up_k, wide), "(E, H, N1)")
        faults.look_at_shape("down weights", down, (experts, intermediate, up_k), "(E, I, H)")
    else:
        faults.look_at_shape("gate_up weights", up, (experts, wide, up_k), "(E, N1, H)")
        faults.look_at_shape("down weights", down, (experts, up_k, intermediate), "(E, H, I)")
    faults.look_at_size("hidden size", hidden_size, step)
    faults.look_at_size("intermediate size", intermediate, step)
    faults.look_at_rows("hidden", hidden, 8)
    faults.look_at_rows("gate_up weights", up, step)
    faults.look_at_rows("down weights", down, step)
    faults.look_at_shape("topk_index", topk_index, (tokens, top_k), "(T, k)")
    faults.look_at_shape("topk_weights", topk_weights, tuple(topk_index.shape), "that of topk_index")
    if not 1 <= top_k <= MAX_TOP_K:
        faults.add(f"topk_index has k = {top_k}, needed: 1 to {MAX_TOP_K}")
    if not 1 <= experts <= MAX_EXPERTS:
        faults.add(f"there are {experts} experts, needed: 1 to {MAX_EXPERTS}")
    faults.raise_if_any()


def check_expert_scales(
    half: str, weight: torch.Tensor, scale: torch.Tensor | None, static: torch.Tensor | None, *, by_rows: bool
) -> None:
    """Check the scales of one half's (E, N, K) weights, as they are after their preparation, and its static activation scales.

    Raises:
        OperandError: all that is wrong with dtypes, ranks, shapes, strides or devices.
        ContextMismatchError: scales on another CUDA device than the weights.
    """
    faults = Faults("the experts forward", fake=False)
    tensors = {f"{half} weights": weight}
    experts, n, k = weight.shape
    if scale is not None and faults.look_at(f"{half} scales", scale, torch.float32, 3):
        tensors[f"{half} scales"] = scale
        rows = n if by_rows else ceil_div(n, SCALE_BLOCK)
        faults.look_at_shape(f"{half} scales", scale, (experts, rows, ceil_div(k, SCALE_BLOCK)), "(E, rows, columns)")
        if not by_rows and not scale.is_contiguous():
            faults.add(f"{half} scales must be contiguous, not of strides {scale.stride()}")
    if static is not None and faults.look_at(f"{half} activation scales", static, torch.float32, 1):
        tensors[f"{half} activation scales"] = static
        faults.look_at_shape(f"{half} activation scales", static, (experts,), "(E,)")
        if not static.is_contiguous():
            faults.add(f"{half} activation scales must be contiguous, not of stride {static.stride()}")
    faults.look_at_devices(tensors)
    faults.raise_if_any()


def check_cast(operation: str, x: Any, *, fake: bool = False) -> None:
    """Check the input of the per-token cast: (M, K) bfloat16 or float32, K a multiple of 16.

    Raises:
        OperandError: all that is wrong with it.
    """
    faults = Faults(operation, fake)
    dtype = torch.float32 if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else torch.bfloat16
    if not faults.look_at("x", x, dtype, 2):
        faults.raise_if_any()
    faults.look_at_devices({"x": x})
    if x.shape[1] > _GRID_LIMIT * _CAST_COLUMNS_PER_BLOCK:
        faults.add(f"K = {x.shape[1]} must be at most {_GRID_LIMIT * _CAST_COLUMNS_PER_BLOCK}")
    if faults.look_at_size("K", x.shape[1], 16):
        faults.look_at_rows("x", x, _COPY_ALIGNMENT_BYTES // x.element_size())
    faults.raise_if_any()


def check_scales(operation: str, scales: Any, *, fake: bool = False) -> None:
    """Check A scales: (M, K blocks) or (G, M, K blocks) float32, any strides with contiguous rows.

    Raises:
        OperandError: all that is wrong with them.
    """
    faults = Faults(operation, fake)
    rank = 3 if isinstance(scales, torch.Tensor) and scales.dim() == 3 else 2
    if not faults.look_at("scales", scales, torch.float32, rank):
        faults.raise_if_any()
    faults.look_at_devices({"scales": scales})
    if rank == 3 and scales.shape[0] > _GRID_LIMIT:
        faults.add(f"scales of {scales.shape[0]} groups are too many: at most {_GRID_LIMIT}")
    faults.raise_if_any()


class Faults:
    """Collects the faults of one call."""

    def __init__(self, operation: str, fake: bool) -> None:
        self._operation = operation
        self._fake = fake
        self._faults: list[str] = []

    def add(self, fault: str) -> None:
        """Note a fault."""
        self._faults.append(fault)

    def raise_if_any(self) -> None:
        """Raise one OperandError with all of them."""
        if self._faults:
            raise OperandError(operation=self._operation, faults=self._faults)

    def look_at(self, name: str, value: Any, dtype: torch.dtype | tuple[torch.dtype, ...], rank: int) -> bool:
        """Note a wrong type, dtype or rank, a gradient, memory that is gone; return whether sizes can be looked at."""
        if not isinstance(value, torch.Tensor):
            self.add(f"{name} must be a tensor, not {type(value).__name__}")
            return False
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if value.dtype not in dtypes:
            self.add(f"{name} must be {' or '.join(map(str, dtypes))}, not {value.dtype}")
        if value.requires_grad and torch.is_grad_enabled():
            self.add(f"{name} requires grad, and this operation has no backward; call it under torch.no_grad() or detach {name}")
        if value.dim() != rank:
            self.add(f"{name} must have {rank} dimensions, not shape {tuple(value.shape)}")
            return False
        # A trace has no storages to ask.
        if value.is_cuda and value.numel() and not torch.compiler.is_compiling() and not value.untyped_storage().nbytes():
            self.add(f"{name} has no memory: its storage was freed")
        return True

    def look_at_devices(self, tensors: dict[str, torch.Tensor]) -> None:
        """Note tensors off the GPU; refuse at once those on different GPUs."""
        elsewhere = {} if self._fake else {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cuda"}
        for name, tensor in elsewhere.items():
            self.add(f"{name} must be on a CUDA device, not {tensor.device}")
        if elsewhere:
            self.raise_if_any()
        # Also in a shape-only run: one meta tensor among real ones makes torch take that way, and nothing would be written.
        first_name, first = next(iter(tensors.items()))
        for name, tensor in tensors.items():
            if tensor.device != first.device:
                raise ContextMismatchError(
                    what=f"{name} of {self._operation}",
                    belongs_to=str(tensor.device),
                    used_in=f"a call whose {first_name} is on {first.device}",
                )

    def look_at_size(self, name: str, size: int, step: int) -> bool:
        """Note a size that is no positive multiple of ``step``, with the nearest ones that are."""
        if size >= SIZE_LIMIT:
            self.add(f"{name} = {size} must be below 2^31")
            return False
        if size >= step and size % step == 0:
            return True
        lower = size // step * step
        self.add(f"{name} = {size} must be a multiple of {step}; nearest: {f'{lower} or {lower + step}' if lower > 0 else step}")
        return False

    def look_at_shape(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], meaning: str) -> None:
        """Note a shape other than ``shape``, which ``meaning`` spells."""
        if tuple(tensor.shape) != shape:
            self.add(f"{name} must have shape {meaning} = {shape}, not {tuple(tensor.shape)}")

    def look_at_groups(self, groups: GroupData, size: int, count: int, alignment: int, row_step: int) -> None:
        """Note group data of another size or stride, too many groups to count, and alignments that no tile divides."""
        self.look_at_shape(groups.name, groups.tensor, (size,), "(M,)" if groups.per_row else "(G,)")
        if groups.tensor.numel() > 1 and groups.tensor.stride(0) != 1:
            self.add(f"{groups.name} must be contiguous, not of stride {groups.tensor.stride(0)}")
        if not row_step <= alignment < SIZE_LIMIT or alignment % row_step:
            self.add(f"alignment = {alignment} must be a multiple of {row_step} below 2^31, 128 by default")
        if count > MAX_GROUPS and not groups.per_row:
            self.add(f"{count} groups are too many to count: at most {MAX_GROUPS}, or a row index, which has no limit")

    def look_at_rows(self, name: str, tensor: torch.Tensor, multiple: int) -> bool:
        """Note rows that are not contiguous or do not start at multiples of 16 bytes, which are ``multiple`` elements.

        Return whether the strides are fine.

        Strides of dimensions of size 1 mean nothing and are not looked at.
        """
        if tensor.numel() == 0:
            return True
        if not self._fake and tensor.data_ptr() % _COPY_ALIGNMENT_BYTES:
            self.add(f"{name} must start at a multiple of {_COPY_ALIGNMENT_BYTES} bytes; copy the slice to a tensor of its own")
        strides = tensor.stride()
        if tensor.size(-1) > 1 and strides[-1] != 1:
            self.add(f"{name} must have its last dimension contiguous, not strides {strides}")
        elif any(tensor.size(d) > 1 and (strides[d] <= 0 or strides[d] % multiple) for d in range(tensor.dim() - 1)):
            self.add(f"{name} must have strides that are positive multiples of {multiple}, not {strides}")
        else:
            return True
        return False

    def look_at_output(self, name: str, out: torch.Tensor, groups: GroupData | None) -> None:
        """Note an output that writes over itself, or over the group data that every block still reads."""
        if out.numel() == 0:
            return
        span = 1
        for dimension in sorted(range(out.dim()), key=out.stride):
            if out.size(dimension) > 1:
                if out.stride(dimension) < span:
                    self.add(f"{name} must not overlap itself: shape {tuple(out.shape)} with strides {out.stride()}")
                    return
                span += (out.size(dimension) - 1) * out.stride(dimension)
        if groups is None or self._fake:
            return
        begin, end = out.data_ptr(), out.data_ptr() + span * out.element_size()
        if begin < groups.tensor.data_ptr() + 4 * groups.tensor.numel() and groups.tensor.data_ptr() < end:
            self.add(f"{name} must not overlap {groups.name}")


def whole_number(operation: str, name: str, value: object) -> int:
    """Return ``value`` if it is a whole number.

    Raises:
        OperandError: it is something else.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise OperandError(operation=operation, faults=[f"{name} must be a whole number, not {value!r}"])
    return value  # type: ignore[return-value]


def require_tensors(operation: str, **named: object) -> None:
    """Refuse what is no tensor before torch's dispatcher does, in words of its own.

    Raises:
        OperandError: all that are none.
    """
    faults = [
        f"{name} must be a tensor, not {type(value).__name__}"
        for name, value in named.items()
        if not isinstance(value, torch.Tensor)
    ]
    if faults:
        raise OperandError(operation=operation, faults=faults)
