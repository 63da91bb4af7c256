// Attention of one query: a threadgroup's simd groups share its keys by position, each with a running maximum, sum and
// weighted values, and put them together at the end. A query's bits depend on positions alone: not on where rows lie.

enum { SIMDS = 8, PIECE = 512 };  // of a threadgroup; columns put together at once
enum { HAS_SLOTS = 1, HAS_LENGTHS = 2, IS_CAUSAL = 4, WANTS_LSE = 8, HAS_WINDOW = 16, HAS_CAP = 32 };
enum { K_SLOT, K_ROW, K_HEAD, K2_SLOT, K2_ROW, V_SLOT, V_ROW, V_HEAD };  // what `strides` holds, in elements

// score = q . k + q2 . k2: attention has no second part (D2 = 0), latents have their rotated one there. A lane holds
// every 32nd column: PER of a query, PER2 of its second part, PERV of the result.
template <
    typename T, typename P, typename K, typename K2, typename V, typename I, typename J, int PER, int PER2, int PERV>
[[kernel, max_total_threads_per_threadgroup(256)]] void attend(
    device const T *q, device const P *q2, device const K *k, device const K2 *k2, device const V *v,
    device const I *slots, device const J *lengths, device T *o, device float *lse, constant int &L, constant int &H,
    constant int &G, constant int &D, constant int &D2, constant int &Dv, constant int &S, constant long *strides,
    constant float &scale, constant float &cap, constant int &window, constant int &flags,
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tops[SIMDS];
  threadgroup float totals[SIMDS];
  threadgroup float parts[SIMDS * PIECE];
  int head = group.x, kv_head = head / (H / G);
  long request = group.z, slot = flags & HAS_SLOTS ? long(slots[request]) : request;
  long length = flags & HAS_LENGTHS ? long(lengths[request]) : S, place = length - L + long(group.y);
  ulong row = (ulong(request) * L + group.y) * H + head;
  long last = flags & IS_CAUSAL ? place : length - 1, first = max(length - S, long(0));
  if (flags & HAS_WINDOW) first = max(first, place - window + 1);
  if (place < 0) last = -1;
  float query[PER], query2[PER2 + 1], sum[PERV], top = -INFINITY, total = 0;
  for (int i = 0; i < PER; i++) query[i] = i * 32 + int(lane) < D ? widen(q[row * D + i * 32 + lane]) : 0.0f;
  for (int i = 0; i < PER2; i++) query2[i] = i * 32 + int(lane) < D2 ? widen(q2[row * D2 + i * 32 + lane]) : 0.0f;
  for (int i = 0; i < PERV; i++) sum[i] = 0;
  for (long position = first + (simd + SIMDS - first % SIMDS) % SIMDS; position <= last; position += SIMDS) {
    long at = position % S;
    device const K *key = k + slot * strides[K_SLOT] + at * strides[K_ROW] + kv_head * strides[K_HEAD];
    device const K2 *key2 = k2 + slot * strides[K2_SLOT] + at * strides[K2_ROW];
    device const V *value = v + slot * strides[V_SLOT] + at * strides[V_ROW] + kv_head * strides[V_HEAD];
    float score = 0;
    for (int i = 0; i < PER; i++)
      if (i * 32 + int(lane) < D) score = fma(query[i], widen(key[i * 32 + lane]), score);
    for (int i = 0; i < PER2; i++)
      if (i * 32 + int(lane) < D2) score = fma(query2[i], widen(key2[i * 32 + lane]), score);
    score = simd_sum(score) * scale;
    if (flags & HAS_CAP) score = cap * precise::tanh(score / cap);
    float higher = max(top, score), shift = higher == -INFINITY ? 0.0f : higher;
    float kept = precise::exp(top - shift), weight = precise::exp(score - shift);
    for (int i = 0; i < PERV; i++)
      if (i * 32 + int(lane) < Dv) sum[i] = fma(weight, widen(value[i * 32 + lane]), sum[i] * kept);
    total = fma(total, kept, weight);
    top = higher;
  }
  if (lane == 0) {
    tops[simd] = top;
    totals[simd] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float highest = -INFINITY, all = 0, share[SIMDS];
  for (int s = 0; s < SIMDS; s++) highest = max(highest, tops[s]);
  float shift = highest == -INFINITY ? 0.0f : highest;
  for (int s = 0; s < SIMDS; s++) {
    share[s] = precise::exp(tops[s] - shift);
    all += share[s] * totals[s];
  }
  for (int base = 0; base < Dv; base += PIECE) {
    for (int i = base / 32; i < PERV && i < (base + PIECE) / 32; i++)
      parts[simd * PIECE + i * 32 - base + lane] = sum[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int column = base + index; column < Dv && column < base + PIECE; column += SIMDS * 32) {
      float made = 0;
      for (int s = 0; s < SIMDS; s++) made = fma(share[s], parts[s * PIECE + column - base], made);
      o[row * Dv + column] = narrow<T>(made / (all == 0 ? 1.0f : all));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (flags & WANTS_LSE && index == 0) lse[row] = shift + precise::log(all);
}

// The same for 32 queries of one kv head at a time, against 32 keys at a time. A row of a tile is a query: token i and
// query head m of the group, token by token. Four threads share its scores. Keys that a query does not see weigh
// nothing, exactly, so its bits do not depend on its neighbours.
template <typename T, typename P, typename K, typename K2, typename V, typename I, typename J, int BLOCKS>
[[kernel, max_total_threads_per_threadgroup(128)]] void attend_tiles(
    device const T *q, device const P *q2, device const K *k, device const K2 *k2, device const V *v,
    device const I *slots, device const J *lengths, device T *o, device float *lse, constant int &L, constant int &H,
    constant int &G, constant int &D, constant int &D2, constant int &Dv, constant int &S, constant long *strides,
    constant float &scale, constant float &cap, constant int &window, constant int &flags,
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float left[BLOCK * PITCH];
  threadgroup float right[BLOCK * PITCH];
  threadgroup float weights[BLOCK * PITCH];
  threadgroup float factors[BLOCK * 8];
  threadgroup int odd[4];
  int per = H / G, kv_head = group.y, queries = L * per, start = group.x * BLOCK;
  int line = index / 4, column = index % 4 * 8;
  long request = group.z, slot = flags & HAS_SLOTS ? long(slots[request]) : request;
  long length = flags & HAS_LENGTHS ? long(lengths[request]) : S, oldest = max(length - S, long(0));
  bool inside = start + line < queries;
  int token = (start + line) / per;
  ulong row = (ulong(request) * L + token) * H + kv_head * per + (start + line) % per;
  long place = length - L + token, first = flags & HAS_WINDOW ? max(oldest, place - window + 1) : oldest;
  long last = !inside || place < 0 ? -1 : flags & IS_CAUSAL ? place : length - 1;
  long lowest = length - L + start / per - window + 1, newest = length - L + (min(start + BLOCK, queries) - 1) / per;
  long low = flags & HAS_WINDOW ? max(oldest, lowest) : oldest, high = flags & IS_CAUSAL ? newest : length - 1;
  float top = -INFINITY, total = 0;
  Quarter sums[BLOCKS];
  for (int c = 0; c < BLOCKS; c++) sums[c] = empty_quarter();
  for (long base = low - low % BLOCK; base <= high; base += BLOCK) {
    long at = (base + line) % S;
    bool seen = base + line >= low && base + line <= high;
    device const K *key = k + slot * strides[K_SLOT] + at * strides[K_ROW] + kv_head * strides[K_HEAD];
    device const K2 *key2 = k2 + slot * strides[K2_SLOT] + at * strides[K2_ROW];
    device const V *value = v + slot * strides[V_SLOT] + at * strides[V_ROW] + kv_head * strides[V_HEAD];
    Quarter scores = empty_quarter();
    for (int from = 0; from < D; from += BLOCK) {
      stage(left, q + row * D, inside, from, D, line, column);
      stage(right, key, seen, from, D, line, column);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      scores = multiplied(scores, left, right, true, simd);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    for (int from = 0; from < D2; from += BLOCK) {
      stage(left, q2 + row * D2, inside, from, D2, line, column);
      stage(right, key2, seen, from, D2, line, column);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      scores = multiplied(scores, left, right, true, simd);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    put_quarter(scores, weights, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float own[8], higher = top;
    for (int j = 0; j < 8; j++) {
      long position = base + column + j;
      float score = weights[line * PITCH + column + j] * scale;
      if (flags & HAS_CAP) score = cap * precise::tanh(score / cap);
      own[j] = position >= first && position <= last ? score : -INFINITY;
      higher = max(higher, own[j]);
    }
    higher = max(higher, simd_shuffle_xor(higher, 1));
    higher = max(higher, simd_shuffle_xor(higher, 2));
    float shift = higher == -INFINITY ? 0.0f : higher, kept = precise::exp(top - shift), sum = 0;
    for (int j = 0; j < 8; j++) {
      float weight = precise::exp(own[j] - shift);
      weights[line * PITCH + column + j] = weight;
      sum += weight;
    }
    sum += simd_shuffle_xor(sum, 1);
    sum += simd_shuffle_xor(sum, 2);
    total = fma(total, kept, sum);
    top = higher;
    factors[line * 8 + index % 4 * 2] = factors[line * 8 + index % 4 * 2 + 1] = kept;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int c = 0; c < BLOCKS; c++) {
      stage(right, value, seen, c * BLOCK, Dv, line, column);
      bool usual = true;
      for (int j = 0; j < 8; j++) usual = usual && isfinite(right[line * PITCH + column + j]);
      usual = simd_all(usual);
      if (index % 32 == 0) odd[simd] = !usual;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sums[c] = rescaled(sums[c], factors, simd);
      if (odd[0] || odd[1] || odd[2] || odd[3]) {  // 0 times NaN is NaN: only what a query sees may reach it
        for (int j = 0; j < 8; j++) {
          float part = 0;
          for (int p = 0; p < BLOCK; p++)
            if (base + p >= first && base + p <= last)
              part = fma(weights[line * PITCH + p], right[p * PITCH + column + j], part);
          left[line * PITCH + column + j] = part;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sums[c] = plus(sums[c], take_quarter(left, simd));
      } else {
        sums[c] = multiplied(sums[c], weights, right, false, simd);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  for (int c = 0; c < BLOCKS; c++) {
    put_quarter(sums[c], left, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < 8; j++) {
      int out = c * BLOCK + column + j;
      float made = left[line * PITCH + column + j] / (total == 0 ? 1.0f : total);
      if (inside && out < Dv) o[row * Dv + out] = narrow<T>(made);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (flags & WANTS_LSE && inside && index % 4 == 0) lse[row] = (top == -INFINITY ? 0.0f : top) + precise::log(total);
}

// o = (w1 o1 + w2 o2) / (w1 + w2), w = exp(lse - the larger lse): a thread a number, its row's first writes the lse.
template <typename T, typename U>
[[kernel, max_total_threads_per_threadgroup(1024)]] void merge_states(
    device const T *o1, device const float *lse1, device const U *o2, device const float *lse2, device T *o,
    device float *lse, constant int &D, uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint3 threads [[threads_per_threadgroup]]) {
  ulong row = group.x;
  float a = lse1[row], b = lse2[row], peak = max(a, b), shift = peak == -INFINITY ? 0.0f : peak;
  float w1 = precise::exp(a - shift), w2 = precise::exp(b - shift), weight = w1 + w2;
  threadgroup_barrier(mem_flags::mem_device);  // lse may be lse1: all read before one writes
  for (int i = index; i < D; i += threads.x) {
    ulong at = row * D + i;
    o[at] = narrow<T>((w1 * widen(o1[at]) + w2 * widen(o2[at])) / (weight == 0 ? 1.0f : weight));
  }
  if (index == 0) lse[row] = peak + precise::log(weight);
}
