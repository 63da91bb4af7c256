// Weights eight at a time, whatever their format: codes in words with scales, or plain numbers.

enum { AFFINE, MXFP4, NVFP4, MXFP8, DENSE };
enum { WORDS_MATRIX, WORDS_ROW, SCALES_MATRIX, SCALES_ROW };  // what `strides` holds, in elements

inline float power_of_two(uint code) { return code == 255 ? INFINITY : ldexp(1.0f, int(code) - 127); }

inline float e4m3(uint code) {
  uint exponent = code >> 3 & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  float size = exponent ? ldexp(float(8 + mantissa), int(exponent) - 10) : ldexp(float(mantissa), -9);
  return code & 128 ? -size : size;
}

inline float e2m1(uint code) {
  uint exponent = code >> 1 & 3, mantissa = code & 1;
  float size = exponent ? ldexp(float(2 + mantissa), int(exponent) - 2) : 0.5f * mantissa;
  return code & 8 ? -size : size;
}

template <int MODE> inline float code_value(uint code) {
  return MODE == AFFINE ? float(code) : MODE == MXFP8 ? e4m3(code) : e2m1(code);
}
template <int MODE> inline float scale_value(uchar code) { return MODE == NVFP4 ? e4m3(code) : power_of_two(code); }
template <int MODE> inline float scale_value(float scale) { return scale; }
template <int MODE> inline float scale_value(half scale) { return widen(scale); }
template <int MODE> inline float scale_value(bf16 scale) { return widen(scale); }

// Codes k ... k + 7 of a row, k a multiple of 8: never more than 64 bits from the word where the first begins.
template <int BITS> inline void eight_codes(device const uint *row, int k, thread uint *codes) {
  uint first = uint(k) * BITS, shift = first & 31;
  ulong window = row[first >> 5];
  if (shift + 8 * BITS > 32) window |= ulong(row[(first >> 5) + 1]) << 32;
  window >>= shift;
  for (int j = 0; j < 8; j++) codes[j] = uint(window >> (j * BITS)) & ((1u << BITS) - 1);
}

// Weights k ... k + 7 of a row as exactly as float32 holds them; zeros beyond the row's K. A dense matrix comes as
// `scales`.
template <int MODE, int BITS, int GROUP, typename S> inline void eight_weights(
    device const uint *words, device const S *scales, device const S *biases, constant long *strides, int matrix,
    int row, int k, int K, float factor, thread float *w) {
  ulong at = matrix * strides[SCALES_MATRIX] + row * strides[SCALES_ROW];
  if (MODE == DENSE) {
    for (int j = 0; j < 8; j++) w[j] = k + j < K ? scale_value<MODE>(scales[at + k + j]) : 0.0f;
    return;
  }
  uint codes[8];
  eight_codes<BITS>(words + matrix * strides[WORDS_MATRIX] + row * strides[WORDS_ROW], k, codes);
  at += k / GROUP;
  float scale = scale_value<MODE>(scales[at]) * factor;
  if (MODE == AFFINE) {
    float bias = scale_value<MODE>(biases[at]);
    for (int j = 0; j < 8; j++) w[j] = fma(float(codes[j]), scale, bias);
  } else {
    for (int j = 0; j < 8; j++) w[j] = code_value<MODE>(codes[j]) * scale;
  }
}

// The same of a matrix that lies anywhere, read byte by byte: eight codes are as many bytes as a code has bits.
inline ulong bytes_at(device const uchar *from, int count) {
  ulong value = 0;
  for (int i = 0; i < count; i++) value |= ulong(from[i]) << (8 * i);
  return value;
}
inline float float_of(ulong bits, float) { return as_type<float>(uint(bits)); }
inline half float_of(ulong bits, half) { return as_type<half>(ushort(bits)); }
inline uchar float_of(ulong bits, uchar) { return uchar(bits); }
inline bf16 float_of(ulong bits, bf16) {
  bf16 made;
  made.bits = ushort(bits);
  return made;
}
template <int MODE, int BITS, int GROUP, typename S> inline void eight_scattered(
    device const uchar *words, device const uchar *scales, device const uchar *biases, int row, int k, int K,
    thread float *w) {
  ulong window = bytes_at(words + (ulong(row) * K + k) / 8 * BITS, BITS);
  ulong at = (ulong(row) * K + k) / GROUP * sizeof(S);
  float scale = scale_value<MODE>(float_of(bytes_at(scales + at, sizeof(S)), S()));
  float bias = MODE == AFFINE ? scale_value<MODE>(float_of(bytes_at(biases + at, sizeof(S)), S())) : 0.0f;
  for (int j = 0; j < 8; j++) {
    uint code = uint(window >> (j * BITS)) & ((1u << BITS) - 1);
    w[j] = MODE == AFFINE ? fma(float(code), scale, bias) : code_value<MODE>(code) * scale;
  }
}
