// Attention of tokens over cached keys and values in pages: a row is a token, and its text's pages lie anywhere.
//
// q, o (r, h D), k, v (r, g D); positions (r); table (r, m): pages of the row's text, below 0 for none; keys, values (n, t, g D) a tile with the pages
// first_page to first_page + n; partial (r, m, h D), peaks, totals (r, m, h): the attention to each page by itself, not normalised.

#include "common.cuh"

// keys[table[r, p / t] - first_page, p % t] = k[r] for position p of each row, values likewise  // count = r width
KERNEL append_to_pages(
    const T *k, const T *v, const int *positions, const int *table, T *keys, T *values, int first_page, int num_pages, int length, int most, int width,
    long long count) {
    EACH(n, count) {
        long long row = n / width;
        int page = table[row * most + positions[row] / length] - first_page;
        if (page >= 0 && page < num_pages) {
            long long at = ((long long)page * length + positions[row] % length) * width + n % width;
            keys[at] = k[n];
            values[at] = v[n];
        }
    }
}
EXPORT(append_to_pages)

// Grid: (m, h, r): a row sees keys up to its own position, the last `window` of them if that is not 0. `cap`: of the scores, or 0.
KERNEL paged_attention(
    const T *q, const T *keys, const T *values, const int *positions, const int *table, float *partial, float *peaks, float *totals, float scale,
    int first_page, int num_pages, int length, int size, int groups, int window, float cap) {
    SHARED(float, buffer);
    int m = blockIdx.x, most = gridDim.x, h = blockIdx.y, heads = gridDim.y, g = h / (heads / groups), t = threadIdx.x;
    long long row = blockIdx.z, kept = (row * most + m) * heads + h;
    float *Q = buffer + blockDim.x, *S = Q + size;
    int start = m * length, page = table[row * most + m] - first_page;
    if (page < 0 || page >= num_pages || start > positions[row]) return;
    int seen = positions[row] + 1 - start < length ? positions[row] + 1 - start : length;
    int unseen = window && positions[row] + 1 - window - start > 0 ? positions[row] + 1 - window - start : 0;
    float top = -1e30f, sum = 0.0f;
    q += (row * heads + h) * size;
    keys += ((long long)page * length * groups + g) * size;
    values += ((long long)page * length * groups + g) * size;
    for (int d = t; d < size; d += blockDim.x) Q[d] = widen(q[d]);
    __syncthreads();
    for (int j = unseen + t; j < seen; j += blockDim.x) {
        float score = 0.0f;
        for (int d = 0; d < size; d++) score += Q[d] * widen(keys[(long long)j * groups * size + d]);
        S[j] = cap != 0.0f ? cap * tanhf(scale * score / cap) : scale * score;
        top = larger(top, S[j]);
    }
    top = block_max(top, buffer);
    for (int j = unseen + t; j < seen; j += blockDim.x) {
        S[j] = expf(S[j] - top);
        sum += S[j];
    }
    sum = block_sum(sum, buffer);
    for (int d = t; d < size; d += blockDim.x) {
        float out = 0.0f;
        for (int j = unseen; j < seen; j++) out += S[j] * widen(values[(long long)j * groups * size + d]);
        partial[kept * size + d] = out;
    }
    if (t == 0) {
        peaks[kept] = top;
        totals[kept] = sum;
    }
}
EXPORT(paged_attention)

// The attention to the pages of a row, added in the order of its text; 0 of a row without pages  // o: count = r h D
KERNEL combine_pages(
    const float *partial, const float *peaks, const float *totals, const int *positions, const int *table, T *o, int most, int heads, int size,
    int length, long long count) {
    EACH(n, count) {
        long long row = n / ((long long)heads * size);
        int h = n / size % heads, pages = positions[row] / length + 1;
        float top = -INFINITE, total = 0.0f, out = 0.0f;
        for (int m = 0; m < pages; m++)
            if (table[row * most + m] >= 0) top = larger(top, peaks[(row * most + m) * heads + h]);
        for (int m = 0; m < pages; m++) {
            long long kept = (row * most + m) * heads + h;
            if (table[row * most + m] < 0) continue;
            float factor = expf(peaks[kept] - top);
            total += totals[kept] * factor;
            out += partial[kept * size + n % size] * factor;
        }
        o[n] = narrow<T>(total > 0.0f ? out / total : 0.0f);
    }
}
EXPORT(combine_pages)
