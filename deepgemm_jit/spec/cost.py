"""What a GEMM costs with each tile: a model of an H200 whose constants are fitted to ``bench/results/tiles.json``.

Three times overlap, and count as the root of the sum of their squares: what the persistent blocks compute (waves of tiles), what
they read through the L2 cache, and what is read from memory. Fitted to 149 dense, contiguous (aligned to 128 rows) and masked
problems, each timed with every tile and split; ``bench/tiles.py judge`` tells how far its choices are from the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from deepgemm_jit.spec.kernel import BF16_GEMM, FP8_GEMM, FP8_GEMM_SWAP_AB, N_MAJOR, ROW_SCALES, KernelSpec
from deepgemm_jit.spec.kernel_set import BLOCK_K_BYTES, blocks_per_sm, kernel_set

# Of the tile (block_m, block_n, cluster): ns per k-block, and ns per tile beside its k-blocks.
# The BF16 and row-scale tiles are estimates from the FP8 ones, not fitted yet.
_COSTS: dict[tuple[str, tuple[str, ...]], dict[tuple[int, int, int], tuple[int, int]]] = {
    (FP8_GEMM, ()): {
        (64, 16, 1): (97, 310),
        (64, 32, 1): (104, 242),
        (64, 64, 1): (124, 346),
        (64, 128, 1): (163, 496),
        (128, 64, 1): (190, 540),
        (128, 128, 1): (299, 726),
        (128, 128, 2): (326, 804),
        (128, 192, 1): (485, 977),
        (256, 128, 2): (669, 1499),
    },
    (FP8_GEMM_SWAP_AB, ()): {
        (16, 64, 1): (87, 596),
        (32, 64, 1): (105, 858),
        (48, 64, 1): (123, 1120),
    },
    (FP8_GEMM, (ROW_SCALES,)): {(64, 128, 1): (220, 480), (128, 128, 1): (420, 770)},
    (BF16_GEMM, ()): {(64, 128, 1): (168, 480), (128, 128, 1): (290, 770), (128, 256, 1): (560, 1400)},
    (BF16_GEMM, (N_MAJOR,)): {(64, 128, 1): (168, 480), (128, 128, 1): (290, 770), (128, 256, 1): (560, 1400)},
}

_SPLITS = {FP8_GEMM_SWAP_AB: (1, 2, 4)}
"""Blocks of a cluster that may share the k-blocks of a tile; of other families none do."""

_SPLIT_NS = {1: 0, 2: 1060, 4: 1135}
"""Partial sums that cross a cluster."""

_SHARED_SM = 0.791
"""Time of two blocks that share an SM over that of one after the other."""

_L2_BYTES_PER_NS = 19300
_MEMORY_BYTES_PER_NS = 4050

_CLUSTER_MEMORY = 1.07
"""Time to read B where the blocks of a cluster share A, over that where each block waits for its own tiles only."""

_LEAST_K_BLOCKS = 4
"""Of one part of a split K: fewer are not worth the exchange."""


class Option(NamedTuple):
    """A kernel and a split of K, with what the model knows of them."""

    spec: KernelSpec
    split_k: int
    block_m: int
    columns: int
    """Of D that a cluster computes at a time."""
    blocks: int
    """Of a cluster."""
    per_sm: int
    """Blocks that share an SM."""
    k_block_ns: int
    tile_ns: int

    def is_worth(self, k_blocks: int) -> bool:
        """Return whether each part of a split K is worth its while."""
        return self.split_k == 1 or k_blocks >= self.split_k * _LEAST_K_BLOCKS

    def load(self, work: Work, rows: int) -> Load:
        """Return what a problem with ``rows`` rows, of each group if the layout is masked, costs whatever the SM count."""
        tiles = -(-rows // self.block_m) * -(-work.n // self.columns) * work.stacked
        wave_ns = -(-work.k_blocks // self.split_k) * self.k_block_ns + self.tile_ns
        cached = tiles * work.k_blocks * (self.block_m + self.columns) * (BLOCK_K_BYTES / _L2_BYTES_PER_NS)
        memory = work.memory_ns if self.spec.cluster == 1 else work.memory_ns * _CLUSTER_MEMORY
        return Load(tiles, self.blocks, self.per_sm, wave_ns, cached * cached + memory * memory, _SPLIT_NS[self.split_k])


class Load(NamedTuple):
    """An option on a problem of given rows."""

    tiles: int
    blocks: int
    """Of the cluster that takes a tile."""
    per_sm: int
    wave_ns: int
    moved_ns_squared: float
    """Of reads through L2 and of memory."""
    split_ns: int

    def costs_ns(self, sms_counts: Iterable[int], whole: bool) -> list[float]:
        """Return the time on each count of SMs, all there are or not; infinity if not even one cluster fits them."""
        per_sm = self.per_sm if whole else 1
        costs = []
        for sms in sms_counts:
            clusters = sms * per_sm // self.blocks
            if not clusters:
                costs.append(math.inf)
                continue
            waves = float(-(-self.tiles // clusters))
            if per_sm == 2:  # two at a time, unless one per SM is all there is
                waves = 1.0 if self.tiles * self.blocks <= sms else waves * 2 * _SHARED_SM
            computed = waves * self.wave_ns
            costs.append(math.sqrt(computed * computed + self.moved_ns_squared) + self.split_ns)
        return costs


class Work(NamedTuple):
    """What the cost of a problem depends on beside its rows."""

    n: int
    k_blocks: int
    stacked: int
    """Groups that each have the rows, 1 unless masked."""
    memory_ns: float
    """To read B once."""

    @classmethod
    def of(cls, n: int, k_bytes: int, groups: int, *, masked: bool) -> Work:
        """Return the work of ``groups`` matrices B of ``n`` rows of ``k_bytes`` bytes."""
        return cls(n, -(-k_bytes // BLOCK_K_BYTES), groups if masked else 1, n * k_bytes * groups / _MEMORY_BYTES_PER_NS)


@cache
def options(arch: str, families: tuple[str, ...], flags: tuple[str, ...]) -> tuple[Option, ...]:
    """Return every kernel of some families with these flags, and every split of K, for a model of their costs."""
    found = []
    for spec in kernel_set(arch):
        if spec.family in families and spec.flags == flags:
            block_m, block_n, _block_k = spec.block
            costs = _COSTS[spec.family, spec.flags][block_m, block_n, spec.cluster]
            for split_k in _SPLITS.get(spec.family, (1,)):
                columns, blocks = block_n * spec.cluster, spec.cluster * split_k
                found.append(Option(spec, split_k, block_m, columns, blocks, blocks_per_sm(spec), *costs))
    return tuple(found)
