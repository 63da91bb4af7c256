// Routing: a simd group a token, its experts' values as integers that compare as they do. Combining: a thread a column.

enum { MOST_EXPERTS = 4096, NOTHING = -2147483647 - 1, NOT_A_NUMBER = 2147483647, NO_INDEX = 2147483647 };
enum { SIGMOID_SCORES = 1, HAS_BIAS = 2, HAS_SCALE = 4, RENORMALISE = 8, HAS_GROUPS = 16, SLOT_ORDER = 32 };

// Larger for what comes first: NaN, then larger values; -0 equals 0. Nothing is below -inf.
inline int order_of(float value) {
  if (isnan(value)) return NOT_A_NUMBER;
  int bits = as_type<int>(value == 0 ? 0.0f : value);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

inline float score_of(float x, float top, float total, int flags) {
  return flags & SIGMOID_SCORES ? sigmoid(x) : precise::exp(x - top) / total;
}

// The index, among `count` that the lanes share, of the largest order; the lowest where it occurs again. Each lane
// looks at its own, so that nothing need be waited for.
inline int first_of(threadgroup const int *orders, int count, uint lane) {
  int best = NOTHING, place = NO_INDEX;
  for (int i = lane; i < count; i += 32)
    if (orders[i] > best || place == NO_INDEX) {
      best = orders[i];
      place = i;
    }
  int top = simd_max(best);
  return simd_min(best == top ? place : int(NO_INDEX));
}

// Of each group the sum of its two largest choices, then the best groups one by one.
template <typename T> inline void keep_best_groups(
    device const T *x, device const float *bias, threadgroup int *orders, threadgroup uchar *kept, int E, int groups,
    int keep, float top, float total, int flags, uint lane) {
  int size = E / groups;
  for (int g = lane; g < groups; g += 32) {
    float values[2] = {-INFINITY, -INFINITY};
    for (int i = g * size; i < g * size + size; i++) {
      float value = score_of(widen(x[i]), top, total, flags) + (flags & HAS_BIAS ? bias[i] : 0.0f);
      if (order_of(value) > order_of(values[0])) {
        values[1] = values[0];
        values[0] = value;
      } else if (order_of(value) > order_of(values[1])) {
        values[1] = value;
      }
    }
    orders[g] = order_of(size > 1 ? values[0] + values[1] : values[0]);
    kept[g] = 0;
  }
  for (int round = 0; round < keep; round++) {
    int best = first_of(orders, groups, lane);
    if (best % 32 == int(lane)) {
      orders[best] = NOTHING;
      kept[best] = 1;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Experts one after the other, each into the first smallest slot if it is larger: a rule of its own.
template <typename T> inline void fill_slots(
    device const T *x, threadgroup int *slots, device int *ids, int E, int k, float top, float total, int flags,
    uint lane) {
  for (int i = lane; i < k; i += 32) {
    slots[i] = as_type<int>(-1e30f);
    ids[i] = 0;
  }
  for (int e = 0; e < E; e++) {
    float value = score_of(widen(x[e]), top, total, flags), smallest = INFINITY;
    int place = NO_INDEX;
    for (int i = lane; i < k; i += 32)
      if (as_type<float>(slots[i]) < smallest) {
        smallest = as_type<float>(slots[i]);
        place = i;
      }
    float least = simd_min(smallest);
    int slot = simd_min(smallest == least ? place : int(NO_INDEX));
    if (value > least && slot % 32 == int(lane)) {
      slots[slot] = as_type<int>(value);
      ids[slot] = e;
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void route(
    device const T *logits, device const float *bias, device const float *expert_scales, device int *ids,
    device float *weights, constant int &E, constant int &k, constant int &groups, constant int &keep,
    constant float &scaling, constant int &flags, uint token [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup int orders[MOST_EXPERTS];
  threadgroup uchar kept[MOST_EXPERTS];
  device const T *x = logits + ulong(token) * E;
  ids += ulong(token) * k;
  weights += ulong(token) * k;
  float top = -INFINITY, total = 0;
  for (int e = lane; e < E; e += 32) top = max(top, widen(x[e]));
  top = simd_max(top);
  for (int e = lane; e < E; e += 32) total += precise::exp(widen(x[e]) - top);
  total = simd_sum(total);
  if (flags & SLOT_ORDER) {
    fill_slots(x, orders, ids, E, k, top, total, flags, lane);
    for (int i = lane; i < k; i += 32) weights[i] = as_type<float>(orders[i]);
  } else {
    if (flags & HAS_GROUPS) keep_best_groups(x, bias, orders, kept, E, groups, keep, top, total, flags, lane);
    for (int e = lane; e < E; e += 32) {
      float value = widen(x[e]), choice = flags & HAS_BIAS ? score_of(value, top, total, flags) + bias[e] : value;
      orders[e] = order_of(flags & HAS_GROUPS && !kept[e / (E / groups)] ? -INFINITY : choice);
    }
    for (int round = 0; round < k; round++) {
      int best = first_of(orders, E, lane);
      if (best % 32 == int(lane)) orders[best] = NOTHING;
      if (round % 32 == int(lane)) {
        ids[round] = best;
        weights[round] = score_of(widen(x[best]), top, total, flags);
      }
    }
  }
  float chosen = 0;
  for (int i = lane; i < k; i += 32) chosen += weights[i];
  chosen = simd_sum(chosen);
  for (int i = lane; i < k; i += 32) {
    float weight = flags & RENORMALISE && chosen > 0 ? weights[i] / chosen : weights[i];
    weights[i] = (flags & HAS_SCALE ? weight * expert_scales[ids[i]] : weight) * scaling;
  }
}

enum { HAS_RESIDUAL = 1, HAS_SHARED = 2, HAS_GATE = 4 };

template <typename T, typename R, typename S>
[[kernel, max_total_threads_per_threadgroup(256)]] void combine(
    device const T *y, device const float *weights, device const R *residual, device const S *shared,
    device const float *gates, device T *result, constant int &A, constant int &D, constant int &flags,
    uint3 place [[thread_position_in_grid]]) {
  int column = place.x;
  ulong token = place.y;
  if (column >= D) return;
  float sum = 0;
  for (int a = 0; a < A; a++) sum += weights[token * A + a] * widen(y[(token * A + a) * D + column]);
  if (flags & HAS_RESIDUAL) sum = widen(residual[token * D + column]) + sum;
  if (flags & HAS_SHARED) {
    float gate = flags & HAS_GATE ? sigmoid(gates[token]) : 1.0f;
    sum += gate * widen(shared[token * D + column]);
  }
  result[token * D + column] = narrow<T>(sum);
}

// The rows of a list of tokens are added in the list's order, without atomics: whoever owns a token looks for it.
template <typename T, typename R, typename I>
[[kernel, max_total_threads_per_threadgroup(256)]] void combine_bucket(
    device const T *y, device const float *weights, device const R *residual, device const I *tokens, device T *result,
    constant int &M, constant int &D, uint3 place [[thread_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  int column = place.x;
  ulong token = place.y;
  float sum = column < D ? widen(residual[token * D + column]) : 0.0f;
  for (int base = 0; base < M; base += 32) {
    int own = base + int(lane) < M ? int(tokens[base + lane]) : -1;
    if (!simd_any(own == int(token))) continue;
    for (int i = 0; i < 32; i++) {
      bool here = simd_shuffle(own, i) == int(token);
      if (here && column < D) sum += weights[base + i] * widen(y[ulong(base + i) * D + column]);
    }
  }
  if (column < D) result[token * D + column] = narrow<T>(sum);
}
