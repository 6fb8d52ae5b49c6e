// Buckets of distances, as `reference/buckets`.

#pragma once

// Distances of positions, key less query, in order, and their buckets: run r begins at first[r], which lies far before any text for the first.
#define MOST_RUNS 128
struct Runs {
    int count, first[MOST_RUNS], bucket[MOST_RUNS];
};

__device__ inline int bucket_of(const Runs &runs, int distance) {
    int r = 0;
    while (r + 1 < runs.count && distance >= runs.first[r + 1]) r++;
    return runs.bucket[r];
}
