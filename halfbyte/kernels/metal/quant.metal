// Quantised and dense weights: products with few rows (a simd group a few rows of the weight), with many (8x8
// matrices), reading rows out, and making the codes.

enum { SIMDS = 8, ROWS = 4, TILE = 1024 };  // of `matvec`: simd groups, rows of w for each, activations staged at once

// y[r, h, n] = sum_k x[r, h, k] w[h, n, k] for M rows of x. They pass through threadgroup memory a tile at a time, so K
// may be any length.
template <typename T, typename S, int MODE, int BITS, int GROUP, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void matvec(
    device const T *x, device const uint *words, device const S *scales, device const S *biases,
    device const float *factors, device T *y, constant int &N, constant int &K, constant int &rows, constant int &heads,
    constant long *strides, constant int &factor_step, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[M * TILE];
  int first = (group.x * SIMDS + simd) * ROWS, row = group.y * M, head = group.z;
  float factor = factor_step < 0 ? 1.0f : factors[head * factor_step];
  float sums[ROWS][M];
  for (int r = 0; r < ROWS; r++)
    for (int m = 0; m < M; m++) sums[r][m] = 0;
  for (int base = 0; base < K; base += TILE) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = index; i < M * TILE; i += SIMDS * 32) {
      int m = i / TILE, k = base + i % TILE;
      bool inside = k < K && row + m < rows;
      tile[i] = inside ? widen(x[(ulong(row + m) * heads + head) * K + k]) : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int k = lane * 8; k < TILE && base + k < K; k += 32 * 8) {
      float w[8];
      for (int r = 0; r < ROWS && first + r < N; r++) {
        eight_weights<MODE, BITS, GROUP>(words, scales, biases, strides, head, first + r, base + k, K, factor, w);
        for (int m = 0; m < M; m++)
          for (int j = 0; j < 8; j++) sums[r][m] = fma(w[j], tile[m * TILE + k + j], sums[r][m]);
      }
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int m = 0; m < M; m++) {
      float sum = simd_sum(sums[r][m]);
      if (lane == 0 && first + r < N && row + m < rows) {
        y[(ulong(row + m) * heads + head) * N + first + r] = narrow<T>(sum);
      }
    }
}

// The same for many rows, or, where OVER_ROWS, y[r, h, k] = sum_n x[r, h, n] w[h, n, k]: a threadgroup makes a tile of
// 32 x 32, each of its four simd groups a quarter of it.
template <typename T, typename S, int MODE, int BITS, int GROUP, int OVER_ROWS>
[[kernel, max_total_threads_per_threadgroup(128)]] void gemm(
    device const T *x, device const uint *words, device const S *scales, device const S *biases,
    device const float *factors, device T *y, constant int &N, constant int &K, constant int &rows, constant int &heads,
    constant long *strides, constant int &factor_step, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float left[BLOCK * PITCH];
  threadgroup float right[BLOCK * PITCH];
  int inner = OVER_ROWS ? N : K, width = OVER_ROWS ? K : N, head = group.z;
  int top = group.y * BLOCK, side = group.x * BLOCK, line = index / 4, column = index % 4 * 8;
  float factor = factor_step < 0 ? 1.0f : factors[head * factor_step];
  Quarter totals = empty_quarter();
  for (int base = 0; base < inner; base += BLOCK) {
    for (int j = 0; j < 8; j++) {
      int k = base + column + j;
      bool inside = top + line < rows && k < inner;
      left[line * PITCH + column + j] = inside ? widen(x[(ulong(top + line) * heads + head) * inner + k]) : 0.0f;
    }
    float w[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    int n = (OVER_ROWS ? base : side) + line, k = (OVER_ROWS ? side : base) + column;
    if (n < N && k < K) eight_weights<MODE, BITS, GROUP>(words, scales, biases, strides, head, n, k, K, factor, w);
    for (int j = 0; j < 8; j++) right[line * PITCH + column + j] = w[j];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    totals = multiplied(totals, left, right, !OVER_ROWS, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  put_quarter(totals, left, simd);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = index; i < BLOCK * BLOCK; i += 128) {
    int row = top + i / BLOCK, out = side + i % BLOCK;
    float made = left[i / BLOCK * PITCH + i % BLOCK];
    if (row < rows && out < width) y[(ulong(row) * heads + head) * width + out] = narrow<T>(made);
  }
}

// Rows of w, as ids name them or all in turn, formed in T step by step: mlx's bits. A thread writes eight weights.
template <typename T, typename S, typename I, int MODE, int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(256)]] void read_rows(
    device const I *ids, device const uint *words, device const S *scales, device const S *biases,
    device const float *factors, device T *y, constant int &count, constant int &N, constant int &K,
    constant long *strides, constant int &factor_step, constant int &chosen, uint place [[thread_position_in_grid]]) {
  int units = (K + 7) / 8;
  ulong line = place / units;
  int k = place % units * 8;
  if (line >= ulong(count)) return;
  ulong from = chosen ? ulong(ids[line]) : line;
  int matrix = from / N, row = from % N;
  ulong at = matrix * strides[SCALES_MATRIX] + row * strides[SCALES_ROW];
  if (MODE == DENSE) {
    for (int j = 0; j < 8 && k + j < K; j++) y[line * K + k + j] = narrow<T>(scale_value<MODE>(scales[at + k + j]));
    return;
  }
  uint codes[8];
  eight_codes<BITS>(words + matrix * strides[WORDS_MATRIX] + row * strides[WORDS_ROW], k, codes);
  at += k / GROUP;
  float scale = scale_value<MODE>(scales[at]);
  scale = factor_step < 0 ? widen(narrow<T>(scale)) : scale * factors[matrix * factor_step];
  float bias = MODE == AFFINE ? widen(narrow<T>(scale_value<MODE>(biases[at]))) : 0.0f;
  for (int j = 0; j < 8; j++) {
    float value = code_value<MODE>(codes[j]) * scale;
    if (MODE == AFFINE) value = widen(narrow<T>(value)) + bias;
    y[line * K + k + j] = narrow<T>(value);
  }
}

// How one group is coded: affine scale and bias, or a small float's step and factor.
struct Coding {
  float scale, bias, factor;
};

inline uint e4m3_code(float x) {
  x = clamp(x, -448.0f, 448.0f);
  uint bits = as_type<uint>(abs(x));
  uint normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  uint code = abs(x) < 0.015625f ? uint(rint(abs(x) * 512.0f)) : normal;
  return code | (as_type<uint>(x) >> 24 & 128);
}

// The nearest e2m1 code, the lower of two as near; distances are rounded to T, as mlx forms them.
template <typename T> inline uint e2m1_code(float x) {
  float best = INFINITY;
  uint code = 0;
  for (uint i = 0; i < 16; i++) {
    float distance = abs(widen(narrow<T>(x - e2m1(i))));
    if (distance < best) {
      best = distance;
      code = i;
    }
  }
  return code;
}

template <typename T, int MODE, int BITS> inline uint coded(float x, Coding c) {
  if (MODE == AFFINE) {
    float q = rint((x - c.bias) / c.scale);
    return q > 0 ? uint(min(q, float((1 << BITS) - 1))) : 0;  // a constant huge group has scale 0 and NaN here
  }
  float scaled = c.scale == 0 ? 0.0f : widen(narrow<T>(x / c.scale));
  if (c.factor != 0) scaled *= c.factor;
  if (MODE == MXFP8) return e4m3_code(scaled);
  return c.factor != 0 ? e2m1_code<float>(scaled) : e2m1_code<T>(scaled);
}

inline Coding affine_coding(float low, float high, int bits) {
  bool from_low = abs(low) > abs(high);
  float scale = max((high - low) / float((1 << bits) - 1), 1e-7f), edge = from_low ? low : high;
  scale = from_low ? scale : -scale;
  float steps = rint(edge / scale);
  Coding c;
  c.scale = steps != 0 ? edge / steps : scale;
  c.bias = steps != 0 ? edge : 0.0f;
  c.factor = 0;
  return c;
}

// The exponent of the power of two at or above x, as mlx rounds its logarithm.
inline float power_above(float x) {
  if (x == 0) return 0;
  int shift = x < 1e-30f ? 64 : 0;
  uint bits = as_type<uint>(ldexp(x, shift));
  float mantissa = as_type<float>((bits & 0x7fffff) | 0x3f800000);
  float exponent = float(int(bits >> 23) - 127 - shift) + precise::log2(mantissa);
  return clamp(ceil(exponent), -127.0f, 127.0f);
}

template <typename S> inline S stored_scale(float scale, uint) { return narrow<S>(scale); }
template <> inline uchar stored_scale<uchar>(float, uint code) { return uchar(code); }

// A simd group a group of weights: lanes share the reading, then each packs whole words.
template <typename T, typename S, int MODE, int BITS, int GROUP>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize(
    device const T *w, device const float *global_scales, device uint *words, device S *scales, device S *biases,
    constant int &groups, constant int &groups_each, constant int &has_global,
    uint place [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  ulong group = ulong(place) * SIMDS + simd;
  if (group >= ulong(groups)) return;
  float low = INFINITY, high = -INFINITY;
  for (int i = lane; i < GROUP; i += 32) {
    float x = widen(w[group * GROUP + i]);
    low = min(low, x);
    high = max(high, x);
  }
  low = simd_min(low);
  high = simd_max(high);
  Coding c = affine_coding(low, high, BITS);
  uint scale_code = 0;
  if (MODE != AFFINE) {
    float ideal = widen(narrow<T>(max(abs(low), abs(high)) / (MODE == MXFP8 ? 448.0f : 6.0f)));
    c.factor = has_global ? 2688.0f / global_scales[group / groups_each] : 0.0f;
    scale_code = MODE == NVFP4 ? e4m3_code(has_global ? ideal * c.factor : ideal) : uint(power_above(ideal) + 127);
    c.scale = widen(narrow<T>(MODE == NVFP4 ? e4m3(scale_code) : power_of_two(scale_code)));
  }
  for (int i = lane; i < GROUP * BITS / 32; i += 32) {
    uint word = 0;
    for (int k = 32 * i / BITS; k * BITS < 32 * i + 32; k++) {
      uint code = coded<T, MODE, BITS>(widen(w[group * GROUP + k]), c);
      int shift = k * BITS - 32 * i;
      word |= shift < 0 ? code >> -shift : code << shift;
    }
    words[group * (GROUP * BITS / 32) + i] = word;
  }
  if (lane == 0) scales[group] = stored_scale<S>(c.scale, scale_code);
  if (lane == 0 && MODE == AFFINE) biases[group] = stored_scale<S>(c.bias, 0);
}
