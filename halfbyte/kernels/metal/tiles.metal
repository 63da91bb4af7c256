// Tiles of 32 x 32 floats in threadgroup memory, multiplied by the four simd groups of 128 threads: a quarter each, as
// 2 x 2 matrices of 8 x 8.

enum { BLOCK = 32, PITCH = 36 };  // a tile's side, and the distance of its rows

struct Quarter {
  float at[2][2][2];
};

inline Quarter empty_quarter() {
  Quarter q;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) q.at[i][j][0] = q.at[i][j][1] = 0;
  return q;
}

// totals + left right, or left right^T where `turned`. A sum of sums errs less than one long chain.
inline Quarter multiplied(
    Quarter totals, threadgroup const float *left, threadgroup const float *right, bool turned, uint simd) {
  simdgroup_float8x8 sums[2][2], a, b;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  int down = simd / 2 * 16, across = simd % 2 * 16;
  for (int step = 0; step < BLOCK; step += 8)
    for (int i = 0; i < 2; i++) {
      simdgroup_load(a, left + (down + 8 * i) * PITCH + step, PITCH);
      for (int j = 0; j < 2; j++) {
        int out = across + 8 * j;
        if (turned) simdgroup_load(b, right + out * PITCH + step, PITCH, ulong2(0, 0), true);
        else simdgroup_load(b, right + step * PITCH + out, PITCH);
        simdgroup_multiply_accumulate(sums[i][j], a, b, sums[i][j]);
      }
    }
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++)
      for (int e = 0; e < 2; e++) totals.at[i][j][e] += sums[i][j].thread_elements()[e];
  return totals;
}

inline void put_quarter(Quarter totals, threadgroup float *tile, uint simd) {
  simdgroup_float8x8 m;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) {
      for (int e = 0; e < 2; e++) m.thread_elements()[e] = totals.at[i][j][e];
      simdgroup_store(m, tile + (simd / 2 * 16 + 8 * i) * PITCH + simd % 2 * 16 + 8 * j, PITCH);
    }
}

inline Quarter take_quarter(threadgroup const float *tile, uint simd) {
  simdgroup_float8x8 m;
  Quarter taken;
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) {
      simdgroup_load(m, tile + (simd / 2 * 16 + 8 * i) * PITCH + simd % 2 * 16 + 8 * j, PITCH);
      for (int e = 0; e < 2; e++) taken.at[i][j][e] = m.thread_elements()[e];
    }
  return taken;
}

inline Quarter plus(Quarter a, Quarter b) {
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++)
      for (int e = 0; e < 2; e++) a.at[i][j][e] += b.at[i][j][e];
  return a;
}

inline Quarter times(Quarter totals, float factor) {
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++)
      for (int e = 0; e < 2; e++) totals.at[i][j][e] *= factor;
  return totals;
}

// Eight columns of a row into a tile; zeros beyond the row's end, and where there is no row.
template <typename T> inline void stage(
    threadgroup float *tile, device const T *row, bool present, int from, int D, int line, int column) {
  for (int j = 0; j < 8; j++) {
    int at = from + column + j;
    tile[line * PITCH + column + j] = present && at < D ? widen(row[at]) : 0.0f;
  }
}

// Each row times its factor, of which `factors` [32, 8] holds eight: a matrix of them lies in the lanes as the totals
// do.
inline Quarter rescaled(Quarter totals, threadgroup const float *factors, uint simd) {
  simdgroup_float8x8 m;
  for (int i = 0; i < 2; i++) {
    simdgroup_load(m, factors + (simd / 2 * 16 + 8 * i) * 8, 8);
    for (int j = 0; j < 2; j++)
      for (int e = 0; e < 2; e++) totals.at[i][j][e] *= m.thread_elements()[e];
  }
  return totals;
}
