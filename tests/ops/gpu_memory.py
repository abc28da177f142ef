"""Free memory of torch's allocator, filled with a pattern: what reads it unwritten gets NaN, what writes it unowned is seen."""

from __future__ import annotations

import torch

PATTERN = 0xFF
"""Every byte: NaN in E4M3, bfloat16 and float32, -1 in integers."""
_EXTRA_BYTES = 48 << 20


def occupy_free_memory() -> list[torch.Tensor]:
    """Take all blocks that the allocator would hand out on the current stream, and one more, filled with the pattern."""
    stream = torch.cuda.current_stream().cuda_stream
    sizes = [
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == stream and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == "inactive"
    ]
    sizes.append(_EXTRA_BYTES)
    # From the largest: each request then finds the block of just its size.
    return [torch.full((size,), PATTERN, dtype=torch.uint8, device="cuda") for size in sorted(sizes, reverse=True)]


def poison_free_memory() -> None:
    """Fill what the next ``torch.empty`` calls on the current stream will return."""
    held = occupy_free_memory()
    del held
    probe = torch.empty(_EXTRA_BYTES, dtype=torch.uint8, device="cuda")
    assert bool((probe == PATTERN).all()), "the allocator gave memory that was not poisoned"


def assert_untouched(held: list[torch.Tensor]) -> None:
    """Fail if anything was written to memory that :func:`occupy_free_memory` took."""
    for block in held:
        assert bool((block == PATTERN).all()), f"memory of nobody's was written, in a block of {block.numel()} bytes"
