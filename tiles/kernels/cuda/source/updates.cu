// Updates of parameters and sums over whole tiles, of several tiles in one launch.

#include "common.cuh"
#include "many.cuh"

struct Squared {
    const T *x[MOST_TILES];
    double *sums[MOST_TILES];
    long long counts[MOST_TILES];
    int num_tiles, begins[MOST_TILES + 1];
};

// Sums of squares in double, part by part: `parts` has one number a block, and a second launch adds up those of each tile
KERNEL squares(Squared given, double *parts) {
    SHARED(double, sums);
    TILE_OF_BLOCK(tile, given);
    const T *x = given.x[tile];
    double sum = 0.0;
    EACH_OF(i, given, tile) sum += (double)widen(x[i]) * (double)widen(x[i]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) parts[blockIdx.x] = sums[0];
}
EXPORT(squares)

// A block for each tile
KERNEL add_parts(Squared given, const double *parts) {
    double sum = 0.0;
    for (int block = given.begins[blockIdx.x]; block < given.begins[blockIdx.x + 1]; block++) sum += parts[block];
    given.sums[blockIdx.x][0] = sum;
}
EXPORT(add_parts)

struct Scalars {
    const double *numbers[MOST_TILES];
};

// out = the sum of some numbers more, in order
KERNEL add_scalars(Scalars given, double *out, int count, int first) {
    double sum = first ? 0.0 : out[0];
    for (int n = 0; n < count; n++) sum += given.numbers[n][0];
    out[0] = sum;
}
EXPORT(add_scalars)

// min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; NaN stays NaN, so that divergence is seen
__device__ inline float clip_factor(const double *norm, double max_norm) {
    if (!norm) return 1.0f;
    double found = max_norm / (sqrt(norm[0]) + 1e-6);
    return (float)(found < 1.0 || found != found ? found : 1.0);
}

// Numbers in a row of `hyper`, one for each group of parameters: lr, 1 - beta1^t, 1 - beta2^t, beta1 or momentum, beta2, eps, weight decay, 0
#define HYPER 8

struct Moved {
    T *param[MOST_TILES];
    const float *grad[MOST_TILES];
    float *m[MOST_TILES], *v[MOST_TILES], *master[MOST_TILES];
    long long counts[MOST_TILES];
    int num_tiles, begins[MOST_TILES + 1], groups[MOST_TILES];
};

// Adam (Kingma and Ba 2015, algorithm 1) or AdamW (Loshchilov and Hutter 2019, algorithm 2)
KERNEL adam(Moved given, const double *hyper, const double *norm, double max_norm, int decoupled) {
    TILE_OF_BLOCK(tile, given);
    const double *row = hyper + HYPER * given.groups[tile];
    double lr = row[0], beta1 = row[3], beta2 = row[4], eps = row[5], weight_decay = row[6];
    float factor = clip_factor(norm, max_norm), b1 = (float)beta1, b2 = (float)beta2;
    float keep = (float)(1.0 - lr * weight_decay), step = (float)(lr / row[1]), root = (float)sqrt(row[2]);
    T *param = given.param[tile];
    const float *grad = given.grad[tile];
    float *m = given.m[tile], *v = given.v[tile], *master = given.master[tile];
    EACH_OF(i, given, tile) {
        float p = master ? master[i] : widen(param[i]), g = grad[i] * factor;
        if (decoupled)
            p *= keep;
        else
            g += (float)weight_decay * p;
        float first = b1 * m[i] + (float)(1.0 - beta1) * g, second = b2 * v[i] + (float)(1.0 - beta2) * g * g;
        m[i] = first;
        v[i] = second;
        p -= step * first / (sqrtf(second) / root + (float)eps);
        if (master) master[i] = p;
        param[i] = narrow<T>(p);
    }
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
