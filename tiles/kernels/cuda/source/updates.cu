// Updates of parameters and sums over whole tiles, of several tiles in one launch.

#include "common.cuh"
#include "many.cuh"

struct Squared {
    const T *x[MOST_TILES];
    double *sums[MOST_TILES];
    long long counts[MOST_TILES];
    int num_tiles, begins[MOST_TILES + 1];
};

// Sum of a number of every thread; the first one gets it  // `buffer`: blockDim.x doubles
__device__ inline double block_total(double sum, double *buffer) {
    buffer[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) buffer[threadIdx.x] += buffer[threadIdx.x + half];
        __syncthreads();
    }
    return buffer[0];
}

template <int N> __device__ inline double squares_of(const T *x, long long first, long long step, long long count) {
    double sum = 0.0;
    for (long long i = first * N; i < count; i += step * N) {
        Numbers<T, N> numbers = load<N>(x + i);
        UNROLLED
        for (int e = 0; e < N; e++) sum += (double)widen(numbers.x[e]) * (double)widen(numbers.x[e]);
    }
    return sum;
}

// Sums of squares in double, part by part: `parts` has one number a block, and the last block of a tile adds up those of the tile
KERNEL squares(Squared given, double *parts, u32 *arrivals) {
    SHARED(double, sums);
    TILE_OF_BLOCK(tile, given);
    const T *x = given.x[tile];
    long long first = NUMBER_OF_THREAD(given, tile), step = NUM_THREADS(given, tile), count = given.counts[tile];
    double sum = count % WIDE == 0 && are_aligned(x) ? squares_of<WIDE>(x, first, step, count) : squares_of<1>(x, first, step, count);
    sum = block_total(sum, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
    int begin = given.begins[tile], end = given.begins[tile + 1];
    if (!is_last_of(end - begin, arrivals + tile)) return;
    const volatile double *all = parts;
    sum = 0.0;
    for (int block = begin + threadIdx.x; block < end; block += blockDim.x) sum += all[block];
    sum = block_total(sum, sums);
    if (threadIdx.x == 0) given.sums[tile][0] = sum;
}
EXPORT(squares)

#define MOST_SUMS 32
#define MOST_SCALARS 384

struct Scalars {
    const double *numbers[MOST_SCALARS];
    double *sums[MOST_SUMS];
    int begins[MOST_SUMS + 1], goes_on[MOST_SUMS];
};

// Each sum (+)= its numbers, in order; a block for each sum
KERNEL add_scalars(Scalars given) {
    double sum = given.goes_on[blockIdx.x] ? given.sums[blockIdx.x][0] : 0.0;
    for (int n = given.begins[blockIdx.x]; n < given.begins[blockIdx.x + 1]; n++) sum += given.numbers[n][0];
    given.sums[blockIdx.x][0] = sum;
}
EXPORT(add_scalars)

// min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; NaN stays NaN, so that divergence is seen
__device__ inline float clip_factor(const double *norm, double max_norm) {
    if (!norm) return 1.0f;
    double found = max_norm / (sqrt(norm[0]) + 1e-6);
    return (float)(found < 1.0 || found != found ? found : 1.0);
}

// Numbers in a row of `hyper`, one for each group of parameters: lr, 1 - beta1^t, 1 - beta2^t, beta1 or momentum, beta2, eps, weight decay, number t of the step
#define HYPER 8

struct Moved {
    T *param[MOST_TILES];
    const float *grad[MOST_TILES];
    float *m[MOST_TILES], *v[MOST_TILES], *master[MOST_TILES];
    long long counts[MOST_TILES];
    int num_tiles, begins[MOST_TILES + 1], groups[MOST_TILES];
};

struct AdamTerms {
    float factor, b1, b2, rest1, rest2, keep, step, root, eps, weight_decay;
    int decoupled;
};

template <int N>
__device__ inline void adam_of(T *param, const float *grad, float *m, float *v, float *master, AdamTerms at, long long first, long long step, long long count) {
    for (long long i = first * N; i < count; i += step * N) {
        Numbers<T, N> rounded;
        Numbers<float, N> p, g = load<N>(grad + i), mean = load<N>(m + i), square = load<N>(v + i);
        if (master)
            p = load<N>(master + i);
        else {
            rounded = load<N>(param + i);
            UNROLLED
            for (int e = 0; e < N; e++) p.x[e] = widen(rounded.x[e]);
        }
        UNROLLED
        for (int e = 0; e < N; e++) {
            float weight = p.x[e], slope = g.x[e] * at.factor;
            if (at.decoupled)
                weight *= at.keep;
            else
                slope += at.weight_decay * weight;
            mean.x[e] = at.b1 * mean.x[e] + at.rest1 * slope;
            square.x[e] = at.b2 * square.x[e] + at.rest2 * slope * slope;
            p.x[e] = weight - at.step * mean.x[e] / (sqrtf(square.x[e]) / at.root + at.eps);
            rounded.x[e] = narrow<T>(p.x[e]);
        }
        store<N>(m + i, mean);
        store<N>(v + i, square);
        if (master) store<N>(master + i, p);
        store<N>(param + i, rounded);
    }
}

// Terms of a group's updates in a step
__device__ inline AdamTerms adam_terms(const double *row, const double *norm, double max_norm, int decoupled) {
    double lr = row[0], beta1 = row[3], beta2 = row[4], weight_decay = row[6];
    AdamTerms at;
    at.factor = clip_factor(norm, max_norm);
    at.b1 = (float)beta1;
    at.b2 = (float)beta2;
    at.rest1 = (float)(1.0 - beta1);
    at.rest2 = (float)(1.0 - beta2);
    at.keep = (float)(1.0 - lr * weight_decay);
    at.step = (float)(lr / row[1]);
    at.root = (float)sqrt(row[2]);
    at.eps = (float)row[5];
    at.weight_decay = (float)weight_decay;
    at.decoupled = decoupled;
    return at;
}

// Adam (Kingma and Ba 2015, algorithm 1) or AdamW (Loshchilov and Hutter 2019, algorithm 2)
KERNEL adam(Moved given, const double *hyper, const double *norm, double max_norm, int decoupled) {
    TILE_OF_BLOCK(tile, given);
    AdamTerms at = adam_terms(hyper + HYPER * given.groups[tile], norm, max_norm, decoupled);
    T *param = given.param[tile];
    const float *grad = given.grad[tile];
    float *m = given.m[tile], *v = given.v[tile], *master = given.master[tile];
    long long first = NUMBER_OF_THREAD(given, tile), step = NUM_THREADS(given, tile), count = given.counts[tile];
    if (count % 4 == 0 && are_aligned(param, grad, m, v, master))
        adam_of<4>(param, grad, m, v, master, at, first, step, count);
    else
        adam_of<1>(param, grad, m, v, master, at, first, step, count);
}
EXPORT(adam)

// SGD as torch.optim.SGD: dampening 0, the buffer starting at zero
KERNEL sgd(
    T *param, const float *grad, const double *hyper, float *buffer, const double *norm, float *master, double max_norm, int group, int nesterov,
    long long count) {
    const double *row = hyper + HYPER * group;
    double lr = row[0], momentum = row[3], weight_decay = row[6];
    float factor = clip_factor(norm, max_norm);
    EACH(i, count) {
        float p = master ? master[i] : widen(param[i]), g = grad[i] * factor + (float)weight_decay * p;
        if (buffer) {
            buffer[i] = (float)momentum * buffer[i] + g;
            g = nesterov ? g + (float)momentum * buffer[i] : buffer[i];
        }
        p -= (float)lr * g;
        if (master) master[i] = p;
        param[i] = narrow<T>(p);
    }
}
EXPORT(sgd)

// Moments in 8 bits: `reference/moments.py` has the format. A block of threads updates a block of numbers, one for each thread.
#define CODES 256
// The largest code of a magnitude of first moments; the next bit is the sign
#define FIRST 127
#define DROPPED 19

// Bits of the float whose code is 0
__device__ inline u32 bits_at_0(int is_first) { return 0x3F800000u - ((u32)(is_first ? FIRST : CODES - 1) << DROPPED); }

// Value of a magnitude's code, from 0 to 1
__device__ inline float value_of(u32 code, int is_first) {
    float least = __uint_as_float(bits_at_0(is_first));
    return (__uint_as_float((code << DROPPED) + bits_at_0(is_first)) - least) / (1.0f - least);
}

// Code of a magnitude, at most the scale, rounded by `random` from 0 to 65,535
__device__ inline u32 code_of(float magnitude, float scale, int is_first, u32 random) {
    float least = __uint_as_float(bits_at_0(is_first));
    float inverse = (1.0f - least) / (scale < 1.17549435e-38f ? 1.17549435e-38f : scale);
    return (__float_as_uint(magnitude * inverse + least) - bits_at_0(is_first) + (random << (DROPPED - 16))) >> DROPPED;
}

// AdamW with moments in 8 bits; shared memory: a float for each warp
KERNEL adam8bit(
    T *param, const float *grad, unsigned char *m, float *m_scales, unsigned char *v, float *v_scales, const double *hyper, const double *norm,
    float *master, double max_norm, int group, long long stream, long long tile, long long count) {
    SHARED(float, buffer);
    AdamTerms at = adam_terms(hyper + HYPER * group, norm, max_norm, 1);
    u32 key = (u32)mixed((u64)hyper[HYPER * group + 7], (u64)stream, (u64)tile);
    for (long long block = blockIdx.x; block * CODES < count; block += gridDim.x) {
        long long i = block * CODES + threadIdx.x;
        float mean = 0.0f, square = 0.0f;
        if (i < count) {
            float weight = master ? master[i] : widen(param[i]), slope = grad[i] * at.factor;
            float magnitude = value_of(m[i] & FIRST, 1);
            mean = at.b1 * ((m[i] > FIRST ? -magnitude : magnitude) * m_scales[block]) + at.rest1 * slope;
            square = at.b2 * (value_of(v[i], 0) * v_scales[block]) + at.rest2 * slope * slope;
            weight = at.keep * weight - at.step * mean / (sqrtf(square) / at.root + at.eps);
            if (master) master[i] = weight;
            param[i] = narrow<T>(weight);
        }
        float m_scale = block_max(fabsf(mean), buffer), v_scale = block_max(square, buffer);
        if (i < count) {
            u32 random = scrambled((u32)i ^ key, 0);
            u32 sign = __float_as_uint(mean) >> 31, code = code_of(square, v_scale, 0, random & 0xFFFFu);
            m[i] = (unsigned char)(code_of(fabsf(mean), m_scale, 1, random >> 16) | sign << 7);
            v[i] = (unsigned char)(code == 0 && square > 0.0f ? 1 : code);
        }
        if (threadIdx.x == 0) {
            m_scales[block] = m_scale;
            v_scales[block] = v_scale;
        }
    }
}
EXPORT(adam8bit)

// Muon, as `reference/muon.py`: the first of its tasks, which has one pass over the gradient
KERNEL muon_momentum(
    const float *grad, float *buffer, float *update, const double *hyper, const double *norm, double max_norm, int group, int nesterov,
    long long count) {
    float momentum = (float)hyper[HYPER * group + 3], factor = clip_factor(norm, max_norm);
    EACH(i, count) {
        float slope = grad[i] * factor, mean = buffer[i] + (1.0f - momentum) * (slope - buffer[i]);
        buffer[i] = mean;
        update[i] = nesterov ? slope + momentum * (mean - slope) : mean;
    }
}
EXPORT(muon_momentum)

// x /= max(norm, smallest norm); NaN stays NaN, so that divergence is seen
KERNEL muon_normalise(float *x, const double *total, const double *hyper, int group, long long count) {
    double norm = sqrt(total[0]), smallest = hyper[HYPER * group + 5];
    float divisor = (float)(norm < smallest ? smallest : norm);
    EACH(i, count) x[i] /= divisor;
}
EXPORT(muon_normalise)

// out = b gram, plus a times the identity  # (width, width) if `diagonal`
KERNEL muon_polynomial(const float *gram, float *out, double a, double b, int width, int diagonal, long long count) {
    EACH(i, count) out[i] = (float)b * gram[i] + (diagonal && i / width == i % width ? (float)a : 0.0f);
}
EXPORT(muon_polynomial)

KERNEL muon_update(T *param, const float *x, const double *hyper, float *master, double ratio, int group, long long count) {
    const double *row = hyper + HYPER * group;
    float keep = (float)(1.0 - row[0] * row[6]), step = (float)(row[0] * ratio);
    EACH(i, count) {
        float p = keep * (master ? master[i] : widen(param[i])) - step * x[i];
        if (master) master[i] = p;
        param[i] = narrow<T>(p);
    }
}
EXPORT(muon_update)
