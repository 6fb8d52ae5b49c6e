"""Compiled loops of routing: choice of experts, and the rows of one expert; fp32 and fp64 logits (see `compiled`)."""

from __future__ import annotations

import math

from .compiled import EXACT, Array, compiled


@compiled(EXACT)
def choose(logits: Array, choices: Array, weights: Array, flags: Array, renormalises: bool) -> None:
    """The K largest logits of each row, of equal ones the first; weights are their softmax over all  # (R, E) -> (R, K), (R, K), (E,)."""
    num_rows, num_experts = logits.shape
    zero = logits.dtype.type(0)
    for e in range(num_experts):
        flags[e] = 0
    for i in range(num_rows):
        row, chosen, weight = logits[i], choices[i], weights[i]
        for j in range(chosen.size):
            best = -1
            for e in range(num_experts):
                is_free = True
                for before in range(j):
                    if chosen[before] == e:
                        is_free = False
                if is_free and (best < 0 or row[e] > row[best]):
                    best = e
            chosen[j] = best
            flags[best] = 1
        top, total = row[chosen[0]], zero
        for e in range(num_experts):
            total += math.exp(row[e] - top)
        share = total
        if renormalises:
            share = total - total  # 0, or NaN if a logit is NaN
            for j in range(chosen.size):
                share += math.exp(row[chosen[j]] - top)
        for j in range(chosen.size):
            weight[j] = math.exp(row[chosen[j]] - top) / share


@compiled(EXACT)
def choose_backward(logits: Array, choices: Array, dweights: Array, dlogits: Array, renormalises: bool) -> None:
    """dlogits from dweights, which reach the chosen experts' probabilities  # (R, E), (R, K), (R, K) -> (R, E)."""
    num_rows, num_experts = logits.shape
    zero = logits.dtype.type(0)
    for i in range(num_rows):
        row, chosen, dweight, out = logits[i], choices[i], dweights[i], dlogits[i]
        top, total = row[chosen[0]], zero
        for e in range(num_experts):
            out[e] = math.exp(row[e] - top)
            total += out[e]
        nothing = total - total  # 0, or NaN if a logit is NaN
        dot, share = zero, nothing
        for j in range(chosen.size):
            dot += dweight[j] * out[chosen[j]]
            share += out[chosen[j]]
        mean = dot / (share if renormalises else total)
        for e in range(num_experts):  # no weight: with renormalisation such an expert has no effect
            p = out[e] / total
            is_chosen = False
            for j in range(chosen.size):
                if chosen[j] == e:
                    is_chosen = True
            if not is_chosen:
                out[e] = nothing if renormalises else -p * mean
        for j in range(chosen.size):
            e = chosen[j]
            out[e] = out[e] / (share if renormalises else total) * (dweight[j] - mean)


@compiled(EXACT)
def rows_of(choices: Array, expert: int, rows: Array, slots: Array) -> int:
    """Write the rows that chose an expert, in order, and the slot of that choice in each; return how many there are  # (R, K) -> (R,), (R,)."""
    count = 0
    for i in range(choices.shape[0]):
        for j in range(choices.shape[1]):
            if choices[i, j] == expert:
                rows[count], slots[count] = i, j
                count += 1
    return count


@compiled(EXACT)
def add_to_rows(addend: Array, rows: Array, weights: Array, slots: Array, total: Array) -> None:
    """total[rows] += weights[rows, slots] * addend  # (n, c), (n,), (R, K), (n,) -> (R, c)."""
    for i in range(rows.size):
        weight, source, target = weights[rows[i], slots[i]], addend[i], total[rows[i]]
        for j in range(source.size):
            target[j] += weight * source[j]


@compiled(EXACT)
def balance(logits: Array, choices: Array, documents: Array, sums: Array) -> None:
    """Add choices, probabilities and rows that are not of document 0 to the sums of each  # (R, E), (R, K), (R,) or (0,) -> (2 E + 1,)."""
    num_rows, num_experts = logits.shape
    zero = logits.dtype.type(0)
    for i in range(num_rows):
        if documents.size > 0 and documents[i] == 0:
            continue
        row = logits[i]
        top = row[choices[i, 0]]
        total = zero
        for e in range(num_experts):
            total += math.exp(row[e] - top)
        for j in range(choices.shape[1]):
            sums[choices[i, j]] += 1.0
        for e in range(num_experts):
            sums[num_experts + e] += math.exp(row[e] - top) / total
        sums[2 * num_experts] += 1.0


@compiled(EXACT)
def balance_backward(logits: Array, slopes: Array, documents: Array, dlogits: Array) -> None:
    """dlogits = p (slopes - sum of p slopes), 0 in document 0  # (R, E), (E,), (R,) or (0,) -> (R, E)."""
    num_rows, num_experts = logits.shape
    zero = logits.dtype.type(0)
    for i in range(num_rows):
        row, out = logits[i], dlogits[i]
        if documents.size > 0 and documents[i] == 0:
            for e in range(num_experts):
                out[e] = 0
            continue
        top = row[0]
        for e in range(num_experts):
            top = max(top, row[e])
        total, dot = zero, zero
        for e in range(num_experts):
            out[e] = math.exp(row[e] - top)
            total += out[e]
            dot += out[e] * slopes[e]
        for e in range(num_experts):
            out[e] = out[e] / total * (slopes[e] - dot / total)


@compiled(EXACT)
def add_rows(addend: Array, rows: Array, total: Array) -> None:
    """total[rows] += addend  # (n, c), (n,) -> (R, c)."""
    for i in range(rows.size):
        source, target = addend[i], total[rows[i]]
        for j in range(source.size):
            target[j] += source[j]


@compiled(EXACT)
def scale_rows(x: Array, rows: Array, weights: Array, slots: Array) -> None:
    """x *= weights[rows, slots]  # (n, c), (n,), (R, K), (n,)."""
    for i in range(rows.size):
        weight, row = weights[rows[i], slots[i]], x[i]
        for j in range(row.size):
            row[j] *= weight


@compiled(EXACT)
def weigh(dhidden: Array, hidden: Array, rows: Array, slots: Array, weights: Array, dweights: Array) -> None:
    """dweights[rows, slots] += sum of dhidden hidden; then dhidden *= weights[rows, slots]  # (n, I), (n, I), (n,), (n,), (R, K), (R, K)."""
    for i in range(rows.size):
        r, k = rows[i], slots[i]
        slope, value, weight = dhidden[i], hidden[i], weights[r, k]
        dot = weights.dtype.type(0)
        for j in range(slope.size):
            dot += slope[j] * value[j]
            slope[j] *= weight
        dweights[r, k] += dot


@compiled(EXACT)
def row_gate(gate: Array, x: Array, y: Array) -> None:
    """y = sigmoid(gate) x  # (R,), (R, c) -> (R, c)."""
    one = x.dtype.type(1)
    for i in range(gate.size):
        factor = one / (one + math.exp(-gate[i]))
        for j in range(x.shape[1]):
            y[i, j] = factor * x[i, j]


@compiled(EXACT)
def row_gate_backward(gate: Array, x: Array, dy: Array, dx: Array, dgate: Array, first: bool) -> None:
    """dx = sigmoid(gate) dy; dgate (+)= sigmoid (1 - sigmoid) sum of x dy  # (R,), (R, c), (R, c) -> (R, c), (R,)."""
    one = x.dtype.type(1)
    for i in range(gate.size):
        factor = one / (one + math.exp(-gate[i]))
        dot = one - one
        for j in range(x.shape[1]):
            dx[i, j] = factor * dy[i, j]
            dot += x[i, j] * dy[i, j]
        share = dot * factor * (one - factor)
        dgate[i] = share if first else dgate[i] + share
