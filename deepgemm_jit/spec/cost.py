"""What a GEMM costs with each tile: a model of an H200 whose constants are fitted to measurements.

Three times overlap, and count as a power mean's sum (of squares, or nearer to the largest): what the persistent blocks compute
(waves of tiles), what they read through the L2 cache, and what is read from memory. ``bench/results/tiles.json`` has 149 dense,
contiguous (aligned to 128 rows) and masked problems, ``bench/results/scattered.json`` the GEMMs of experts forwards, each timed
with every tile; ``judge`` of ``bench/tiles.py`` and of ``bench/scattered.py`` tells how far the choices are from the best ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from deepgemm_jit.spec.kernel import (
    BF16_GEMM,
    FP4_GEMM_SWAP_AB,
    FP8_GEMM,
    FP8_GEMM_SWAP_AB,
    N_MAJOR,
    ROW_SCALES,
    SWAPPED,
    KernelSpec,
)
from deepgemm_jit.spec.kernel_set import BLOCK_K_BYTES, blocks_per_sm, kernel_set
from deepgemm_jit.spec.problem import Overlap

# Of the tile (block_m, block_n, cluster): ns per k-block, and ns per tile beside its k-blocks.
# Those of row-scale and FP4 tiles are estimates from the other FP8 ones; BF16 is fitted to bench/results/tiles_bf16.json.
_BF16_COSTS = {
    (64, 64, 1): (150, 59),
    (64, 128, 1): (152, 324),
    (128, 128, 1): (262, 1272),
    (128, 128, 2): (296, 1338),
    (128, 192, 1): (401, 1921),
    (128, 256, 1): (569, 2412),
    (256, 128, 2): (647, 1973),
}
_COSTS: dict[tuple[str, tuple[str, ...]], dict[tuple[int, int, int], tuple[int, int]]] = {
    (FP8_GEMM, ()): {
        (64, 16, 1): (92, 337),
        (64, 32, 1): (104, 242),
        (64, 64, 1): (124, 346),
        (64, 128, 1): (166, 1066),
        (128, 64, 1): (190, 540),
        (128, 128, 1): (299, 726),
        (128, 128, 2): (330, 686),
        (128, 192, 1): (475, 1018),
        (256, 128, 2): (668, 1522),
    },
    (FP8_GEMM_SWAP_AB, ()): {(16, 64, 1): (84, 788), (32, 64, 1): (105, 858)},
    (FP4_GEMM_SWAP_AB, ()): {(16, 128, 1): (150, 600)},
    (FP8_GEMM, (ROW_SCALES,)): {(64, 128, 1): (220, 480), (128, 128, 1): (420, 770)},
    (BF16_GEMM, ()): _BF16_COSTS,
    (BF16_GEMM, (N_MAJOR,)): _BF16_COSTS,
}

_SPLITS = {FP8_GEMM_SWAP_AB: (1, 2, 4)}
"""Blocks of a cluster that may share the k-blocks of a tile; of other families none do."""

_SPLIT_NS = {1: 0, 2: 1060, 4: 1135}
"""Partial sums that cross a cluster."""

_NONE, _START, _WEIGHTS = Overlap  # by name: a member costs more to look up than what it is asked for

_CROWDED_SPLIT = 4
_CROWDED_NS = 1700
"""Clusters of four blocks that fill the SMs, where those of the next launch already wait on them: 16 x 2112 x 7168 takes 8.5 us
for 7.7 without them. That, and the 0.9 us that dependent launch saves elsewhere and not there: a split over two takes 7.5 us for
8.4."""

_EARLY_NS = 800
"""What a tile of few tokens saves that reads its first weights before it waits: 16 x 32768 x 512 takes 6.1 us for 7.0 with a tile
that does not (bench/results/decode.json)."""
_EARLY_COLUMNS = 24576
"""Of D, from which it does: 4096 x 7168 takes 5 % longer with weights that are read early, others of fewer columns are level."""

_SHARED_SM = 0.791
"""Time of two blocks that share an SM over that of one after the other."""


class _Rates(NamedTuple):
    """How fast things go.

    Attributes:
        k_block: factor of the time of a k-block.
        tile: factor of that of a tile.
        l2: bytes per ns through L2.
        memory: bytes per ns.
        cluster: time to read B where the blocks of a cluster share A, over that where each block waits for its own tiles only.
        power: of the mean.
        whole_waves: the last wave takes as long as a full one.
    """

    k_block: float
    tile: float
    l2: float
    memory: float
    cluster: float
    power: float
    whole_waves: bool


_ALONE = _Rates(1.0, 1.0, 19300, 4050, 1.07, 2.0, True)
"""With cold weights, and nothing before or after it."""

_IN_TURN = _Rates(1.31, 0.73, 10600, 4560, 0.91, 3.7, False)
"""Between the steps of an experts forward, which overlap; weights are read as what leaves L2 first."""

SCATTERED_ALIGNMENT = 16
"""Multiples of rows at which groups start whose rows are scattered."""

_UNLIKELY = 1e-3

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
        rates, read_bytes = _ALONE, float(work.b_bytes)
        row_blocks: float = -(-rows // self.block_m)
        if work.scattered:
            hit = min(work.scattered, -(-rows // SCATTERED_ALIGNMENT))
            row_blocks = hit * _row_blocks(rows, hit, self.block_m)
            rates, read_bytes = _IN_TURN, read_bytes * hit / work.scattered
        tiles = row_blocks * -(-work.n // self.columns) * work.stacked
        k_blocks = -(-work.k_blocks // self.split_k)
        wave_ns = k_blocks * self.k_block_ns * rates.k_block + self.tile_ns * rates.tile
        cached_ns = tiles * work.k_blocks * (self.block_m + self.columns) * BLOCK_K_BYTES / rates.l2
        read_ns = read_bytes / rates.memory * (1.0 if self.spec.cluster == 1 else rates.cluster)
        moved = cached_ns**rates.power + read_ns**rates.power
        swapped_once = self.spec.family in SWAPPED and row_blocks == 1 and self.split_k == 1
        early_ns = _EARLY_NS if work.dense and swapped_once and work.n >= _EARLY_COLUMNS else 0
        crowded: tuple[Overlap, ...] = ()
        if self.split_k == _CROWDED_SPLIT and not work.scattered:
            crowded = (_START,) if work.dense else (_START, _WEIGHTS)
        return Load(
            tiles, self.blocks, self.per_sm, wave_ns, moved, rates.power, rates.whole_waves,
            _SPLIT_NS[self.split_k], early_ns, crowded,
        )  # fmt: skip


class Load(NamedTuple):
    """An option on a problem of given rows."""

    tiles: float
    blocks: int
    """Of the cluster that takes a tile."""
    per_sm: int
    wave_ns: float
    moved: float
    """Sum of the powers of the times to read through L2 and from memory."""
    power: float
    whole_waves: bool
    split_ns: int
    early_ns: int
    """Saved where weights are read before a launch waits."""
    crowded: tuple[Overlap, ...]
    """Where clusters of the next launch get in the way: they do not where weights are read early."""

    def is_told_apart(self) -> bool:
        """Return whether it matters how launches overlap."""
        return bool(self.crowded) or self.early_ns > 0

    def costs_ns(self, sms_counts: Sequence[int], whole: bool, overlap: Overlap = _NONE) -> list[float]:
        """Return the time on each count of SMs, all there are or not; infinity if not even one cluster fits them."""
        # Once: a plan asks a hundred thousand times.
        tiles, blocks, per_sm, wave_ns, moved, power, whole_waves, beside_ns, early_ns, crowded = self
        if not whole:
            per_sm = 1
        if overlap is _WEIGHTS:
            beside_ns -= early_ns
        root = 1.0 / power
        costs = []
        for sms in sms_counts:
            clusters = sms * per_sm // blocks
            if not clusters:
                costs.append(math.inf)
                continue
            waves = -(-tiles // clusters) if whole_waves else tiles / clusters if tiles > clusters else 1.0
            if per_sm == 2:  # two at a time, unless one per SM is all there is
                waves = 1.0 if tiles * blocks <= sms else waves * 2 * _SHARED_SM
            costs.append(((waves * wave_ns) ** power + moved) ** root + beside_ns)
        if overlap in crowded:
            used = tiles * blocks
            costs = [cost + _CROWDED_NS if used >= sms else cost for cost, sms in zip(costs, sms_counts, strict=True)]
        return costs


class Work(NamedTuple):
    """What the cost of a problem depends on beside its rows."""

    n: int
    k_blocks: int
    stacked: int
    """Groups that each have the rows, 1 unless masked."""
    b_bytes: int
    scattered: int
    """Groups over which rows are spread as chance will have it, 0 if none are."""
    dense: bool
    """Whether B is a single matrix, which may be constant."""

    @classmethod
    def of(cls, n: int, k_bytes: int, groups: int, *, masked: bool = False, scattered: bool = False, dense: bool = False) -> Work:
        """Return the work of ``groups`` matrices B of ``n`` rows of ``k_bytes`` bytes."""
        k_blocks = -(-k_bytes // BLOCK_K_BYTES)
        return cls(n, k_blocks, groups if masked else 1, n * k_bytes * groups, groups if scattered else 0, dense)


def _row_blocks(rows: int, groups: int, block: int) -> float:
    """Return the row blocks to expect in each of some groups, none empty, that hold ``rows`` rows with their padding.

    Rows come as tokens choose experts: their number has a Poisson distribution, here its normal approximation.
    """
    padded = -(-rows // SCATTERED_ALIGNMENT) * SCATTERED_ALIGNMENT / groups
    mean = padded - (SCATTERED_ALIGNMENT - 1) / 2
    spread = math.sqrt(mean)
    whole = max(int((mean - 4 * spread) / block), 0)  # as good as sure
    found = 1.0 + whole
    while True:
        whole += 1
        more = 0.5 * math.erfc((whole * block + 0.5 - mean) / (spread * math.sqrt(2.0)))
        if more < _UNLIKELY:
            return found
        found += more


def scattered_rows(rows: int, groups: int) -> int:
    """Return the rows, with their padding, to expect in all groups among which ``rows`` rows are scattered."""
    hit = min(rows, groups)
    evenly_padded = rows + round(hit * (SCATTERED_ALIGNMENT - 1) / 2)
    return round(hit * SCATTERED_ALIGNMENT * _row_blocks(evenly_padded, hit, SCATTERED_ALIGNMENT))


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
