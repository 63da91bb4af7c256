// Row ops: a threadgroup a row for the norms, a thread a few elements for the others.

enum { HAS_WEIGHT = 1, HAS_ADD = 2, HAS_MUL = 4, HAS_GATE = 8, HAS_RESIDUAL = 16, HAS_VECTOR = 32, WANTS_SUM = 64,
       WANTS_EXTRA = 128, HEAD_MAJOR = 256 };

// Where a row goes when [batch, token, head] becomes [batch, head, token].
inline ulong head_major(uint row, uint tokens, uint heads) {
  uint head = row % heads, token = row / heads % tokens, batch = row / heads / tokens;
  return (ulong(batch) * heads + head) * tokens + token;
}

template <int N, typename T> inline Floats<N> summed(device const T *x, device const T *add, ulong at, int flags) {
  Floats<N> s = load<N>(x, at);
  if (flags & HAS_ADD) {
    Floats<N> more = load<N>(add, at);
    for (int j = 0; j < N; j++) s.at[j] += more.at[j];
  }
  return s;
}

// 1 / sqrt(mean + eps) of the squares that all threads have summed.
inline Twofold root_mean(
    Twofold squares, threadgroup float *parts, uint simd, uint lane, uint simds, int D, float eps) {
  return inverse_root(plus(over(group_total(squares, parts, simd, lane, simds), D), eps));
}

template <typename T, typename W, typename E, int N>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm(
    device const T *x, device const W *weight, device const T *add, device const T *mul, device const T *gate,
    device const T *residual, device const float *scales, device T *y, device T *sum, device E *extra,
    constant int &D, constant float &eps, constant float &scale, constant int &flags, constant int &tokens,
    constant int &heads, uint row [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[64];
  ulong start = ulong(row) * D;
  ulong turned = flags & HEAD_MAJOR ? head_major(row, tokens, heads) * D : start;
  Twofold squares = twofold(0, 0);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> s = summed<N>(x, add, start + i, flags);
    for (int j = 0; j < N; j++) squares = plus(squares, product(s.at[j], s.at[j]));
  }
  Twofold norm = root_mean(squares, parts, simd, lane, threads / 32, D, eps);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> s = summed<N>(x, add, start + i, flags), w, m, g, r, v;
    if (flags & HAS_WEIGHT) w = load<N>(weight, i);
    if (flags & HAS_MUL) m = load<N>(mul, start + i);
    if (flags & HAS_GATE) g = load<N>(gate, start + i);
    if (flags & HAS_RESIDUAL) r = load<N>(residual, start + i);
    for (int j = 0; j < N; j++) {
      Twofold value = times(norm, s.at[j]);
      if (flags & HAS_WEIGHT) value = times(value, w.at[j]);
      if (flags & HAS_MUL) value = times(value, m.at[j]);
      if (flags & HAS_GATE) value = times(value, silu(g.at[j]));
      if (flags & HAS_RESIDUAL) value = plus(value, r.at[j]);
      v.at[j] = value.high * (flags & HAS_VECTOR ? scales[i + j] : scale);
    }
    store<N>(y, (flags & WANTS_EXTRA ? start : turned) + i, v);
    if (flags & WANTS_SUM) store<N>(sum, start + i, s);
    if (flags & WANTS_EXTRA) store<N>(extra, turned + i, v);
  }
}

// One statistic, up to four weights.
template <typename T, typename W, int N>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_many(
    device const T *x, device const W *w0, device const W *w1, device const W *w2, device const W *w3, device T *y0,
    device T *y1, device T *y2, device T *y3, constant int &D, constant float &eps, constant int &count,
    uint row [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint simd [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[64];
  ulong start = ulong(row) * D;
  Twofold squares = twofold(0, 0);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> s = load<N>(x, start + i);
    for (int j = 0; j < N; j++) squares = plus(squares, product(s.at[j], s.at[j]));
  }
  Twofold norm = root_mean(squares, parts, simd, lane, threads / 32, D, eps);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> s = load<N>(x, start + i);
    for (int k = 0; k < count; k++) {
      Floats<N> w = load<N>(k == 0 ? w0 : k == 1 ? w1 : k == 2 ? w2 : w3, i), v;
      for (int j = 0; j < N; j++) v.at[j] = times(times(norm, s.at[j]), w.at[j]).high;
      store<N>(k == 0 ? y0 : k == 1 ? y1 : k == 2 ? y2 : y3, start + i, v);
    }
  }
}

// residual + x norm weight: what a chain's second statistic is of.
template <int N, typename T, typename V> inline Floats<N> ended(
    device const T *x, device const V *weight, device const T *residual, ulong at, int i, Twofold norm) {
  Floats<N> s = load<N>(x, at), w = load<N>(weight, i), r = load<N>(residual, at);
  for (int j = 0; j < N; j++) r.at[j] = plus(times(times(norm, s.at[j]), w.at[j]), r.at[j]).high;
  return r;
}

template <typename T, typename V, typename W, int N>
[[kernel, max_total_threads_per_threadgroup(1024)]] void rms_norm_chain(
    device const T *x, device const V *weight, device const T *residual, device const T *residual2, device const W *w0,
    device const W *w1, device const W *w2, device const W *w3, device const float *scales, device T *middle,
    device T *y0, device T *y1, device T *y2, device T *y3, constant int &D, constant float &eps, constant int &count,
    constant float &scale, constant int &flags, uint row [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float parts[64];
  ulong start = ulong(row) * D;
  Twofold squares = twofold(0, 0);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> s = load<N>(x, start + i);
    for (int j = 0; j < N; j++) squares = plus(squares, product(s.at[j], s.at[j]));
  }
  Twofold first = root_mean(squares, parts, simd, lane, threads / 32, D, eps);
  squares = twofold(0, 0);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> r = ended<N>(x, weight, residual, start + i, i, first);
    for (int j = 0; j < N; j++) squares = plus(squares, product(r.at[j], r.at[j]));
  }
  Twofold second = root_mean(squares, parts, simd, lane, threads / 32, D, eps);
  for (int i = index * N; i < D; i += threads * N) {
    Floats<N> r = ended<N>(x, weight, residual, start + i, i, first), more;
    if (flags & HAS_RESIDUAL) more = load<N>(residual2, start + i);
    store<N>(middle, start + i, r);
    for (int k = 0; k < count; k++) {
      Floats<N> w = load<N>(k == 0 ? w0 : k == 1 ? w1 : k == 2 ? w2 : w3, i), v;
      for (int j = 0; j < N; j++) {
        Twofold value = times(times(second, r.at[j]), w.at[j]);
        if (flags & HAS_RESIDUAL) value = plus(value, more.at[j]);
        v.at[j] = value.high * (flags & HAS_VECTOR ? scales[i + j] : scale);
      }
      store<N>(k == 0 ? y0 : k == 1 ? y1 : k == 2 ? y2 : y3, start + i, v);
    }
  }
}

template <typename G, typename T, int ACTIVATION, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void glu(
    device const G *gate, device const T *up, device T *y, constant int &count,
    uint place [[thread_position_in_grid]]) {
  ulong i = ulong(place) * N;
  if (i >= ulong(count)) return;
  Floats<N> g = load<N>(gate, i), u = load<N>(up, i);
  for (int j = 0; j < N; j++) u.at[j] *= activated(g.at[j], ACTIVATION);
  store<N>(y, i, u);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void softcap(
    device const T *x, device T *y, constant int &count, constant float &cap, uint place [[thread_position_in_grid]]) {
  ulong i = ulong(place) * N;
  if (i >= ulong(count)) return;
  Floats<N> v = load<N>(x, i);
  for (int j = 0; j < N; j++) v.at[j] = precise::tanh(v.at[j] / cap) * cap;
  store<N>(y, i, v);
}

// Angles in turns, as 64 bits after the point: a turn wraps by itself, and a position times such a number is exact
// where a float32 product would be off by 1e-2 at position one million. A float has 24 bits, so its parts below are
// exact too.
inline ulong fraction(float turns) {
  float size = abs(turns);
  float upper = ldexp(size - floor(size), 32);
  ulong bits = (ulong(upper) << 32) + ulong(ldexp(upper - floor(upper), 32));
  return turns < 0 ? 0 - bits : bits;
}

// The fraction of frequency / 2 pi, with 1 / 2 pi as three floats.
inline ulong turns_of(float frequency) {
  const float c0 = 0.15915493667f, c1 = 6.4206382433e-09f, c2 = 7.342738699e-17f;
  float high = frequency * c0, middle = frequency * c1;
  return fraction(high) + fraction(fma(frequency, c0, -high)) + fraction(middle) +
         fraction(fma(frequency, c1, -middle)) + fraction(frequency * c2);
}

// Cosine and sine of a fraction of a turn, which one float would put off by 5e-7 near half a turn: its upper 24 bits
// and 2 pi / 2^24 as two floats make an angle and the little that is left of it, by which the result is turned on.
inline void rotation(long turn, thread float &cosine, thread float &sine) {
  const float c0 = 3.7450703871e-07f, c1 = -1.0421607086e-14f;
  float high = float(turn >> 40), low = ldexp(float(turn & 0xFFFFFFFFFF), -40), angle = high * c0;
  float rest = fma(high, c0, -angle) + (high * c1 + low * c0), c = precise::cos(angle), s = precise::sin(angle);
  cosine = fma(-rest, s, c);
  sine = fma(rest, c, s);
}

enum { PAIRS = 512, ROPE_HEADS = 8 };  // of a table of angles; of a threadgroup

template <typename T, typename P>
[[kernel, max_total_threads_per_threadgroup(256)]] void rope(
    device const T *x, device const P *positions, device const float *frequency, device const float *remainder,
    device T *y, constant int &count, constant int &H, constant int &D, constant int &rotary, constant int &interleaved,
    constant float &scale, constant int &split, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint3 threads [[threads_per_threadgroup]]) {
  threadgroup float cosines[PAIRS];
  threadgroup float sines[PAIRS];
  int first = group.y * ROPE_HEADS, heads = min(H - first, int(ROPE_HEADS)), half_way = rotary / 2, rest = D - rotary;
  ulong start = (ulong(group.x) * H + first) * D;
  long position = positions[group.x % count];
  for (int base = 0; base < half_way; base += PAIRS) {
    int pairs = min(half_way - base, int(PAIRS));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = index; i < pairs; i += threads.x) {
      ulong turn = turns_of(frequency[base + i]);
      if (split) turn += turns_of(remainder[base + i]);
      float cosine, sine;
      rotation(long(ulong(position) * turn), cosine, sine);
      bool finite = isfinite(frequency[base + i]);
      cosines[i] = finite ? cosine * scale : NAN;
      sines[i] = finite ? sine * scale : NAN;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = index; i < pairs * heads; i += threads.x) {
      int pair = i % pairs, one = base + pair;
      ulong a = start + ulong(i / pairs) * D + (interleaved ? 2 * one : one), b = a + (interleaved ? 1 : half_way);
      float left = widen(x[a]), right = widen(x[b]);
      y[a] = narrow<T>(left * cosines[pair] - right * sines[pair]);
      y[b] = narrow<T>(left * sines[pair] + right * cosines[pair]);
    }
  }
  for (int i = index; i < rest * heads; i += threads.x) {
    ulong at = start + ulong(i / rest) * D + rotary + i % rest;
    y[at] = x[at];
  }
}
