// Sums over rows, column by column: of pieces of the rows, and of the pieces in order, by the last of the blocks that have pieces of the same columns.
//
// A block has 32 groups of N columns and LANES lanes of rows: lane l takes rows l, l + LANES, ... of its piece, and lanes are added
// in order. Tall arrays have pieces because their columns alone are too few blocks for a GPU.
//
// Ladder (H200, gradients of 25 layer norms of 16,384 rows of 768 columns, in ms): a block for 32 columns and all rows 15.5

#pragma once

#define LANES 8

// The first row of a piece, which is also one past the last row of the piece before
__device__ inline int first_of_piece(int num_rows, int piece, int num_pieces) {
    return min(num_rows, piece * ((num_rows + num_pieces - 1) / num_pieces));
}

// total[column] (+)= the sums of all lanes  // sums (N,) of this lane; `buffer` 32 N LANES floats
template <int N> __device__ inline void add_lanes(const float *sums, float *buffer, float *total, int column, int width, int accumulate) {
    int lane = threadIdx.x / 32, place = threadIdx.x % 32 * N;
    __syncthreads();
    for (int e = 0; e < N; e++) buffer[lane * 32 * N + place + e] = sums[e];
    __syncthreads();
    for (int t = threadIdx.x; t < 32 * N; t += blockDim.x) {
        int at = column - place + t;
        if (at >= width) continue;
        float sum = buffer[t];
        for (int l = 1; l < LANES; l++) sum += buffer[l * 32 * N + t];
        total[at] = accumulate ? total[at] + sum : sum;
    }
}

// total[column] (+)= sum of partial[piece * stride + column] over pieces: lane l takes pieces l, l + LANES, ... Reads see what other blocks wrote.
__device__ inline void add_pieces(
    const volatile float *partial, float *total, int column, int num_pieces, int stride, int width, int accumulate, float *buffer) {
    float sum = 0.0f;
    if (column < width)
        for (int piece = threadIdx.x / 32; piece < num_pieces; piece += LANES) sum += partial[(long long)piece * stride + column];
    add_lanes<1>(&sum, buffer, total, column, width, accumulate);
}

// total (+)= the sums of all pieces of 32 N columns from `column` on, by the last block that has a piece of them
template <int N>
__device__ inline void add_pieces_last(
    const float *partial, float *total, int column, int num_pieces, int width, int accumulate, u32 *arrivals, float *buffer) {
    if (num_pieces == 1 || !is_last_of(num_pieces, arrivals)) return;
    for (int n = 0; n < N; n++) add_pieces(partial, total, column + n * 32 + threadIdx.x % 32, num_pieces, width, width, accumulate, buffer);
}

// The sums of all lanes of this block's piece to partial (pieces, N), and in the end those of all pieces to `total`. Grid: (groups of columns, pieces)
template <int N>
__device__ inline void add_piece(
    const float *sums, float *partial, float *total, int column, int width, int accumulate, u32 *arrivals, float *buffer) {
    bool is_whole = gridDim.y == 1;
    add_lanes<N>(sums, buffer, is_whole ? total : partial + (long long)blockIdx.y * width, column, width, is_whole && accumulate);
    add_pieces_last<N>(partial, total, blockIdx.x * 32 * N, gridDim.y, width, accumulate, arrivals + blockIdx.x, buffer);
}
