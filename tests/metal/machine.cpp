// Executes kernels: fibers, barriers, simd groups. memory.h checks what they read and write; a finding ends a launch.
#include "memory.h"

#include <dlfcn.h>
#include <math.h>
#include <ucontext.h>

namespace machine {

enum { READY, AT_BARRIER, AT_SIMD, DONE };
enum { MOST_THREADS = 1024, STACK = 64 << 10 };

Thread *current;
Launch launch;

struct Fiber {
  Thread thread;
  jmp_buf place;
  bool begun;
};
static Fiber fibers[MOST_THREADS];
static char *stacks;
static jmp_buf scheduler;
static void (*entry)();  // one thread of the kernel

// Fibers: a context gives each its stack, jumps switch between them.

static void leave(Fiber *f) {
  if (!_setjmp(f->place)) _longjmp(scheduler, 1);
}
static void fiber_main(unsigned index) {
  for (;;) {  // once for every threadgroup
    entry();
    fibers[index].thread.state = DONE;
    leave(&fibers[index]);
  }
}
static void resume(Fiber *f) {
  current = &f->thread;
  if (_setjmp(scheduler)) {
    current = nullptr;
    return;
  }
  if (f->begun) _longjmp(f->place, 1);
  f->begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks + (f - fibers) * STACK;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, (void (*)())fiber_main, 1, unsigned(f - fibers));
  setcontext(&context);
}
static void wait(int state, int site) {
  current->state = state;
  current->site = site;
  leave((Fiber *)current);  // a Fiber begins with its Thread
}
void barrier(int flags, int site) {
  current->flags = flags;
  wait(AT_BARRIER, site);
}
void together(void (*meet)(Thread **), void *argument, int site) {
  current->meet = meet;
  current->argument = argument;
  current->flags = 0;
  wait(AT_SIMD, site);
}
void simd_fence(int flags, int site) {
  current->meet = nullptr;
  current->flags = flags;
  wait(AT_SIMD, site);
}

static uint64_t dice;
static void arrange(std::vector<int> &all, int order) {  // 0 ascending, 1 descending, others shuffled
  if (order == 1) std::reverse(all.begin(), all.end());
  for (size_t i = all.size(); order > 1 && i > 1; i--) {
    dice = dice * 6364136223846793005ull + 1442695040888963407ull;
    std::swap(all[i - 1], all[(dice >> 33) % i]);
  }
}
static std::vector<int> counted(int count, int order) {
  std::vector<int> all(count);
  for (int i = 0; i < count; i++) all[i] = i;
  arrange(all, order);
  return all;
}
static void at_line(const char *kind, const char *what, int site) {
  char detail[32];
  snprintf(detail, sizeof detail, "line %d", site);
  fail(kind, what, detail);
}

static void run_simdgroup(int simdgroup, int order) {
  Thread *lanes[32];
  std::vector<int> turns = counted(32, order);
  for (int i = 0; i < 32; i++) lanes[i] = &fibers[simdgroup * 32 + i].thread;
  for (;;) {
    for (int i : turns)
      if (lanes[i]->state == READY) resume((Fiber *)lanes[i]);
    Thread *first = nullptr;
    for (Thread *t : lanes)
      if (t->state == AT_SIMD) first = first ? first : t;
    if (!first) return;
    for (Thread *t : lanes)
      if (t->state != AT_SIMD || t->site != first->site || t->meet != first->meet)
        at_line("divergence", "a simd operation without all lanes", first->site);
    if (first->meet) first->meet(lanes);
    for (int space : {DEVICE, THREADGROUP})
      if (first->flags & space) simd_fences[space][simdgroup]++;
    for (Thread *t : lanes) t->state = READY;
  }
}

static void run_group(int threads, int order) {
  for (int i = 0; i < threads; i++) {
    fibers[i].thread.state = READY;
    fibers[i].thread.declared = 0;
  }
  for (;;) {
    for (int simdgroup : counted(threads / 32, order)) run_simdgroup(simdgroup, order);
    Thread &first = fibers[0].thread;
    for (int i = 0; i < threads; i++) {
      Thread &t = fibers[i].thread;
      int site = std::max(t.site, first.site);
      if (t.state != first.state) at_line("divergence", "a barrier that some threads left out", site);
      if (t.state == AT_BARRIER && t.site != first.site) at_line("divergence", "threads at two barriers", site);
    }
    if (first.state == DONE) return;
    for (int space : {DEVICE, THREADGROUP})
      if (first.flags & space) fences[space]++;
    for (int i = 0; i < threads; i++) fibers[i].thread.state = READY;
  }
}

static void play(int order) {
  int threads = launch.size[0] * launch.size[1] * launch.size[2];
  for (int i = 0; i < threads; i++) {
    Thread &t = fibers[i].thread;
    t.index = i;
    t.simdgroup = i / 32;
    t.lane = i % 32;
    t.position[0] = i % launch.size[0];
    t.position[1] = i / launch.size[0] % launch.size[1];
    t.position[2] = i / (launch.size[0] * launch.size[1]);
    fibers[i].begun = false;
  }
  int groups = launch.groups[0] * launch.groups[1] * launch.groups[2];
  for (int number : counted(groups, order)) {
    group_number = number + 1;
    memset(fences, 0, sizeof fences);
    memset(simd_fences, 0, sizeof simd_fences);
    launch.group[0] = number % launch.groups[0];
    launch.group[1] = number / launch.groups[0] % launch.groups[1];
    launch.group[2] = number / (launch.groups[0] * launch.groups[1]);
    run_group(threads, order);
  }
}

#define ELEMENTARY(name, value) float name(float a) { double x = a; return float(value); }
ELEMENTARY(exp, ::exp(x)) ELEMENTARY(exp2, ::exp2(x)) ELEMENTARY(log, ::log(x)) ELEMENTARY(log2, ::log2(x))
ELEMENTARY(sin, ::sin(x)) ELEMENTARY(cos, ::cos(x)) ELEMENTARY(tanh, ::tanh(x)) ELEMENTARY(sqrt, ::sqrt(x))
ELEMENTARY(rsqrt, 1 / ::sqrt(x)) ELEMENTARY(floor, ::floor(x)) ELEMENTARY(ceil, ::ceil(x)) ELEMENTARY(rint, ::rint(x))
float fma(float a, float b, float c) { return fmaf(a, b, c); }
float ldexp(float a, int by) { return ldexpf(a, by); }

}  // namespace machine

// For executor.py.

using namespace machine;
extern "C" {

// Runs a kernel; 0 where it was clean. geometry: threadgroups, then threads of one.
int machine_run(void (*kernel)(), Argument *given, int count, const uint32_t *geometry, int order) {
  if (!arena) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    arena = (char *)mmap(nullptr, ARENA, PROT_NONE, flags, -1, 0);
    stacks = (char *)mmap(nullptr, MOST_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
  }
  memcpy(launch.groups, geometry, sizeof launch.groups);
  memcpy(launch.size, geometry + 3, sizeof launch.size);
  arguments.assign(given, given + count);
  dice = order;
  finding_at = nullptr;
  if (setjmp(give_up)) {
    current = nullptr;
    return 1;
  }
  entry = kernel;
  bind();
  play(order);
  for (Argument &a : arguments)
    if (a.kind == TENSOR && regions[a.region].writable)
      memcpy(a.data, regions[a.region].begin + a.offset, a.bytes);
  return 0;
}

// The finding, and where in the code it was: the file that holds it and the address there.
const char *machine_finding(char *file, int size, uint64_t *address) {
  Dl_info info;
  file[0] = 0;
  if (finding_at && dladdr(finding_at, &info)) {
    strncpy(file, info.dli_fname, size - 1);
    *address = (char *)finding_at - (char *)info.dli_fbase - 1;
  }
  return finding;
}
}
