// Which rows belong to which group, and in which order blocks take output tiles. All of it is decided at run time.
#pragma once
#include "dj/types.cuh"

namespace dj {

// Values of deepgemm_jit.spec.Layout.
constexpr uint32_t kDense = 0;       // one group
constexpr uint32_t kContiguous = 1;  // group_data[row] = group of the row, negative: none
constexpr uint32_t kPrefixSums = 2;  // group_data[group] = end row; a group starts at the next multiple of the alignment
constexpr uint32_t kMasked = 3;      // group_data[group] = rows used of the group's own m rows

constexpr uint32_t kMaxGroups = 512;  // spec.kernel_set.MAX_GROUPS

// No load of the kind that takes memory for unchanging: in a dependent launch the kernel that writes it may still have run when
// this one started.
__device__ inline int32_t load(const int32_t* place) { return *static_cast<const volatile int32_t*>(place); }

struct Shape {
    const int32_t* group_data;
    uint32_t m;  // rows of A, of one group when masked
    uint32_t n;
    uint32_t groups;
    uint32_t layout;
    uint32_t alignment;

    // Whether groups are counted from device data before the first tile.
    __device__ bool counts_rows() const { return layout >= kPrefixSums; }

    __device__ uint32_t round_up(uint32_t row) const { return ceil_div(row, alignment) * alignment; }
};

// What a block knows of the groups that it counted: read once, so that all its roles agree whatever happens to the data.
struct GroupTable {
    uint32_t blocks_before[kMaxGroups + 1];  // row blocks of the groups before
    uint32_t ends[kMaxGroups];               // end row of each group
    uint32_t padding[3];

    // Counts with one warp, of which each lane takes some groups that follow each other. Group data can be wrong, but nothing
    // reaches outside the tensor: rows are clamped to it, and an end row before an earlier one counts as that one, which also
    // bounds the work.
    __device__ void count(const Shape& shape, uint32_t block_m) {
        constexpr uint32_t kEach = 4;
        uint32_t before = 0;  // row blocks
        uint32_t last_end = 0;
        for (uint32_t done = 0; done < shape.groups; done += kWarp * kEach) {
            const uint32_t first = done + lane_id() * kEach;
            uint32_t end[kEach];
            uint32_t begin[kEach] = {};
            uint32_t blocks[kEach];
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                const int32_t given = first + i < shape.groups ? load(shape.group_data + first + i) : 0;
                end[i] = given <= 0 ? 0 : min_of(static_cast<uint32_t>(given), shape.m);
            }
            if (shape.layout == kPrefixSums) {
#pragma unroll
                for (uint32_t i = 1; i < kEach; ++i) end[i] = max_of(end[i], end[i - 1]);
                uint32_t highest = end[kEach - 1];
#pragma unroll
                for (uint32_t distance = 1; distance < kWarp; distance *= 2)
                    highest = max_of(highest, __shfl_up_sync(0xffffffffu, highest, distance));  // the first lanes get their own
                uint32_t previous = __shfl_up_sync(0xffffffffu, highest, 1);
                previous = lane_id() == 0 ? last_end : max_of(previous, last_end);
                last_end = max_of(last_end, __shfl_sync(0xffffffffu, highest, kWarp - 1));
#pragma unroll
                for (uint32_t i = 0; i < kEach; ++i) {
                    end[i] = max_of(end[i], previous);
                    begin[i] = shape.round_up(i == 0 ? previous : end[i - 1]);
                }
            }
            uint32_t sum = 0;
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                blocks[i] = first + i < shape.groups && end[i] > begin[i] ? ceil_div(end[i] - begin[i], block_m) : 0;
                sum += blocks[i];
            }
            uint32_t up_to = sum;
#pragma unroll
            for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, up_to, distance);
                if (lane_id() >= distance) up_to += other;
            }
            uint32_t place = before + up_to - sum;
#pragma unroll
            for (uint32_t i = 0; i < kEach; ++i) {
                if (first + i < shape.groups) {
                    blocks_before[first + i] = place;
                    ends[first + i] = end[i];
                }
                place += blocks[i];
            }
            before += __shfl_sync(0xffffffffu, up_to, kWarp - 1);
        }
        if (lane_id() == 0) blocks_before[shape.groups] = before;
    }

    // The group of a row block, at or after a group that is not behind it. For whole warps: 32 groups at a look.
    __device__ uint32_t group_of(uint32_t row_block, uint32_t first, uint32_t groups) const {
        while (true) {
            const uint32_t after = blocks_before[min_of(first + lane_id(), groups - 1) + 1];
            const uint32_t found = __ballot_sync(0xffffffffu, row_block < after);
            if (found != 0) return warp_uniform(first + __ffs(found) - 1);
            first += kWarp;
        }
    }

    __device__ uint32_t begin(const Shape& shape, uint32_t group) const {
        return shape.layout == kMasked || group == 0 ? 0 : shape.round_up(ends[group - 1]);
    }
};

// One output tile: rows [row, row_end) are written, columns start at `column`.
struct Tile {
    uint32_t group;    // of B and its scales
    uint32_t a_group;  // of A, its scales and D: 0 unless masked
    uint32_t row;
    uint32_t row_end;
    uint32_t column;
};

// Whole warps ask for tiles, and what is read from memory is broadcast: the compiler then sees that a warp stays together and
// keeps stages, addresses and descriptors in uniform registers (else each product waits for eight moves to them). For the same
// reason an idle tile is handed out, to be skipped, and not passed over in a loop.
//
// Blocks, or clusters of them, walk the tiles with the stride of the grid. Tiles go down a band of rows first and then to the next
// column, so that the blocks at work together share both operands in L2.
template <uint32_t kBlockM, uint32_t kBlockN>
class TileScheduler {
   public:
    // Takes tiles `first`, `first + stride`, ... `groups` is counted where the layout counts.
    __device__ TileScheduler(const Shape& shape, const GroupTable& groups, uint32_t first, uint32_t stride)
        : shape_(shape), groups_(groups), next_(first), stride_(stride) {
        row_blocks_ = shape.counts_rows() ? warp_uniform(groups.blocks_before[shape.groups]) : ceil_div(shape.m, kBlockM);
        look_ahead();
    }

    __device__ bool next(Tile& tile) {
        if (next_ >= row_blocks_ * columns()) return false;
        if (shape_.counts_rows()) {
            place_counted(tile);
        } else {
            place_listed(tile);
        }
        next_ += stride_;
        look_ahead();
        return true;
    }

    // Whether a tile's rows belong to no group: there is nothing to do for it.
    __device__ bool is_idle(const Tile& tile) const { return tile.group >= shape_.groups; }  // -1 is the largest unsigned number

   private:
    static constexpr uint32_t kBand = 16;

    __device__ uint32_t columns() const { return ceil_div(shape_.n, kBlockN); }

    // Places tile `index` of a rectangle of row blocks x columns.
    __device__ void place(uint32_t index, uint32_t row_blocks, uint32_t& row_block, uint32_t& column_block) const {
        const uint32_t band = index / (kBand * columns());
        const uint32_t within = index - band * kBand * columns();
        const uint32_t height = min_of(kBand, row_blocks - band * kBand);
        column_block = within / height;
        row_block = band * kBand + within - column_block * height;
    }

    // Asks for the group of the next tile where rows list them: it is in memory, hundreds of cycles away.
    __device__ void look_ahead() {
        if (shape_.layout != kContiguous || next_ >= row_blocks_ * columns()) return;
        place(next_, row_blocks_, row_block_, column_block_);
        // Lane 0 has it; the others read along, or the compiler would move what is the same for all to a uniform register at once,
        // and wait for it there.
        const uint32_t row = row_block_ * kBlockM;
        listed_group_ = load(shape_.group_data + row + (lane_id() < shape_.m - row ? lane_id() : 0));
    }

    __device__ void place_listed(Tile& tile) {
        tile.group = 0;
        if (shape_.layout == kContiguous) {
            tile.group = warp_uniform(static_cast<uint32_t>(listed_group_));
        } else {
            place(next_, row_blocks_, row_block_, column_block_);
        }
        tile.row = row_block_ * kBlockM;
        tile.row_end = shape_.m;
        tile.column = column_block_ * kBlockN;
        tile.a_group = 0;
    }

    __device__ void place_counted(Tile& tile) {
        group_ = groups_.group_of(next_ / columns(), group_, shape_.groups);
        const uint32_t before = warp_uniform(groups_.blocks_before[group_]);
        const uint32_t index = next_ - before * columns();
        const uint32_t row_blocks = warp_uniform(groups_.blocks_before[group_ + 1]) - before;
        uint32_t row_block = 0, column_block = index;
        if (row_blocks > 1) place(index, row_blocks, row_block, column_block);
        tile.row = warp_uniform(groups_.begin(shape_, group_)) + row_block * kBlockM;
        tile.row_end = warp_uniform(groups_.ends[group_]);
        tile.column = column_block * kBlockN;
        tile.group = group_;
        tile.a_group = shape_.layout == kMasked ? group_ : 0;
    }

    const Shape& shape_;  // stays in constant memory
    const GroupTable& groups_;
    uint32_t row_blocks_;
    uint32_t next_;
    uint32_t stride_;
    uint32_t group_ = 0;  // of the last tile, where groups are counted
    // Of the next tile, where rows list them.
    uint32_t row_block_ = 0;
    uint32_t column_block_ = 0;
    int32_t listed_group_ = 0;
};

}  // namespace dj
