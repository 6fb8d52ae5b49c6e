// Mixtures of experts: routing, what happens between the products of an expert, the load-balancing loss, a gate for each row.
// Letters: R rows, E experts, K experts of each row, I columns inside an expert.

#include "common.cuh"

// largest logit of a row, and the sum of exponentials below it
__device__ inline float row_total(const T *row, int num_experts, float &top) {
    top = widen(row[0]);
    for (int e = 1; e < num_experts; e++) top = larger(widen(row[e]), top);
    float total = 0.0f;
    for (int e = 0; e < num_experts; e++) total += expf(widen(row[e]) - top);
    return total;
}

// A thread a row: the K largest logits, of equal ones the first; weights are their softmax over all, divided by their sum if `renormalises`
KERNEL route(const T *logits, int *choices, float *weights, int num_experts, int num_chosen, int renormalises, long long num_rows) {
    EACH(i, num_rows) {
        const T *row = logits + i * num_experts;
        int *chosen = choices + i * num_chosen;
        float *weight = weights + i * num_chosen;
        for (int j = 0; j < num_chosen; j++) {
            int best = -1;
            for (int e = 0; e < num_experts; e++) {
                int is_free = 1;
                for (int before = 0; before < j; before++) is_free &= chosen[before] != e;
                if (is_free && (best < 0 || widen(row[e]) > widen(row[best]))) best = e;
            }
            chosen[j] = best;
        }
        float top, total = row_total(row, num_experts, top), share = 0.0f;
        for (int j = 0; j < num_chosen; j++) {
            weight[j] = expf(widen(row[chosen[j]]) - top);
            share += weight[j];
        }
        for (int j = 0; j < num_chosen; j++) weight[j] /= renormalises ? share : total;
    }
}
EXPORT(route)

// A thread an expert: whether a row chose it
KERNEL flag_experts(const int *choices, unsigned char *flags, int num_choices, long long num_experts) {
    EACH(e, num_experts) {
        int is_chosen = 0;
        for (int n = 0; n < num_choices && !is_chosen; n++) is_chosen = choices[n] == (int)e;
        flags[e] = (unsigned char)is_chosen;
    }
}
EXPORT(flag_experts)

KERNEL route_backward(
    const T *logits, const int *choices, const float *dweights, T *dlogits, int num_experts, int num_chosen, int renormalises, long long num_rows) {
    EACH(i, num_rows) {
        const T *row = logits + i * num_experts;
        const int *chosen = choices + i * num_chosen;
        const float *dweight = dweights + i * num_chosen;
        float top, total = row_total(row, num_experts, top), dot = 0.0f, share = 0.0f;
        for (int j = 0; j < num_chosen; j++) {
            float part = expf(widen(row[chosen[j]]) - top);
            dot += dweight[j] * part;
            share += part;
        }
        float whole = renormalises ? share : total, mean = dot / whole;
        for (int e = 0; e < num_experts; e++) {
            float p = expf(widen(row[e]) - top) / whole, slope = renormalises ? whole - whole : -p * mean;  // 0, or NaN if a logit is NaN
            for (int j = 0; j < num_chosen; j++)
                if (chosen[j] == e) slope = p * (dweight[j] - mean);
            dlogits[i * num_experts + e] = narrow<T>(slope);
        }
    }
}
EXPORT(route_backward)

// weight of a row for an expert, 0 if the row did not choose it, and the place of the choice
__device__ inline float weight_of(const int *choices, const float *weights, long long row, int num_chosen, int expert, int &place) {
    place = -1;
    for (int k = 0; k < num_chosen; k++)
        if (choices[row * num_chosen + k] == expert) place = k;
    return place < 0 ? 0.0f : weights[row * num_chosen + place];
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// hidden = weight silu(gate) up; 0 for rows that did not choose the expert, whatever their products are
KERNEL weigh_hidden(
    const float *gate, const float *up, const int *choices, const float *weights, T *hidden, int inner, int num_chosen, int expert, long long count) {
    EACH(i, count) {
        int place;
        float weight = weight_of(choices, weights, i / inner, num_chosen, expert, place);
        hidden[i] = narrow<T>(place < 0 ? 0.0f : weight * gate[i] * sigmoid(gate[i]) * up[i]);
    }
}
EXPORT(weigh_hidden)

// A block a row: the slopes of gate and up, hidden times weight, and the slope of the weight; `slope` is that of weight times hidden
KERNEL expert_slopes(
    const float *gate, const float *up, const float *slope, const int *choices, const float *weights, float *dweights, T *dgate, T *dup, T *hidden,
    int inner, int num_chosen, int expert) {
    SHARED(float, buffer);
    int place;
    long long row = blockIdx.x, start = row * inner;
    float weight = weight_of(choices, weights, row, num_chosen, expert, place), dot = 0.0f;
    for (int j = threadIdx.x; j < inner; j += blockDim.x) {
        long long i = start + j;
        float s = sigmoid(gate[i]), value = gate[i] * s * up[i], dvalue = weight * slope[i];
        dot += slope[i] * value;
        dgate[i] = narrow<T>(place < 0 ? 0.0f : dvalue * up[i] * s * (1.0f + gate[i] * (1.0f - s)));
        dup[i] = narrow<T>(place < 0 ? 0.0f : dvalue * gate[i] * s);
        hidden[i] = narrow<T>(place < 0 ? 0.0f : weight * value);
    }
    dot = block_sum(dot, buffer);
    if (threadIdx.x == 0 && place >= 0) dweights[row * num_chosen + place] += dot;
}
EXPORT(expert_slopes)

// largest logit and sum of exponentials of each row
KERNEL row_totals(const T *logits, float *totals, int num_experts, long long num_rows) {
    EACH(i, num_rows) totals[2 * i + 1] = row_total(logits + i * num_experts, num_experts, totals[2 * i]);
}
EXPORT(row_totals)

// A block an expert, and one more for the number of rows: choices and probabilities of rows that are not of document 0, in double
KERNEL balance(
    const T *logits, const int *choices, const int *documents, const float *totals, double *sums, int num_rows, int num_experts, int num_chosen,
    int first) {
    SHARED(double, parts);
    double *probabilities = parts + blockDim.x;
    int e = blockIdx.x;
    double count = 0.0, probability = 0.0;
    for (int i = threadIdx.x; i < num_rows; i += blockDim.x) {
        if (documents && documents[i] == 0) continue;
        if (e == num_experts) {
            count += 1.0;
            continue;
        }
        for (int k = 0; k < num_chosen; k++) count += choices[(long long)i * num_chosen + k] == e ? 1.0 : 0.0;
        probability += expf(widen(logits[(long long)i * num_experts + e]) - totals[2 * i]) / totals[2 * i + 1];
    }
    parts[threadIdx.x] = count;
    probabilities[threadIdx.x] = probability;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            parts[threadIdx.x] += parts[threadIdx.x + half];
            probabilities[threadIdx.x] += probabilities[threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    int place = e == num_experts ? 2 * num_experts : e;
    sums[place] = (first ? 0.0 : sums[place]) + parts[0];
    if (e < num_experts) sums[num_experts + e] = (first ? 0.0 : sums[num_experts + e]) + probabilities[0];
}
EXPORT(balance)

// One thread: the loss and its derivatives by the probabilities of a row
KERNEL balance_finish(const double *sums, double *loss, float *slopes, double scale, int num_experts) {
    double rows = sums[2 * num_experts] > 1.0 ? sums[2 * num_experts] : 1.0, factor = scale * num_experts / rows / rows, dot = 0.0;
    for (int e = 0; e < num_experts; e++) {
        dot += sums[e] * sums[num_experts + e];
        slopes[e] = (float)(factor * sums[e]);
    }
    loss[0] = factor * dot;
}
EXPORT(balance_finish)

KERNEL balance_backward(const T *logits, const float *slopes, const int *documents, T *dlogits, int num_experts, long long num_rows) {
    EACH(i, num_rows) {
        const T *row = logits + i * num_experts;
        float top, total = row_total(row, num_experts, top), dot = 0.0f, counts = documents && documents[i] == 0 ? 0.0f : 1.0f;
        for (int e = 0; e < num_experts; e++) dot += expf(widen(row[e]) - top) / total * slopes[e];
        for (int e = 0; e < num_experts; e++)
            dlogits[i * num_experts + e] = narrow<T>(counts * expf(widen(row[e]) - top) / total * (slopes[e] - dot));
    }
}
EXPORT(balance_backward)

// y = sigmoid(gate) x, one gate for each row
KERNEL row_gate(const T *gate, const T *x, T *y, int width, long long count) {
    EACH(i, count) y[i] = narrow<T>(sigmoid(widen(gate[i / width])) * widen(x[i]));
}
EXPORT(row_gate)

// A block a row
KERNEL row_gate_backward(const T *gate, const T *x, const T *dy, T *dx, T *dgate, int width, int first) {
    SHARED(float, buffer);
    long long row = blockIdx.x, start = row * width;
    float s = sigmoid(widen(gate[row])), dot = 0.0f;
    for (int j = threadIdx.x; j < width; j += blockDim.x) {
        float slope = widen(dy[start + j]);
        dot += slope * widen(x[start + j]);
        dx[start + j] = narrow<T>(s * slope);
    }
    dot = block_sum(dot, buffer);
    if (threadIdx.x == 0) dgate[row] = narrow<T>((first ? 0.0f : widen(dgate[row])) + dot * s * (1.0f - s));
}
EXPORT(row_gate_backward)
