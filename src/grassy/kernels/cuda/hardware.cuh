// Inline assembly for what C++ cannot express: tensor cores, clusters of thread blocks, barriers. The tests replace
// this file by an emulation on a CPU.

typedef unsigned int u32;

extern __shared__ float4 shared4[];

__device__ void bring_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// An address in shared memory. The asm keeps the compiler from recomputing it at every use.
__device__ u32 shared_address(const void* p) {
    u32 address = (u32)__cvta_generic_to_shared(p);
    asm volatile("" : "+r"(address));
    return address;
}

// Copies four floats from global to shared memory asynchronously, if `really`.
__device__ void copy_to_shared(bool really, u32 to, const float* from) {
    asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p cp.async.cg.shared.global [%1], [%2], 16; }"
                 ::"r"((u32)really), "r"(to), "l"(from) : "memory");
}
__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One vector store: the compiler does not always combine the four.
__device__ void put_to_shared(u32 to, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// The clock of this multiprocessor.
__device__ unsigned long long cycles() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(time)::"memory");
    return time;
}

// A barrier for the first THREADS_THAT_MEET threads of a block.
template <int THREADS_THAT_MEET>
__device__ void wait_for_first() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS_THAT_MEET) : "memory");
}

// ---- tensor cores ----

// c += a b, or c = a b if c is fresh: a is 16 x 8, b is 8 x 8.
__device__ void mma(bool fresh, float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const float before[4] = {fresh ? 0 : c[0], fresh ? 0 : c[1], fresh ? 0 : c[2], fresh ? 0 : c[3]};
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(before[0]), "f"(before[1]), "f"(before[2]),
          "f"(before[3]));
}

// ---- the cluster ----

__device__ u32 rank_in_cluster() {
    u32 rank = 0;
    if (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// After waiting, all threads of the cluster can read what each wrote to the shared memory of its own block before
// arriving. Other memory is not covered: a full release would wait a microsecond for all earlier stores of the thread.
__device__ void arrive_at_cluster() {
#if CLUSTER > 1 && __CUDACC_VER_MAJOR__ >= 13
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;\n barrier.cluster.arrive.relaxed.aligned;"
                 ::: "memory");
#elif CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

// The same for all memory, including stores to other blocks, which must not have exited yet.
__device__ void arrive_at_cluster_with_all() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ void wait_for_cluster() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

#if CLUSTER > 1
__device__ u32 address_in_block(const void* p, u32 rank) {
    u32 address = (u32)__cvta_generic_to_shared(p), remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

__device__ float4 of_block(const float4* p, u32 rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address_in_block(p, rank)) : "memory");
    return v;
}

__device__ void to_block(float4* p, float4 v, u32 rank) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};"
                 ::"r"(address_in_block(p, rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
#endif
