// What the Metal headers here need of the machine that executes kernels (machine.cpp).
//
// A GPU thread is a fiber. It runs until it meets others (a barrier, an operation of its simd group) or returns; a
// threadgroup's fibers share one CPU thread, and threadgroups run one after the other. The compiler reports every
// memory access (machine.cpp says how), so a run either is clean or ends at its first finding.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace machine {

struct Thread {
  uint32_t index, simdgroup, lane;
  uint32_t position[3];
  int state, site, flags;
  void (*meet)(Thread **lanes);  // what the lanes do together, called once for all 32
  void *argument;                // this lane's part of it
  int declared;                  // threadgroup variables seen so far
};

struct Launch {
  uint32_t groups[3], size[3], group[3];  // threadgroups, threads of one, the one that runs
};

extern Thread *current;
extern Launch launch;

void barrier(int flags, int site);                                // all threads of the group
void together(void (*meet)(Thread **), void *argument, int site);  // all lanes of the simd group
void simd_fence(int flags, int site);
void *threadgroup_variable(size_t bytes, size_t cell, const char *name);
void *bound(int index, size_t cell, bool writable);         // a buffer's address
const void *bound_value(int index, size_t bytes);           // a scalar, or the first of an array of scalars

// A kernel's arguments take their types from its parameters.
struct Pointer {
  int index;
  template <class T> operator T *() const { return (T *)bound(index, sizeof(T), true); }
  template <class T> operator const T *() const { return (const T *)bound(index, sizeof(T), false); }
};
struct Values {
  int index;
  template <class T> operator const T *() const { return (const T *)bound_value(index, 0); }
};
struct Value {
  int index;
  template <class T> operator const T &() const { return *(const T *)bound_value(index, sizeof(T)); }
};

float exp(float), exp2(float), log(float), log2(float), sin(float), cos(float), tanh(float), sqrt(float);
float rsqrt(float), floor(float), ceil(float), rint(float), fma(float, float, float), ldexp(float, int);

}  // namespace machine
