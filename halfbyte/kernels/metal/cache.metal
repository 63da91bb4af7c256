// Rows of new tokens to their places in a cache, as a line or as a ring.

enum { HAS_SLOTS = 1, HAS_LENGTHS = 2, IS_RING = 4 };
enum { SLOT, ROW, HEAD, COLUMN };  // what `strides` holds of the cache, in elements

template <typename C, typename T, typename I, typename J>
[[kernel, max_total_threads_per_threadgroup(256)]] void append(
    device C *cache, device const T *fresh, device const I *slots, device const J *lengths, constant int &L,
    constant int &S, constant int &H, constant int &D, constant long *strides, constant int &flags,
    uint3 place [[thread_position_in_grid]]) {
  int at = place.x, token = place.y, request = place.z;
  if (at >= H * D) return;
  if (flags & IS_RING && token < L - S) return;  // a later token falls on the same row
  long length = flags & HAS_LENGTHS ? long(lengths[request]) : L;
  long position = length - L + token, slot = flags & HAS_SLOTS ? long(slots[request]) : request;
  if (flags & IS_RING) position %= S;
  float value = widen(fresh[(ulong(request) * L + token) * H * D + at]);
  device C *row = cache + slot * strides[SLOT] + position * strides[ROW];
  row[at / D * strides[HEAD] + at % D * strides[COLUMN]] = narrow<C>(value);
}
