// One projection of the experts that tokens chose. Few choices: each is a product of a matrix and a vector. Many:
// choices are sorted by expert, and a tile of 32 of them shares each reading of a weight.

enum { SIMDS = 8, ROWS = 4, TILE = 1024 };  // of `chosen_matvec`: as matvec's

// Where a buffer begins, for experts that lie apart.
struct Address {
  device const uchar *at;
};

// Weights k ... k + 7 of a row of an expert, from a stack or from buffers that lie apart.
template <int MODE, int BITS, int GROUP, int APART, typename S> inline void eight_of(
    device const uint *words, device const S *scales, device const S *biases, constant long *strides,
    constant Address *words_of, constant Address *scales_of, constant Address *biases_of, int expert, int row, int k,
    int K, float factor, thread float *w) {
  if (APART) {
    eight_scattered<MODE, BITS, GROUP, S>(
        words_of[expert].at, scales_of[expert].at, biases_of[expert].at, row, k, K, w);
  } else {
    eight_weights<MODE, BITS, GROUP>(words, scales, biases, strides, expert, row, k, K, factor, w);
  }
}

// y[c] = w[ids[c]] x[c / share] for every choice c.
template <typename T, typename Y, typename I, typename S, int MODE, int BITS, int GROUP, int APART>
[[kernel, max_total_threads_per_threadgroup(256)]] void chosen_matvec(
    device const T *x, device const I *ids, device const uint *words, device const S *scales, device const S *biases,
    device const float *factors, constant Address *words_of, constant Address *scales_of, constant Address *biases_of,
    device Y *y, constant int &N, constant int &K, constant int &share, constant long *strides,
    constant int &factor_step, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[TILE];
  int first = (group.x * SIMDS + simd) * ROWS, expert = ids[group.y];
  device const T *own = x + ulong(group.y / share) * K;
  float factor = factor_step < 0 ? 1.0f : factors[expert * factor_step];
  float sums[ROWS] = {0, 0, 0, 0};
  for (int base = 0; base < K; base += TILE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = index; i < TILE; i += SIMDS * 32) tile[i] = base + i < K ? widen(own[base + i]) : 0.0f;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = lane * 8; k < TILE && base + k < K; k += 32 * 8) {
      float w[8];
      for (int r = 0; r < ROWS && first + r < N; r++) {
        eight_of<MODE, BITS, GROUP, APART>(
            words, scales, biases, strides, words_of, scales_of, biases_of, expert, first + r, base + k, K, factor, w);
        for (int j = 0; j < 8; j++) sums[r] = fma(w[j], tile[k + j], sums[r]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float sum = simd_sum(sums[r]);
    if (lane == 0 && first + r < N) y[ulong(group.y) * N + first + r] = narrow<Y>(sum);
  }
}

// The same for a tile of up to 32 choices of one expert. `sorted` lists the choices by expert, expert e's from
// starts[e]; its tiles begin at number tiles[e].
template <typename T, typename Y, typename I, typename S, int MODE, int BITS, int GROUP, int APART>
[[kernel, max_total_threads_per_threadgroup(128)]] void chosen_gemm(
    device const T *x, device const I *sorted, device const uint *words, device const S *scales, device const S *biases,
    device const float *factors, constant Address *words_of, constant Address *scales_of, constant Address *biases_of,
    device Y *y, constant int &N, constant int &K, constant int &share, constant long *strides,
    constant int &factor_step, device const long *starts, device const long *tiles,
    constant int &E, uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float left[BLOCK * PITCH];
  threadgroup float right[BLOCK * PITCH];
  int expert = 0;
  for (int step = 1 << 24; step > 0; step /= 2)
    if (expert + step < E && tiles[expert + step] <= long(group.y)) expert += step;
  long from = starts[expert] + (group.y - tiles[expert]) * BLOCK;
  int count = int(min(starts[expert + 1] - from, long(BLOCK)));
  if (count <= 0) return;  // there are never more tiles than were launched, but often fewer
  int side = group.x * BLOCK, line = index / 4, column = index % 4 * 8;
  float factor = factor_step < 0 ? 1.0f : factors[expert * factor_step];
  ulong choice = line < count ? ulong(sorted[from + line]) : 0;
  Quarter totals = empty_quarter();
  for (int base = 0; base < K; base += BLOCK) {
    for (int j = 0; j < 8; j++) {
      int k = base + column + j;
      left[line * PITCH + column + j] = line < count && k < K ? widen(x[choice / share * K + k]) : 0.0f;
    }
    float w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int n = side + line, k = base + column;
    if (n < N && k < K) {
      eight_of<MODE, BITS, GROUP, APART>(
          words, scales, biases, strides, words_of, scales_of, biases_of, expert, n, k, K, factor, w);
    }
    for (int j = 0; j < 8; j++) right[line * PITCH + column + j] = w[j];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    totals = multiplied(totals, left, right, true, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  put_quarter(totals, left, simd);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = index; i < BLOCK * BLOCK; i += 128) {
    int row = i / BLOCK, n = side + i % BLOCK;
    if (row < count && n < N) y[ulong(sorted[from + row]) * N + n] = narrow<Y>(left[row * PITCH + i % BLOCK]);
  }
}
