// Elementwise operations, and those that add up rows of one or all sequences.

#include "common.cuh"
#include "columns.cuh"
#include "many.cuh"

#define GELU_SCALE 0.7978845608028654f
#define GELU_CUBIC 0.044715f

enum { GELU_NEW, GELU, RELU, SILU, TANH };

// (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
__device__ inline float sigmoid(float x) { return quotient(1.0f, 1.0f + expf(-x)); }

__device__ inline float activate(float x, int kind) {
    if (kind == GELU_NEW) return x * sigmoid(2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    if (kind == GELU) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (kind == RELU) return x > 0.0f || x != x ? x : 0.0f;
    if (kind == TANH) return tanhf(x);
    return x * sigmoid(x);
}

__device__ inline float slope(float x, int kind) {
    if (kind == GELU_NEW) {
        float s = sigmoid(2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x));
        return s + 2.0f * x * s * (1.0f - s) * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x);
    }
    if (kind == GELU) return 0.5f * (1.0f + erff(x * 0.7071067811865476f)) + x * expf(-0.5f * x * x) * 0.3989422804014327f;
    if (kind == RELU) return x > 0.0f ? 1.0f : 0.0f;
    if (kind == TANH) {
        float t = tanhf(x);
        return (1.0f - t) * (1.0f + t);
    }
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// The statement for the kind of an activation, with it as the constant K, so that loops have no branches. This is no function of a generic lambda,
// because NVRTC of CUDA 12.4 and 13.0 takes such a lambda for a host function.
#define OF_KIND(number, ...) \
    { \
        const int K = number; \
        __VA_ARGS__; \
    }
#define BY_KIND(kind, ...) \
    { \
        if (kind == GELU_NEW) \
            OF_KIND(GELU_NEW, __VA_ARGS__) \
        else if (kind == GELU) \
            OF_KIND(GELU, __VA_ARGS__) \
        else if (kind == RELU) \
            OF_KIND(RELU, __VA_ARGS__) \
        else if (kind == TANH) \
            OF_KIND(TANH, __VA_ARGS__) \
        else \
            OF_KIND(SILU, __VA_ARGS__) \
    }

// out = a + b; out may be one of them
KERNEL add(const T *a, const T *b, T *out, long long count) {
    map(count, [](float x, float y) { return x + y; }, out, a, b);
}
EXPORT(add)

KERNEL scale(const T *x, T *out, float alpha, long long count) {
    map(count, [=](float x) { return alpha * x; }, out, x);
}
EXPORT(scale)

KERNEL fill(T *out, float value, long long count) {
    map(count, [=]() { return value; }, out);
}
EXPORT(fill)

KERNEL fill_bytes(unsigned char *out, int value, long long count) {
    EACH(i, count) out[i] = (unsigned char)value;
}
EXPORT(fill_bytes)

KERNEL to_float(const T *x, float *out, long long count) {
    map(count, [](float x) { return x; }, out, x);
}
EXPORT(to_float)

KERNEL from_float(const float *x, T *out, long long count) {
    map(count, [](float x) { return x; }, out, x);
}
EXPORT(from_float)

// out (+)= sum, rounded once
KERNEL add_float(const float *sum, T *out, int accumulate, long long count) {
    if (accumulate)
        map(count, [](float x, float y) { return x + y; }, out, out, sum);
    else
        map(count, [](float x) { return x; }, out, sum);
}
EXPORT(add_float)

// out[b] = x[b] + p[:t]; `row` elements of p take part
KERNEL add_rows(const T *x, const T *p, T *out, long long row, long long count) {
    if (row % WIDE == 0 && row < 1ll << 31 && are_aligned(x, p, out)) {
        EACH_PIECE(i, WIDE, count)
        store<WIDE>(out + i, applied<T>([](float x, float y) { return x + y; }, load<WIDE>(x + i), load<WIDE>(p + column_of<WIDE>(i, (int)row))));
    } else
        EACH(i, count) out[i] = narrow<T>(widen(x[i]) + widen(p[i % row]));
}
EXPORT(add_rows)

// dp[:t] (+)= sum of dy over b, in order; what lies behind becomes 0 at the first contribution
KERNEL add_rows_backward(const T *dy, float *dp, int batch, long long row, int accumulate, long long count) {
    EACH(i, count) {
        float total = 0.0f;
        if (i < row)
            for (int b = 0; b < batch; b++) total += widen(dy[b * row + i]);
        dp[i] = accumulate ? dp[i] + total : total;
    }
}
EXPORT(add_rows_backward)

KERNEL activation(const T *x, T *y, int kind, long long count) {
    BY_KIND(kind, map(count, [](float x) { return activate(x, K); }, y, x))
}
EXPORT(activation)

KERNEL activation_backward(const T *x, const T *dy, T *dx, int kind, long long count) {
    BY_KIND(kind, map(count, [](float x, float d) { return d * slope(x, K); }, dx, x, dy))
}
EXPORT(activation_backward)

// y += bias, rounded  // (R, N), (N,)
template <int N> __device__ inline void add_bias_of(T *y, const T *bias, int width, long long count) {
    EACH_PIECE(i, N, count) store<N>(y + i, sum_of<N>(load<N>(y + i), load<N>(bias + column_of<N>(i, width))));
}

KERNEL add_bias(T *y, const T *bias, int width, long long count) {
    if (width % WIDE == 0 && are_aligned(y, bias))
        add_bias_of<WIDE>(y, bias, width, count);
    else
        add_bias_of<1>(y, bias, width, count);
}
EXPORT(add_bias)

KERNEL silu_gate(const T *gate, const T *up, T *y, long long count) {
    map(count, [](float g, float u) { return activate(g, SILU) * u; }, y, gate, up);
}
EXPORT(silu_gate)

// dgate = dy up activation'(gate), dup = dy activation(gate)
template <int N, int KIND> __device__ inline void gate_backward_of(const T *gates, const T *up, const T *dy, T *dgates, T *dup, long long count) {
    EACH_PIECE(i, N, count) {
        Numbers<T, N> g = load<N>(gates + i), u = load<N>(up + i), d = load<N>(dy + i);
        UNROLLED
        for (int e = 0; e < N; e++) {
            float x = widen(g.x[e]), factor = widen(d.x[e]);
            g.x[e] = narrow<T>(factor * widen(u.x[e]) * slope(x, KIND));
            u.x[e] = narrow<T>(factor * activate(x, KIND));
        }
        store<N>(dgates + i, g);
        store<N>(dup + i, u);
    }
}

KERNEL silu_gate_backward(const T *gate, const T *up, const T *dy, T *dgate, T *dup, long long count) {
    if (count % WIDE == 0 && are_aligned(gate, up, dy, dgate, dup))
        gate_backward_of<WIDE, SILU>(gate, up, dy, dgate, dup, count);
    else
        gate_backward_of<1, SILU>(gate, up, dy, dgate, dup, count);
}
EXPORT(silu_gate_backward)

KERNEL gate(const T *gates, const T *up, T *y, int kind, long long count) {
    BY_KIND(kind, map(count, [](float g, float u) { return activate(g, K) * u; }, y, gates, up))
}
EXPORT(gate)

KERNEL gate_backward(const T *gates, const T *up, const T *dy, T *dgates, T *dup, int kind, long long count) {
    bool is_wide = count % WIDE == 0 && are_aligned(gates, up, dy, dgates, dup);
    if (is_wide)
        BY_KIND(kind, gate_backward_of<WIDE, K>(gates, up, dy, dgates, dup, count))
    else
        BY_KIND(kind, gate_backward_of<1, K>(gates, up, dy, dgates, dup, count))
}
EXPORT(gate_backward)

KERNEL cap(const T *x, T *y, float most, long long count) {
    map(count, [=](float x) { return most * tanhf(x / most); }, y, x);
}
EXPORT(cap)

KERNEL cap_backward(const T *y, const T *dy, T *dx, float most, long long count) {
    map(count, [=](float y, float d) { return d * (1.0f - y / most) * (1.0f + y / most); }, dx, y, dy);
}
EXPORT(cap_backward)

KERNEL clamp(const T *x, T *y, float most, long long count) {
    map(count, [=](float x) { return x < -most ? -most : x > most ? most : x; }, y, x);
}
EXPORT(clamp)

KERNEL clamp_backward(const T *x, const T *dy, T *dx, float most, long long count) {
    float limit = widen(narrow<T>(most));  // in the type of x, as PyTorch compares
    map(count, [=](float x, float d) { return fabsf(x) <= limit ? d : 0.0f; }, dx, x, dy);
}
EXPORT(clamp_backward)

// pairs (i, i + R/2) of each head's first R features turn by the position's angles, the others stay  // x (mb, t, h D), cos and sin (length, R/2), half R/2,
// row r of x takes r % length; `count` pairs and features that stay
KERNEL rotary(const T *x, const float *cosine, const float *sine, T *y, int length, int width, int size, int half, float sign, long long count) {
    int per_head = size - half, per_row = width / size * per_head;
    EACH(n, count) {
        long long row = n / per_row;
        int in_row = (int)(n % per_row), head = in_row / per_head, i = in_row % per_head;
        long long at = row * width + (long long)head * size + i;
        if (i >= half) {
            y[at + half] = x[at + half];
            continue;
        }
        long long angle = row % length * half + i;
        float c = cosine[angle], s = sign * sine[angle], first = widen(x[at]), second = widen(x[at + half]);
        y[at] = narrow<T>(first * c - second * s);
        y[at + half] = narrow<T>(second * c + first * s);
    }
}
EXPORT(rotary)

KERNEL rotary_angles(const float *frequencies, float *cosine, float *sine, int start, int half, long long count) {
    EACH(i, count) {
        float angle = (float)(start + (int)(i / half)) * frequencies[i % half];
        cosine[i] = cosf(angle);
        sine[i] = sinf(angle);
    }
}
EXPORT(rotary_angles)

KERNEL rotary_angles_at(const float *frequencies, const int *positions, float *cosine, float *sine, int half, long long count) {
    EACH(i, count) {
        float angle = (float)positions[i / half] * frequencies[i % half];
        cosine[i] = cosf(angle);
        sine[i] = sinf(angle);
    }
}
EXPORT(rotary_angles_at)

struct Columns {
    const T *x[MOST_TILES];
    float *total[MOST_TILES];
    float *partial[MOST_TILES];
    long long counts[MOST_TILES];
    int num_tiles, begins[MOST_TILES + 1], widths[MOST_TILES], accumulate[MOST_TILES], pieces[MOST_TILES], wide[MOST_TILES];
};

// Sums of columns of a piece of the rows, to partial (pieces, N), and in the end of all pieces: total (+)= the sums  // (R, N)
template <int N>
__device__ inline void sums_of_columns(
    const T *x, float *partial, float *total, int block, int num_pieces, int num_rows, int width, int accumulate, u32 *arrivals, float *buffer) {
    int groups = (width + 32 * N - 1) / (32 * N), piece = block / groups, column = (block % groups * 32 + threadIdx.x % 32) * N;
    int r = first_of_piece(num_rows, piece, num_pieces) + threadIdx.x / 32, end = first_of_piece(num_rows, piece + 1, num_pieces);
    float sums[N] = {};
    if (column < width)
        for (; r < end; r += LANES) {
            Numbers<T, N> numbers = load<N>(x + (long long)r * width + column);
            UNROLLED
            for (int e = 0; e < N; e++) sums[e] += widen(numbers.x[e]);
        }
    bool is_whole = num_pieces == 1;
    add_lanes<N>(sums, buffer, is_whole ? total : partial + (long long)piece * width, column, width, is_whole && accumulate);
    add_pieces_last<N>(partial, total, block % groups * 32 * N, num_pieces, width, accumulate, arrivals + block % groups, buffer);
}

KERNEL column_sums(Columns given, u32 *arrivals) {
    SHARED(float, buffer);
    TILE_OF_BLOCK(tile, given);
    int width = given.widths[tile], pieces = given.pieces[tile], block = blockIdx.x - given.begins[tile], rows = (int)(given.counts[tile] / width);
    const T *x = given.x[tile];
    float *partial = given.partial[tile], *total = given.total[tile];
    arrivals += given.begins[tile];
    if (given.wide[tile])
        sums_of_columns<4>(x, partial, total, block, pieces, rows, width, given.accumulate[tile], arrivals, buffer);
    else
        sums_of_columns<1>(x, partial, total, block, pieces, rows, width, given.accumulate[tile], arrivals, buffer);
}
EXPORT(column_sums)

// dx = dy activation'(x), and the sums of its columns in the order of `column_sums`; two rows at a time, so that more reads are under way
template <int N, int KIND>
__device__ inline void activation_sums_of(
    const T *x, const T *dy, T *dx, float *partial, float *total, u32 *arrivals, int num_rows, int width, int accumulate, float *buffer) {
    int num_pieces = gridDim.y;
    int column = (blockIdx.x * 32 + threadIdx.x % 32) * N, end = first_of_piece(num_rows, blockIdx.y + 1, num_pieces);
    float sums[N] = {};
    if (column < width)
        for (int r = first_of_piece(num_rows, blockIdx.y, num_pieces) + threadIdx.x / 32; r < end; r += 2 * LANES) {
            long long at = (long long)r * width + column, next = at + (r + LANES < end ? (long long)LANES * width : 0);
            Numbers<T, N> z = load<N>(x + at), d = load<N>(dy + at), later = load<N>(x + next), more = load<N>(dy + next);
            UNROLLED
            for (int e = 0; e < N; e++) {
                d.x[e] = narrow<T>(widen(d.x[e]) * slope(widen(z.x[e]), KIND));
                more.x[e] = narrow<T>(widen(more.x[e]) * slope(widen(later.x[e]), KIND));
                sums[e] += widen(d.x[e]);
                if (next != at) sums[e] += widen(more.x[e]);
            }
            store<N>(dx + at, d);
            store<N>(dx + next, more);
        }
    add_piece<N>(sums, partial, total, column, width, accumulate, arrivals, buffer);
}

// Grid: (groups of columns, pieces of rows). dx may be dy.
KERNEL activation_sums(
    const T *x, const T *dy, T *dx, float *partial, float *total, u32 *arrivals, int kind, int num_rows, int width, int accumulate, int is_wide) {
    SHARED(float, buffer);
    if (is_wide)
        BY_KIND(kind, activation_sums_of<4, K>(x, dy, dx, partial, total, arrivals, num_rows, width, accumulate, buffer))
    else
        BY_KIND(kind, activation_sums_of<1, K>(x, dy, dx, partial, total, arrivals, num_rows, width, accumulate, buffer))
}
EXPORT(activation_sums)

#define MOST_ADDRESSES 32

struct Addresses {
    u64 numbers[MOST_ADDRESSES];
};

// Operands of products, for cuBLAS, which reads their addresses from device memory
KERNEL write_addresses(Addresses given, u64 *out, int count) {
    if ((int)threadIdx.x < count) out[threadIdx.x] = given.numbers[threadIdx.x];
}
EXPORT(write_addresses)

// out[b, 0] = x[b, positions[b] - start] where that lies in this tile
KERNEL select_rows(const T *x, const int *positions, T *out, int start, int length, int width, long long count) {
    EACH(i, count) {
        long long b = i / width;
        int at = positions[b] - start;
        if (at >= 0 && at < length)
            out[i] = x[(b * length + at) * width + i % width];
        else if (start == 0)
            out[i] = narrow<T>(0.0f);
    }
}
EXPORT(select_rows)

// out[b] = source[rows[b] - start]; a row outside the tile becomes 0  // (length, width), (b,) -> (b, width)
KERNEL gather_rows(const T *source, const int *rows, T *out, int start, int length, long long width, long long count) {
    EACH(i, count) {
        long long b = i / width, row = (long long)rows[b] - start;
        out[i] = row >= 0 && row < length ? source[row * width + i % width] : narrow<T>(0.0f);
    }
}
EXPORT(gather_rows)
