// A GPU on a CPU, for tests: what CUDA and hardware.cuh provide, for kernels as simple as step.cu. It is included in place
// of hardware.cuh, and the whole is compiled as C++.
//
// Every CUDA thread is a fiber. Which one goes on when several can is drawn from a seed: warps and blocks are ahead of each
// other or behind as they are on a GPU, and where a barrier is missing some seed shows it. Shared memory is NaN before it is
// written, and again when its block has ended. A write beyond it, or a barrier of the cluster at which a thread arrives
// without waiting, or waits without arriving, ends the process. Clusters run one after the other.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

using std::max;
using std::min;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct Index { int x; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

#define __device__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __builtin_assume(fact)

typedef unsigned int u32;

template <typename To, typename From>
static To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static float __uint_as_float(u32 x) { return same_bits<float>(x); }
static u32 __float_as_uint(float x) { return same_bits<u32>(x); }
template <typename T>
static T __ldcs(const T* p) { return *p; }
template <typename T>
static void __stcs(T* p, T x) { *p = x; }
template <typename T>
static T __ldcg(const T* p) { return *p; }
#define shared_address(p) ((u32)((const char*)(p) - (const char*)shared4))
static unsigned long long cycles() {
    static unsigned long long time;
    return time += 1000;
}
static void bring_to_l2(const void* p) { (void)*(const volatile char*)p; }  // it must be memory
static unsigned long long atomicAdd(unsigned long long* p, unsigned long long x) { return std::exchange(*p, *p + x); }

// ---- fibers ----

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int thread, block;  // of the cluster
    long phase = -1;    // of the cluster's barrier at which it arrived
    bool arrived = false;
    std::vector<std::pair<u32, float4>> copies;  // to shared memory, that are under way
};

// Where a number of fibers meet.
struct Meeting {
    std::vector<Fiber*> waiting;
};

struct Warp {
    Meeting meeting;
    float numbers[32][4];
    u32 operands[32][6];
    unsigned place;  // in that order
};

struct Block {
    std::vector<float4> shared;
    Meeting all, some;
    std::vector<Warp> warps;
    int running;
    int verdict = -1;
};

static std::vector<Block> blocks;
static std::vector<Fiber*> ready;
static Fiber* current;
static ucontext_t scheduler;
static std::mt19937 random_numbers;
static long cluster_phase;
static int cluster_arrived, first_block, grid, block_threads;
static Meeting cluster_meeting;
static std::function<void()> work;

#define threadIdx (Index{current->thread})
#define blockIdx (Index{first_block + current->block})
#define gridDim (Index{grid})
#define shared4 (blocks[current->block].shared.data())

static void need(bool fact, const char* complaint) {
    if (fact) return;
    fprintf(stderr, "%s\n", complaint);
    abort();
}

static void put_to_shared(u32 to, float4 v) {
    need(to % 16 == 0, "four numbers are stored where they do not lie together");
    shared4[to / 16] = v;
}
// It is there when it is waited for, and not before.
static void copy_to_shared(bool really, u32 to, const float* from) {
    if (!really) return;
    need((uintptr_t)from % 16 == 0, "four numbers are copied from where they do not lie together");
    current->copies.push_back({to, {from[0], from[1], from[2], from[3]}});
}
static void wait_for_copies() {
    for (const auto& [to, v] : current->copies) put_to_shared(to, v);
    current->copies.clear();
}

static void wait_to_be_called() { swapcontext(&current->context, &scheduler); }

static void call(Meeting& meeting) {
    ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
}

// Wait for others; the last to come does what is to be done for all.
static void meet(Meeting& meeting, size_t number, const std::function<void()>& last = [] {}) {
    meeting.waiting.push_back(current);
    if (meeting.waiting.size() == number) {
        last();
        call(meeting);
    }
    wait_to_be_called();
}

static Warp& warp_of_this() { return blocks[current->block].warps[current->thread / 32]; }
static void __syncthreads() { meet(blocks[current->block].all, block_threads); }
static void __syncwarp() { meet(warp_of_this().meeting, 32); }
template <int NUMBER>
static void wait_for_first() { meet(blocks[current->block].some, NUMBER); }

static float __shfl_xor_sync(u32, float x, int offset) {
    Warp& warp = warp_of_this();
    const int lane = current->thread % 32;
    warp.numbers[lane][0] = x;
    float result = 0;
    meet(warp.meeting, 32, [&] {
        float before[32];
        for (int i = 0; i < 32; i++) before[i] = warp.numbers[i][0];
        for (int i = 0; i < 32; i++) warp.numbers[i][0] = before[i ^ offset];
    });
    result = warp.numbers[lane][0];
    return result;
}

static bool __any_sync(u32, bool x) {
    Warp& warp = warp_of_this();
    const int lane = current->thread % 32;
    warp.numbers[lane][0] = x;
    meet(warp.meeting, 32, [&] {
        float any = 0;
        for (int i = 0; i < 32; i++) any = std::max(any, warp.numbers[i][0]);
        for (int i = 0; i < 32; i++) warp.numbers[i][0] = any;
    });
    return warp.numbers[lane][0] != 0;
}

// m16n8k8: TF32 has no more than the upper 19 bits.
static void mma(bool fresh, float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Warp& warp = warp_of_this();
    const int lane = current->thread % 32;
    const u32 operands[6] = {a0, a1, a2, a3, b0, b1};
    for (int i = 0; i < 6; i++) warp.operands[lane][i] = operands[i] & 0xffffe000u;
    for (int i = 0; i < 4; i++) warp.numbers[lane][i] = fresh ? 0 : c[i];
    meet(warp.meeting, 32, [&] {
        auto number = [&](int of_lane, int i) { return (double)__uint_as_float(warp.operands[of_lane][i]); };
        double a[16][8], b[8][8];
        for (int g = 0; g < 8; g++)
            for (int t = 0; t < 4; t++) {
                const int l = 4 * g + t;
                a[g][t] = number(l, 0), a[g + 8][t] = number(l, 1), a[g][t + 4] = number(l, 2);
                a[g + 8][t + 4] = number(l, 3), b[t][g] = number(l, 4), b[t + 4][g] = number(l, 5);
            }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
                double sum = warp.numbers[l][i];
                for (int k = 0; k < 8; k++) sum += a[row][k] * b[k][column];
                warp.numbers[l][i] = (float)sum;
            }
    });
    for (int i = 0; i < 4; i++) c[i] = warp.numbers[lane][i];
}

// ---- the cluster ----

static u32 rank_in_cluster() { return CLUSTER > 1 ? current->block : 0; }

static void arrive_at_cluster() {
    if (CLUSTER == 1) return;
    need(!current->arrived, "a thread arrives twice");
    current->arrived = true;
    current->phase = cluster_phase;
    if (++cluster_arrived == CLUSTER * block_threads) {
        cluster_arrived = 0, cluster_phase++;
        call(cluster_meeting);
    }
}
static void arrive_at_cluster_with_all() { arrive_at_cluster(); }
static void wait_for_cluster() {
    if (CLUSTER == 1) return __syncthreads();
    need(current->arrived, "a thread waits where it has not arrived");
    current->arrived = false;
    if (current->phase != cluster_phase) return;
    cluster_meeting.waiting.push_back(current);
    wait_to_be_called();
}

static float4* in_block(const float4* p, u32 rank) { return blocks[rank].shared.data() + (p - shared4); }
static float4 of_block(const float4* p, u32 rank) { return *in_block(p, rank); }
static void to_block(float4* p, float4 v, u32 rank) { *in_block(p, rank) = v; }

// ---- a launch ----

constexpr int GUARD = 1024;  // float4s beyond the end
constexpr u32 UNTOUCHED = 0x7fc12345u;

static void empty(Block& block) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    std::fill(block.shared.begin(), block.shared.end(), make_float4(nan, nan, nan, nan));
    std::fill((u32*)&*(block.shared.end() - GUARD), (u32*)(block.shared.data() + block.shared.size()), UNTOUCHED);
}

static bool guarded(Block& block) {
    const u32* end = (const u32*)(block.shared.data() + block.shared.size());
    return std::all_of(end - 4 * GUARD, end, [](u32 x) { return x == UNTOUCHED; });
}

static void run_fiber() {
    work();
    Block& block = blocks[current->block];
    need(!current->arrived, "a thread leaves without waiting for its cluster");
    need(current->copies.empty(), "a thread leaves without waiting for its copies");
    if (--block.running == 0) {
        need(guarded(block), "a write beyond shared memory");
        empty(block);
    }
    wait_to_be_called();  // for ever
}

// Who goes on: with even seeds anyone; with odd ones the first in an order of all warps, so that some blocks and warps are
// far ahead of others.
static std::vector<Fiber*>::iterator next(unsigned seed) {
    if (seed % 2 == 0) return ready.begin() + random_numbers() % ready.size();
    auto place = [](const Fiber* fiber) { return blocks[fiber->block].warps[fiber->thread / 32].place; };
    return std::min_element(ready.begin(), ready.end(), [&](Fiber* a, Fiber* b) { return place(a) < place(b); });
}

// False if threads wait for others that never come.
static bool launch(int number_of_blocks, int threads, int shared_bytes, unsigned seed,
                   const std::function<void()>& kernel) {
    constexpr size_t STACK = 64 * 1024;
    random_numbers.seed(seed);
    grid = number_of_blocks, block_threads = threads, work = kernel;
    for (first_block = 0; first_block < grid; first_block += CLUSTER) {
        std::vector<Fiber> fibers(CLUSTER * threads);
        blocks = std::vector<Block>(CLUSTER);
        cluster_phase = 0, cluster_arrived = 0, cluster_meeting = {};
        for (Block& block : blocks) {
            block.shared.resize((shared_bytes + 15) / 16 + GUARD);
            empty(block);
            block.warps.resize(threads / 32);
            const unsigned ahead = random_numbers() % 1000 * 1000;  // all of its warps, before or after those of others
            for (Warp& warp : block.warps) warp.place = ahead + random_numbers() % 1000;
            block.running = threads;
        }
        ready.clear();
        for (size_t i = 0; i < fibers.size(); i++) {
            Fiber& fiber = fibers[i];
            fiber.block = i / threads, fiber.thread = i % threads;
            fiber.stack = std::make_unique<char[]>(STACK);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK;
            makecontext(&fiber.context, run_fiber, 0);
            ready.push_back(&fiber);
        }
        while (!ready.empty()) {
            std::swap(*next(seed), ready.back());
            current = ready.back();
            ready.pop_back();
            swapcontext(&scheduler, &current->context);
        }
        for (Block& block : blocks)
            if (block.running) return false;
    }
    return true;
}
