// What every family shares: element types, vectors of them, sums over a threadgroup, activations.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

// Products and sums are fused where fma says so and nowhere else: some bits are promised.
#pragma METAL fp contract(off)

// bfloat16 as its bits, since an M1 has no other: widening is a shift, narrowing rounds to even.
struct bf16 {
  ushort bits;
};

inline float widen(float x) { return x; }
inline float widen(half x) { return float(x); }
inline float widen(bf16 x) { return as_type<float>(uint(x.bits) << 16); }

template <typename T> inline T narrow(float x) { return T(x); }
template <> inline bf16 narrow<bf16>(float x) {
  uint bits = as_type<uint>(x);
  bf16 rounded;
  rounded.bits = isnan(x) ? ushort(bits >> 16 | 0x40) : ushort((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  return rounded;
}

// N neighbours, loaded and stored at once.
template <typename T, int N> struct alignas(N * sizeof(T)) Pack {
  T at[N];
};
template <int N> struct Floats {
  float at[N];
};
template <int N, typename T> inline Floats<N> load(device const T *from, ulong index) {
  Pack<T, N> raw = *(device const Pack<T, N> *)(from + index);
  Floats<N> values;
  for (int j = 0; j < N; j++) values.at[j] = widen(raw.at[j]);
  return values;
}
template <int N, typename T> inline void store(device T *to, ulong index, Floats<N> values) {
  Pack<T, N> raw;
  for (int j = 0; j < N; j++) raw.at[j] = narrow<T>(values.at[j]);
  *(device Pack<T, N> *)(to + index) = raw;
}

// Over all threads of a threadgroup, with `parts` [32] to meet in; every thread gets the same bits. The barrier before
// the write keeps it off the values of the call before: the originals forgot it.
inline float group_sum(float value, threadgroup float *parts, uint simd, uint lane, uint simds) {
  value = simd_sum(value);
  if (simds == 1) return value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) parts[simd] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(lane < simds ? parts[lane] : 0.0f);
}
inline float group_max(float value, threadgroup float *parts, uint simd, uint lane, uint simds) {
  value = simd_max(value);
  if (simds == 1) return value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) parts[simd] = value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(lane < simds ? parts[lane] : -INFINITY);
}

// A number as the unevaluated sum of two floats, about 48 bits: for sums that may cancel, where others use float64.
struct Twofold {
  float high, low;
};
inline Twofold twofold(float high, float low) {
  Twofold made;
  made.high = isfinite(high) ? high + low : high;  // of an infinite sum nothing is left over
  made.low = isfinite(made.high) ? low - (made.high - high) : 0.0f;
  return made;
}
inline Twofold plus(Twofold a, Twofold b) {
  float sum = a.high + b.high, other = sum - a.high;
  return twofold(sum, ((a.high - (sum - other)) + (b.high - other)) + (a.low + b.low));
}
inline Twofold plus(Twofold a, float b) { return plus(a, twofold(b, 0.0f)); }
inline Twofold times(Twofold a, float b) {
  float product = a.high * b;
  return twofold(product, fma(a.high, b, -product) + a.low * b);
}
inline Twofold product(float a, float b) { return times(twofold(a, 0.0f), b); }
inline Twofold over(Twofold a, float b) {
  float quotient = a.high / b;
  return twofold(quotient, (fma(-quotient, b, a.high) + a.low) / b);
}
inline Twofold inverse_root(Twofold a) {
  float y = precise::rsqrt(a.high);
  if (y == 0 || !isfinite(y)) return twofold(y, 0.0f);
  Twofold square = product(y, y), one = plus(times(square, a.high), square.high * a.low);
  return twofold(y, 0.5f * y * ((1.0f - one.high) - one.low));
}
inline Twofold simd_total(Twofold value) {
  for (ushort by = 1; by < 32; by *= 2) {
    Twofold other;
    other.high = simd_shuffle_xor(value.high, by);
    other.low = simd_shuffle_xor(value.low, by);
    value = plus(value, other);
  }
  return value;
}
// As group_sum; parts [64].
inline Twofold group_total(Twofold value, threadgroup float *parts, uint simd, uint lane, uint simds) {
  value = simd_total(value);
  if (simds == 1) return value;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) {
    parts[simd] = value.high;
    parts[32 + simd] = value.low;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  value.high = lane < simds ? parts[lane] : 0.0f;
  value.low = lane < simds ? parts[32 + lane] : 0.0f;
  return simd_total(value);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }
inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }
inline float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + precise::tanh(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}
enum { SILU, GELU_TANH, SIGMOID };
inline float activated(float x, int activation) {
  return activation == SILU ? silu(x) : activation == GELU_TANH ? gelu_tanh(x) : sigmoid(x);
}
