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

// No load of the kind that takes memory for unchanging: in a dependent launch the kernel that writes it may still have run when this
// one started.
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

    // Counts with one warp. Group data can be wrong, but nothing reaches outside the tensor: rows are clamped to it, and an end row
    // before an earlier one counts as that one, which also bounds the work.
    __device__ void count(const Shape& shape, uint32_t block_m) {
        uint32_t before = 0;  // row blocks
        uint32_t last_end = 0;
        for (uint32_t first = 0; first < shape.groups; first += kWarp) {
            const uint32_t group = first + lane_id();
            const int32_t given = group < shape.groups ? load(shape.group_data + group) : 0;
            uint32_t end = given <= 0 ? 0 : min_of(static_cast<uint32_t>(given), shape.m);
            uint32_t begin = 0;
            if (shape.layout == kPrefixSums) {
#pragma unroll
                for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                    const uint32_t other = __shfl_up_sync(0xffffffffu, end, distance);
                    if (lane_id() >= distance) end = max_of(end, other);
                }
                end = max_of(end, last_end);
                const uint32_t previous = __shfl_up_sync(0xffffffffu, end, 1);
                begin = shape.round_up(lane_id() == 0 ? last_end : previous);
                last_end = __shfl_sync(0xffffffffu, end, kWarp - 1);
            }
            const uint32_t blocks = group < shape.groups && end > begin ? ceil_div(end - begin, block_m) : 0;
            uint32_t sum = blocks;
#pragma unroll
            for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
                const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
                if (lane_id() >= distance) sum += other;
            }
            if (group < shape.groups) {
                blocks_before[group] = before + sum - blocks;
                ends[group] = end;
            }
            before += __shfl_sync(0xffffffffu, sum, kWarp - 1);
        }
        if (lane_id() == 0) blocks_before[shape.groups] = before;
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

// Whole warps ask for tiles, and what is read from memory is broadcast: the compiler then sees that a warp stays together and keeps
// stages, addresses and descriptors in uniform registers (else each product waits for eight moves to them). For the same reason an
// idle tile is handed out, to be skipped, and not passed over in a loop.
//
// Blocks, or clusters of them, walk the tiles with the stride of the grid. Tiles go down a band of rows first and then to the next column, so that the
// blocks at work together share both operands in L2.
template <uint32_t kBlockM, uint32_t kBlockN>
class TileScheduler {
   public:
    // Takes tiles `first`, `first + stride`, ... `groups` is counted where the layout counts.
    __device__ TileScheduler(const Shape& shape, const GroupTable& groups, uint32_t first, uint32_t stride)
        : shape_(shape), groups_(groups), columns_(ceil_div(shape.n, kBlockN)), next_(first), stride_(stride) {
        row_blocks_ = shape.counts_rows() ? warp_uniform(groups.blocks_before[shape.groups]) : ceil_div(shape.m, kBlockM);
        look_ahead();
    }

    __device__ bool next(Tile& tile) {
        if (next_ >= row_blocks_ * columns_) return false;
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

    // Places tile `index` of a rectangle of row blocks x columns.
    __device__ void place(uint32_t index, uint32_t row_blocks, uint32_t& row_block, uint32_t& column_block) const {
        const uint32_t band = index / (kBand * columns_);
        const uint32_t within = index - band * kBand * columns_;
        const uint32_t height = min_of(kBand, row_blocks - band * kBand);
        column_block = within / height;
        row_block = band * kBand + within - column_block * height;
    }

    // Places the next tile where rows list their groups, which are in memory, hundreds of cycles away.
    __device__ void look_ahead() {
        if (shape_.counts_rows() || next_ >= row_blocks_ * columns_) return;
        place(next_, row_blocks_, row_block_, column_block_);
        if (shape_.layout == kContiguous) listed_group_ = load(shape_.group_data + row_block_ * kBlockM);
    }

    __device__ void place_listed(Tile& tile) const {
        tile.row = row_block_ * kBlockM;
        tile.row_end = shape_.m;
        tile.column = column_block_ * kBlockN;
        tile.a_group = 0;
        tile.group = shape_.layout == kContiguous ? warp_uniform(static_cast<uint32_t>(listed_group_)) : 0;
    }

    __device__ void place_counted(Tile& tile) {
        uint32_t after = warp_uniform(groups_.blocks_before[group_ + 1]);  // row blocks up to the end of the group
        while (next_ >= after * columns_) after = warp_uniform(groups_.blocks_before[++group_ + 1]);
        const uint32_t before = warp_uniform(groups_.blocks_before[group_]);
        uint32_t row_block, column_block;
        place(next_ - before * columns_, after - before, row_block, column_block);
        tile.row = warp_uniform(groups_.begin(shape_, group_)) + row_block * kBlockM;
        tile.row_end = warp_uniform(groups_.ends[group_]);
        tile.column = column_block * kBlockN;
        tile.group = group_;
        tile.a_group = shape_.layout == kMasked ? group_ : 0;
    }

    const Shape& shape_;  // stays in constant memory
    const GroupTable& groups_;
    uint32_t columns_;
    uint32_t row_blocks_;
    uint32_t next_;
    uint32_t stride_;
    uint32_t group_ = 0;  // where groups are counted
    // Of the next tile, where they are not.
    uint32_t row_block_ = 0;
    uint32_t column_block_ = 0;
    int32_t listed_group_ = 0;
};

}  // namespace dj
