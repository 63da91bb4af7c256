// States that tokens pass through one after the other: a thread a channel, or a simd group a few rows of a state
// matrix.

enum { HAS_SLOTS = 1, HAS_SILU = 2, IN_PLACE = 4 };

// y[t] = act(sum_j weight[j] seen[t + j]): a thread carries its channel's last W - 1 inputs, so y may be x.
template <typename T, typename W, typename C, typename I, int TAPS>
[[kernel, max_total_threads_per_threadgroup(256)]] void causal_conv(
    device const T *x, device const W *weight, device C *state, device const I *slots, device T *y, constant int &L,
    constant int &channels, constant long *strides, constant int &flags, uint3 place [[thread_position_in_grid]]) {
  int channel = place.x;
  ulong request = place.y;
  if (channel >= channels) return;
  ulong slot = flags & HAS_SLOTS ? ulong(slots[request]) : request;
  device C *kept = state + slot * strides[0] + channel * strides[2];
  float seen[TAPS], taps[TAPS];
  for (int j = 0; j < TAPS; j++) taps[j] = widen(weight[channel * TAPS + j]);
  for (int j = 0; j < TAPS - 1; j++) seen[j] = widen(kept[j * strides[1]]);
  for (int t = 0; t < L; t++) {
    ulong at = (request * L + t) * channels + channel;
    seen[TAPS - 1] = widen(x[at]);
    float sum = taps[0] * seen[0];
    for (int j = 1; j < TAPS; j++) sum += taps[j] * seen[j];
    y[at] = narrow<T>(flags & HAS_SILU ? silu(sum) : sum);
    for (int j = 0; j < TAPS - 1; j++) seen[j] = seen[j + 1];
  }
  for (int j = 0; j < TAPS - 1; j++) kept[j * strides[1]] = narrow<C>(seen[j]);
}

// log(1 + u) where u is small too: what rounding took from 1 + u is given back.
inline float log_of_one_plus(float u) {
  float sum = 1.0f + u;
  return sum == 1.0f ? u : precise::log(sum) * (u / (sum - 1.0f));
}

template <typename A, typename B, typename W, typename V>
[[kernel, max_total_threads_per_threadgroup(256)]] void delta_gates(
    device const A *a, device const B *b, device const W *a_log, device const V *dt_bias, device float *g,
    device float *beta, constant int &count, constant int &heads, uint place [[thread_position_in_grid]]) {
  if (place >= uint(count)) return;
  float x = widen(a[place]) + widen(dt_bias[place % heads]);
  float softplus = max(x, 0.0f) + log_of_one_plus(precise::exp(-abs(x)));
  float rate = sigmoid(widen(b[place]));
  g[place] = precise::exp(-precise::exp(widen(a_log[place % heads])) * softplus);
  beta[place] = rate;
}

enum { DELTA_ROWS = 4 };  // of a state, for each simd group

// S = g S;  S = S + beta (v - S k) k^T;  o = S q, token by token. A lane holds PER columns of its simd group's rows;
// the columns beyond Dk are zeros.
template <typename Q, typename V, typename I, int PER>
[[kernel, max_total_threads_per_threadgroup(128)]] void delta_steps(
    device const Q *q, device const Q *k, device const V *v, device const float *g, device const float *beta,
    device const float *before, device const I *slots, device float *after, device V *o, constant int &L,
    constant int &Hk, constant int &Hv, constant int &Dk, constant int &Dv, constant long *strides, constant int &flags,
    uint3 group [[threadgroup_position_in_grid]], uint simd [[simdgroup_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  int first = (group.x * (threads.x / 32) + simd) * DELTA_ROWS, head = group.y, rows = min(Dv - first, int(DELTA_ROWS));
  ulong request = group.z, slot = flags & HAS_SLOTS ? ulong(slots[request]) : request;
  if (first >= Dv) return;
  device const float *from = before + slot * strides[0] + head * strides[1] + first * strides[2];
  float S[DELTA_ROWS][PER], key[PER], query[PER];
  for (int r = 0; r < DELTA_ROWS; r++)
    for (int i = 0; i < PER; i++) {
      int column = i * 32 + lane;
      S[r][i] = r < rows && column < Dk ? from[r * strides[2] + column * strides[3]] : 0.0f;
    }
  for (int t = 0; t < L; t++) {
    ulong token = request * L + t, narrow_row = (token * Hk + head / (Hv / Hk)) * Dk, wide_row = token * Hv + head;
    float decay = g[wide_row], rate = beta[wide_row];
    for (int i = 0; i < PER; i++) {
      int column = i * 32 + lane;
      key[i] = column < Dk ? widen(k[narrow_row + column]) : 0.0f;
      query[i] = column < Dk ? widen(q[narrow_row + column]) : 0.0f;
    }
    for (int r = 0; r < rows; r++) {
      float known = 0, out = 0;
      for (int i = 0; i < PER; i++) {
        S[r][i] *= decay;
        known = fma(S[r][i], key[i], known);
      }
      float delta = (widen(v[wide_row * Dv + first + r]) - simd_sum(known)) * rate;
      for (int i = 0; i < PER; i++) {
        S[r][i] = fma(delta, key[i], S[r][i]);
        out = fma(S[r][i], query[i], out);
      }
      out = simd_sum(out);
      if (lane == 0) o[wide_row * Dv + first + r] = narrow<V>(out);
    }
  }
  device float *to = after + (flags & IN_PLACE ? slot : request) * strides[4] + head * strides[5] + first * strides[6];
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < PER; i++) {
      int column = i * 32 + lane;
      if (column < Dk) to[r * strides[6] + column * strides[7]] = S[r][i];
    }
}

inline float product_of(threadgroup const float *g, int from, int to) {
  float made = 1;
  for (int i = from; i <= to; i++) made *= g[i];
  return made;
}

// The same 32 tokens at a time, as products of tiles (ops/recurrent.py derives them): with decay[t, i] = g[i + 1] ...
// g[t], the deltas U of a chunk solve (I + A) U = B. A threadgroup keeps 32 rows of S, BLOCKS tiles of them; tokens
// past the end change nothing, having keys and rates of 0 and a decay of 1.
template <typename Q, typename V, typename I, int BLOCKS>
[[kernel, max_total_threads_per_threadgroup(128)]] void delta_chunks(
    device const Q *q, device const Q *k, device const V *v, device const float *g, device const float *beta,
    device const float *before, device const I *slots, device float *after, device V *o, constant int &L,
    constant int &Hk, constant int &Hv, constant int &Dk, constant int &Dv, constant long *strides, constant int &flags,
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float keys[BLOCK * PITCH];
  threadgroup float queries[BLOCK * PITCH];
  threadgroup float states[BLOCK * PITCH];
  threadgroup float among[BLOCK * PITCH];  // A, then the weighted deltas
  threadgroup float deltas[BLOCK * PITCH];
  threadgroup float decays[BLOCK];
  threadgroup float rates[BLOCK];
  int first = group.x * BLOCK, head = group.y, line = index / 4, column = index % 4 * 8;
  ulong request = group.z, slot = flags & HAS_SLOTS ? ulong(slots[request]) : request;
  device const float *from = before + slot * strides[0] + head * strides[1];
  Quarter S[BLOCKS];
  for (int c = 0; c < BLOCKS; c++) {
    for (int j = 0; j < 8; j++) {
      int row = first + line, at = c * BLOCK + column + j;
      states[line * PITCH + column + j] = row < Dv && at < Dk ? from[row * strides[2] + at * strides[3]] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    S[c] = take_quarter(states, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int start = 0; start < L; start += BLOCK) {
    bool inside = start + line < L;
    ulong token = request * L + start + line, own = token * Hv + head;
    device const Q *key = k + (token * Hk + head / (Hv / Hk)) * Dk;
    device const Q *query = q + (token * Hk + head / (Hv / Hk)) * Dk;
    if (column == 0) {
      decays[line] = inside ? g[own] : 1.0f;
      rates[line] = inside ? beta[own] : 0.0f;
    }
    Quarter kk = empty_quarter(), ks = empty_quarter(), qk = empty_quarter(), qs = empty_quarter();
    for (int c = 0; c < BLOCKS; c++) {
      stage(keys, key, inside, c * BLOCK, Dk, line, column);
      stage(queries, query, inside, c * BLOCK, Dk, line, column);
      put_quarter(S[c], states, simd);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      kk = multiplied(kk, keys, keys, true, simd);
      ks = multiplied(ks, keys, states, true, simd);
      qk = multiplied(qk, queries, keys, true, simd);
      qs = multiplied(qs, queries, states, true, simd);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    put_quarter(kk, among, simd);
    put_quarter(ks, deltas, simd);
    put_quarter(qk, queries, simd);
    put_quarter(qs, states, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float since = product_of(decays, 0, line), decay = product_of(decays, column + 8, line);
    for (int j = 7; j >= 0; j--) {  // decay is that of column + j
      int i = column + j, at = line * PITCH + i, out = first + i;
      among[at] = i < line ? rates[line] * decay * among[at] : 0.0f;
      queries[at] = i <= line ? decay * queries[at] : 0.0f;
      decay = i <= line ? decay * decays[i] : 1.0f;
      float value = inside && out < Dv ? widen(v[own * Dv + out]) : 0.0f;
      deltas[at] = rates[line] * (value - since * deltas[at]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index < BLOCK) {  // a thread a column, down the rows
      for (int t = 1; t < BLOCK; t++) {
        float delta = deltas[t * PITCH + index];
        for (int i = 0; i < t; i++) delta = fma(-among[t * PITCH + i], deltas[i * PITCH + index], delta);
        deltas[t * PITCH + index] = delta;
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    put_quarter(multiplied(empty_quarter(), queries, deltas, false, simd), keys, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float until = product_of(decays, line + 1, BLOCK - 1), whole = product_of(decays, 0, BLOCK - 1);
    for (int j = 0; j < 8; j++) {
      int at = line * PITCH + column + j, out = first + column + j;
      if (inside && out < Dv) o[own * Dv + out] = narrow<V>(fma(since, states[at], keys[at]));
      among[(column + j) * PITCH + line] = until * deltas[at];
    }
    for (int c = 0; c < BLOCKS; c++) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
      stage(keys, key, inside, c * BLOCK, Dk, line, column);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      S[c] = multiplied(times(S[c], whole), among, keys, false, simd);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  device float *to = after + (flags & IN_PLACE ? slot : request) * strides[4] + head * strides[5];
  for (int c = 0; c < BLOCKS; c++) {
    put_quarter(S[c], states, simd);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int j = 0; j < 8; j++) {
      int row = first + line, at = c * BLOCK + column + j;
      if (row < Dv && at < Dk) to[row * strides[6] + at * strides[7]] = states[line * PITCH + column + j];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
