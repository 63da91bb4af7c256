// Memory as kernels see it, and a check of every access to it. Part of machine.cpp.
//
// Kernels are compiled with -fsanitize=thread, so that the compiler calls __tsan_read4(address) and its like before an
// access. The sanitizer's own library is not linked; the functions at the end of this file answer the calls. They find
//   * addresses outside of what the launch bound,
//   * threadgroup memory read before it was written,
//   * two threads at the same place, one of them writing, with no barrier between.
// Buffers live in an arena of reserved addresses, far from each other, so that a stray index lands where nothing is.
#pragma once
#include "machine.h"

#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace machine {

enum { NUMBERS, TENSOR, ADDRESSES };   // kinds of arguments
enum { DEVICE = 1, THREADGROUP = 2 };  // as mem_flags
enum { THREADGROUP_BYTES = 32 << 10 };
const size_t ARENA = 64ull << 30, GAP = 1 << 20, PAGE = 4096;

static char *arena;
static jmp_buf give_up;
static char finding[512];
static void *finding_at;  // the code address of the access

[[noreturn]] static void fail(const char *kind, const char *where, const char *detail, void *at = nullptr) {
  snprintf(finding, sizeof finding, "%s: %s%s%s", kind, where, *detail ? ", " : "", detail);
  finding_at = at;
  longjmp(give_up, 1);
}

struct Access {
  uint32_t group, thread, fence, simd_fence;  // group 0: none yet
};
struct Cell {
  Access write, read, read_beside, read_afar;  // the last reader; one of its simd group; one of another
};
struct Region {
  char *begin, *end;
  int space, cell;  // cell: bytes of an element
  bool writable;
  std::string name;
  std::vector<Cell> cells;
};
struct Argument {  // as executor.py lays it out
  void *data;
  uint64_t bytes;
  int32_t kind, region;
  uint64_t offset;  // in its region
};
static std::vector<Region> regions;
static std::vector<Argument> arguments;
static size_t used;
static int first_variable;                                     // the region of the first threadgroup variable
static uint32_t group_number, fences[3], simd_fences[3][32];   // by space, and simd group

static char *reserve(size_t bytes, size_t misaligned_by) {
  used += GAP;
  char *begin = arena + used + misaligned_by;
  used += (misaligned_by + bytes + PAGE - 1) / PAGE * PAGE;
  mprotect(begin - misaligned_by, (misaligned_by + bytes + PAGE - 1) / PAGE * PAGE, PROT_READ | PROT_WRITE);
  return begin;
}

static bool apart(const Access &a, const Access &b) { return a.group != b.group; }
static bool unordered(const Access &a, const Access &b, int space) {
  if (!a.group || (a.group == b.group && a.thread == b.thread)) return false;
  if (apart(a, b)) return space == DEVICE;  // nothing orders two threadgroups
  if (a.fence != b.fence) return false;
  return a.thread / 32 != b.thread / 32 || a.simd_fence == b.simd_fence;
}

static void race(const Region &r, const Access &a, const Access &b, const char *how, size_t offset, void *at) {
  char detail[160];
  snprintf(detail, sizeof detail, "%s by threads %u and %u%s at byte %zu", how, a.thread, b.thread,
           apart(a, b) ? " of two threadgroups" : "", offset);
  fail("race", r.name.c_str(), detail, at);
}

static void check_cell(Region &r, Cell &c, const Access &now, bool write, size_t offset, void *at) {
  const char *how = write ? "two writes" : "a read after a write";
  if (unordered(c.write, now, r.space)) race(r, c.write, now, how, offset, at);
  if (write) {
    for (const Access &reader : {c.read, c.read_beside, c.read_afar})
      if (unordered(reader, now, r.space)) race(r, reader, now, "a write after a read", offset, at);
    c.write = now;
    return;
  }
  if (r.space == THREADGROUP && c.write.group != now.group)
    fail("uninitialised", r.name.c_str(), "read before any write", at);
  if (c.read.group == now.group && c.read.thread / 32 == now.thread / 32) {
    if (c.read.thread != now.thread) c.read_beside = c.read;
  } else {
    c.read_afar = c.read;
  }
  c.read = now;
}

static void access(void *address, size_t bytes, bool write, void *at) {
  char *p = (char *)address;
  if (!current || p < arena || p >= arena + ARENA) return;  // stacks, constants
  static size_t last = 0;
  size_t i = last;
  if (i >= regions.size() || p < regions[i].begin || p >= regions[i].end)
    for (i = 0; i < regions.size() && (p < regions[i].begin - GAP / 2 || p >= regions[i].end + GAP / 2); i++) {}
  if (i == regions.size()) fail("out of bounds", "an address between buffers", write ? "write" : "read", at);
  last = i;
  Region &r = regions[i];
  if (p < r.begin || p + bytes > r.end) {
    char detail[96];
    snprintf(detail, sizeof detail, "%s of byte %td of %td by thread %u", write ? "write" : "read", p - r.begin,
             r.end - r.begin, current->index);
    fail("out of bounds", r.name.c_str(), detail, at);
  }
  if (!r.writable) return;
  Access now{group_number, current->index, fences[r.space], simd_fences[r.space][current->simdgroup]};
  size_t offset = p - r.begin;
  for (size_t c = offset / r.cell; c * r.cell < offset + bytes; c++) check_cell(r, r.cells[c], now, write, offset, at);
}

void *bound(int index, size_t cell, bool writable) {
  if (index >= (int)arguments.size() || arguments[index].kind != TENSOR)
    fail("argument", "a buffer", "was bound to a number");
  Region &r = regions[arguments[index].region];
  if (writable && (!r.writable || cell < size_t(r.cell))) {
    r.writable = true;
    r.cell = int(std::min<size_t>(cell, 4));
    r.cells.assign((r.end - r.begin) / r.cell + 1, Cell());
  }
  return r.begin + arguments[index].offset;
}
const void *bound_value(int index, size_t bytes) {
  if (index >= (int)arguments.size() || arguments[index].kind == TENSOR)
    fail("argument", "a number", "was bound to a tensor");
  if (bytes && arguments[index].bytes != bytes) fail("argument", "a number", "has another size than its parameter");
  return arguments[index].data;
}
void *threadgroup_variable(size_t bytes, size_t cell, const char *name) {
  size_t i = first_variable + current->declared++;
  if (i == regions.size()) {
    char *begin = reserve(bytes, 0);
    regions.push_back(Region{begin, begin + bytes, THREADGROUP, int(std::min<size_t>(cell, 4)), true, name, {}});
    regions[i].cells.resize(bytes / regions[i].cell + 1);
    size_t total = 0;
    for (size_t v = first_variable; v < regions.size(); v++) total += regions[v].end - regions[v].begin;
    if (total > THREADGROUP_BYTES) fail("limit", name, "threadgroup memory above 32 KB");
  }
  return regions[i].begin;
}

// Buffers are copied into the arena. Those that overlap (one bound twice, two views of one tensor) stay together.
static void bind() {
  regions.clear();
  used = 0;
  std::map<char *, Argument *> tensors;  // by where they begin, the longest of those that begin alike
  for (Argument &a : arguments)
    if (a.kind == TENSOR && (!tensors.count((char *)a.data) || tensors[(char *)a.data]->bytes < a.bytes))
      tensors[(char *)a.data] = &a;
  std::map<char *, char *> spans;  // begin and end of what hangs together
  char *begin = nullptr;
  for (auto &[data, a] : tensors) {
    if (!begin || data >= spans[begin]) spans[begin = data] = data;
    spans[begin] = std::max(spans[begin], data + a->bytes);
  }
  std::map<void *, char *> moved;
  for (auto &[from, end] : spans) {
    char *to = reserve(end - from, (uintptr_t)from % 64);
    memcpy(to, from, end - from);
    std::string name;
    for (size_t i = 0; i < arguments.size(); i++) {
      Argument &a = arguments[i];
      if (a.kind != TENSOR || (char *)a.data < from || (char *)a.data >= end) continue;
      if (name.empty()) name = "argument " + std::to_string(i);
      a.region = int(regions.size());
      a.offset = (char *)a.data - from;
      moved[a.data] = to + a.offset;
    }
    regions.push_back(Region{to, to + (end - from), DEVICE, 4, false, name, {}});
  }
  for (Argument &a : arguments)
    for (size_t i = 0; a.kind == ADDRESSES && i < a.bytes / 8; i++) {
      uint64_t &address = ((uint64_t *)a.data)[i];
      address = (uint64_t)moved[(void *)address];
    }
  first_variable = int(regions.size());
}

}  // namespace machine

extern "C" {
#define AT __builtin_return_address(0)
#define REPORTED(N)                                                          \
  void __tsan_read##N(void *p) { machine::access(p, N, false, AT); }                  \
  void __tsan_write##N(void *p) { machine::access(p, N, true, AT); }                  \
  void __tsan_unaligned_read##N(void *p) { machine::access(p, N, false, AT); }        \
  void __tsan_unaligned_write##N(void *p) { machine::access(p, N, true, AT); }
REPORTED(1) REPORTED(2) REPORTED(4) REPORTED(8) REPORTED(16)
void __tsan_read_range(void *p, unsigned long n) { machine::access(p, n, false, AT); }
void __tsan_write_range(void *p, unsigned long n) { machine::access(p, n, true, AT); }
void __tsan_init() {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit() {}
void __ubsan_handle_type_mismatch_v1(void *, void *) { machine::fail("alignment", "a vector", "at an odd place", AT); }
void __ubsan_handle_out_of_bounds(void *, void *) { machine::fail("out of bounds", "a local array", "", AT); }
}
