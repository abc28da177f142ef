// Which rows belong to which group, and in which order blocks take output tiles. All of it is decided at run time.
#pragma once
#include "dj/types.cuh"

namespace dj {

// Values of deepgemm_jit.spec.Layout.
constexpr uint32_t kDense = 0;       // one group
constexpr uint32_t kContiguous = 1;  // group_data[row] = group of the row, negative: none
constexpr uint32_t kPrefixSums = 2;  // group_data[group] = end row; a group starts at the next multiple of the alignment
constexpr uint32_t kMasked = 3;      // group_data[group] = rows used of the group's own m rows

constexpr uint32_t kMaxGroups = 1024;  // spec.kernel_set.MAX_GROUPS

struct Shape {
    const int32_t* group_data;
    uint32_t m;  // rows of A, of one group when masked
    uint32_t n;
    uint32_t groups;
    uint32_t layout;
    uint32_t alignment;

    // Whether groups are counted from device data before the first tile.
    __device__ bool counts_rows() const { return layout >= kPrefixSums; }
};

struct Rows {
    uint32_t begin;
    uint32_t end;
};

// Rows of a group, clamped to the tensor: what the caller's device data says can be wrong, but never reach outside.
__device__ inline Rows rows_of_group(const Shape& shape, uint32_t group) {
    if (shape.layout == kMasked) {
        const int32_t count = __ldg(shape.group_data + group);
        return {0, count <= 0 ? 0 : min_of(static_cast<uint32_t>(count), shape.m)};
    }
    const int32_t last = group == 0 ? 0 : max(__ldg(shape.group_data + group - 1), 0);
    const int32_t end = max(__ldg(shape.group_data + group), 0);
    const uint32_t begin = ceil_div(static_cast<uint32_t>(last), shape.alignment) * shape.alignment;
    const uint32_t clamped = min_of(static_cast<uint32_t>(end), shape.m);
    return {begin, begin < clamped ? clamped : begin};
}

// One output tile: rows [row, row_end) are written, columns start at `column`.
struct Tile {
    uint32_t group;    // of B and its scales
    uint32_t a_group;  // of A, its scales and D: 0 unless masked
    uint32_t row;
    uint32_t row_end;
    uint32_t column;
};

// Blocks walk the tiles with the stride of the grid. Tiles go down a band of rows first and then to the next column, so that the
// blocks at work together share both operands in L2.
template <uint32_t kBlockM, uint32_t kBlockN>
class TileScheduler {
   public:
    // `group_starts` (shared memory, groups + 1 entries) holds the row blocks before each group; used by the layouts that count.
    __device__ TileScheduler(const Shape& shape, const uint32_t* group_starts)
        : shape_(shape), group_starts_(group_starts), columns_(ceil_div(shape.n, kBlockN)), next_(blockIdx.x) {
        row_blocks_ = shape.counts_rows() ? group_starts[shape.groups] : ceil_div(shape.m, kBlockM);
    }

    __device__ bool next(Tile& tile) {
        while (next_ < row_blocks_ * columns_) {
            const uint32_t index = next_;
            next_ += gridDim.x;
            if (shape_.counts_rows() ? counted(index, tile) : listed(index, tile)) return true;
        }
        return false;
    }

    // Fills `group_starts` with one warp.
    __device__ static void count(const Shape& shape, uint32_t* group_starts) {
        uint32_t before = 0;
        for (uint32_t first = 0; first < shape.groups; first += kWarp) {
            const uint32_t group = first + lane_id();
            uint32_t blocks = 0;
            if (group < shape.groups) {
                const Rows rows = rows_of_group(shape, group);
                blocks = ceil_div(rows.end - rows.begin, kBlockM);
            }
            uint32_t sum = blocks;
#pragma unroll
            for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
                if (lane_id() >= distance) sum += other;
            }
            if (group < shape.groups) group_starts[group] = before + sum - blocks;
            before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
        }
        if (lane_id() == 0) group_starts[shape.groups] = before;
    }

   private:
    static constexpr uint32_t kBand = 16;

    // Places tile `index` of a rectangle of row blocks x columns.
    __device__ void place(uint32_t index, uint32_t row_blocks, uint32_t& row_block, uint32_t& column_block) const {
        const uint32_t band = index / (kBand * columns_);
        const uint32_t within = index - band * kBand * columns_;
        const uint32_t height = min_of(kBand, row_blocks - band * kBand);
        column_block = within / height;
        row_block = band * kBand + within - column_block * height;
    }

    __device__ bool listed(uint32_t index, Tile& tile) const {
        uint32_t row_block, column_block;
        place(index, row_blocks_, row_block, column_block);
        tile.row = row_block * kBlockM;
        tile.row_end = shape_.m;
        tile.column = column_block * kBlockN;
        tile.a_group = 0;
        tile.group = 0;
        if (shape_.layout == kContiguous) tile.group = static_cast<uint32_t>(__ldg(shape_.group_data + tile.row));
        return tile.group < shape_.groups;  // -1 is the largest unsigned number
    }

    __device__ bool counted(uint32_t index, Tile& tile) {
        while (index >= group_starts_[group_ + 1] * columns_) ++group_;
        const uint32_t start = group_starts_[group_];
        uint32_t row_block, column_block;
        place(index - start * columns_, group_starts_[group_ + 1] - start, row_block, column_block);
        const Rows rows = rows_of_group(shape_, group_);
        tile.row = rows.begin + row_block * kBlockM;
        tile.row_end = rows.end;
        tile.column = column_block * kBlockN;
        tile.group = group_;
        tile.a_group = shape_.layout == kMasked ? group_ : 0;
        return true;
    }

    const Shape& shape_;  // stays in constant memory
    const uint32_t* group_starts_;
    uint32_t columns_;
    uint32_t row_blocks_;
    uint32_t next_;
    uint32_t group_ = 0;
};

}  // namespace dj
