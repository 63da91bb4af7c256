// A token of each row, without sorting: a threadgroup a row. Score and id make one integer that orders tokens as the op
// does, larger scores first, then lower ids; what top-k and top-p leave is everything from one such integer up, the
// cut, which is found four bits at a time. Weights are integers, so that sums do not depend on how they are split.

enum { HAS_TEMPERATURE = 1, HAS_TOP_K = 2, HAS_TOP_P = 4, HAS_MIN_P = 8, HAS_REPETITION = 16, HAS_PRESENCE = 32,
       HAS_FREQUENCY = 64 };
enum { BINS = 16 };

// A row's logits and what is done to them.
template <typename T> struct Row {
  device const T *logits;
  device const int *counts;
  float temperature, repetition, presence, frequency;
  int V, id_bits, flags;
};

// After the penalties, rounded as the torch body rounds; -inf for NaN.
template <typename T> inline float penalised(Row<T> row, int id) {
  float x = widen(row.logits[id]);
  if (row.flags & (HAS_REPETITION | HAS_PRESENCE | HAS_FREQUENCY)) {
    int count = row.counts[id];
    if (count > 0 && row.flags & HAS_REPETITION) x = x > 0 ? x / row.repetition : x * row.repetition;
    if (count > 0 && row.flags & HAS_PRESENCE) x = x - row.presence;
    if (row.flags & HAS_FREQUENCY) x = x - row.frequency * float(count);
  }
  return isnan(x) ? -INFINITY : x;
}
template <typename T> inline float scaled(Row<T> row, int id) {
  float x = penalised(row, id);
  if (row.flags & HAS_TEMPERATURE) x = x / row.temperature;
  return isnan(x) ? -INFINITY : x;
}

inline ulong key_of(float value, int id, int id_bits) {
  uint bits = as_type<uint>(value == 0 ? 0.0f : value);
  uint order = bits >> 31 ? ~bits : bits | 0x80000000;
  return (ulong(order) << id_bits) | ((1ul << id_bits) - 1 - ulong(id));
}

// Over a threadgroup, through parts [32] of each half; 64 bits go through a simd group in two words.
inline ulong exchanged(ulong value, ushort by) {
  return ulong(simd_shuffle_xor(uint(value >> 32), by)) << 32 | simd_shuffle_xor(uint(value), by);
}
inline ulong simd_total(ulong value) {
  for (ushort by = 1; by < 32; by *= 2) value += exchanged(value, by);
  return value;
}
inline ulong simd_largest(ulong value) {
  for (ushort by = 1; by < 32; by *= 2) value = max(value, exchanged(value, by));
  return value;
}
inline ulong group_largest(ulong value, threadgroup ulong *parts, uint simd, uint lane, uint simds) {
  value = simd_largest(value);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) parts[simd] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_largest(lane < simds ? parts[lane] : 0);
}

// Four random words of Philox4x32-10; word id % 4 is the token's.
inline float gumbel(ulong seed, ulong position, uint id) {
  uint a = id / 4, b = uint(position), c = uint(position >> 32), d = 0, low = uint(seed), high = uint(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint above = mulhi(0xCD9E8D57u, c) ^ b ^ low, under = mulhi(0xD2511F53u, a) ^ d ^ high;
    b = 0xCD9E8D57u * c;
    d = 0xD2511F53u * a;
    a = above;
    c = under;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  uint bits = id % 4 == 0 ? a : id % 4 == 1 ? b : id % 4 == 2 ? c : d;
  float uniform = (float(bits >> 9) + 0.5f) * 1.1920928955078125e-07f;
  return -precise::log(-precise::log(uniform));
}

// A probability in units of 2^-62 of the row.
inline ulong mass_of(float s, float top, float total) { return ulong(ldexp(precise::exp(s - top) / total, 62)); }

// The largest key such that what is at or above it weighs at least `target`; 0 where all together do not. A token
// weighs 1, or its mass where `total` is above 0; below `from` it weighs nothing.
template <typename T> inline ulong cut_of(
    Row<T> row, ulong from, ulong target, float top, float total, threadgroup ulong *parts, uint index, uint threads,
    uint simd, uint lane) {
  ulong cut = 0;
  for (int shift = (32 + row.id_bits + 3) / 4 * 4 - 4; shift >= 0; shift -= 4) {
    ulong weights[BINS];
    for (int b = 0; b < BINS; b++) weights[b] = 0;
    for (int id = index; id < row.V; id += threads) {
      float s = scaled(row, id);
      ulong key = key_of(s, id, row.id_bits);
      if (key < from || key < cut) continue;
      weights[min((key - cut) >> shift, ulong(BINS - 1))] += total > 0 ? mass_of(s, top, total) : 1;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int b = 0; b < BINS; b++) {
      ulong sum = simd_total(weights[b]);
      if (lane == 0) parts[simd * BINS + b] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong above = 0;
    int chosen = 0;
    for (int b = BINS - 1; b > 0 && chosen == 0; b--) {
      for (uint s = 0; s < threads / 32; s++) above += parts[s * BINS + b];
      if (above >= target) chosen = b;
    }
    cut += ulong(chosen) << shift;
  }
  return cut;
}

template <typename T, typename P>
[[kernel, max_total_threads_per_threadgroup(1024)]] void sample(
    device const T *logits, device const int *counts, device const float *temperature, device const int *top_k,
    device const float *top_p, device const float *min_p, device const float *repetition, device const float *presence,
    device const float *frequency, device const long *seeds, device const P *positions, device int *out,
    constant int &V, constant int &id_bits, constant int &flags, uint line [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong parts[32 * BINS];
  threadgroup float sums[32];
  uint simds = threads / 32;
  Row<T> row;
  row.logits = logits + ulong(line) * V;
  row.counts = counts + ulong(line) * V;
  row.temperature = flags & HAS_TEMPERATURE ? temperature[line] : 1.0f;
  row.repetition = flags & HAS_REPETITION ? repetition[line] : 1.0f;
  row.presence = flags & HAS_PRESENCE ? presence[line] : 0.0f;
  row.frequency = flags & HAS_FREQUENCY ? frequency[line] : 0.0f;
  row.V = V;
  row.id_bits = id_bits;
  row.flags = flags;
  ulong best = 0, mask = (1ul << id_bits) - 1;
  float top = -INFINITY;
  for (int id = index; id < V; id += threads) {
    best = max(best, key_of(penalised(row, id), id, id_bits));
    top = max(top, scaled(row, id));
  }
  top = group_max(top, sums, simd, lane, simds);
  if (isinf(top) || row.temperature == 0) {  // the largest logit, without a draw
    best = group_largest(best, parts, simd, lane, simds);
    if (index == 0) out[line] = int(mask - (best & mask));
    return;
  }
  ulong cut = 0;
  int k = flags & HAS_TOP_K ? top_k[line] : 0;
  if (k > 0 && k < V) cut = cut_of(row, 0, ulong(k), top, 0.0f, parts, index, threads, simd, lane);
  float p = flags & HAS_TOP_P ? top_p[line] : 1.0f;
  if (p < 1) {
    float total = 0;
    for (int id = index; id < V; id += threads) {
      float s = scaled(row, id);
      if (key_of(s, id, id_bits) >= cut) total += precise::exp(s - top);
    }
    total = group_sum(total, sums, simd, lane, simds);
    cut = max(cut, cut_of(row, cut, ulong(ldexp(p, 62)), top, total, parts, index, threads, simd, lane));
  }
  float least = flags & HAS_MIN_P ? min_p[line] : 0.0f, bar = least > 0 ? top + precise::log(least) : -INFINITY;
  best = 0;
  for (int id = index; id < V; id += threads) {
    float s = scaled(row, id);
    if (s < bar || key_of(s, id, id_bits) < cut) continue;
    best = max(best, key_of(s + gumbel(ulong(seeds[line]), ulong(positions[line]), id), id, id_bits));
  }
  best = group_largest(best, parts, simd, lane, simds);
  if (index == 0) out[line] = int(mask - (best & mask));
}
