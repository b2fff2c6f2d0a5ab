// Sizes, flags and heads: macros and arguments of step.cu and stream.cu.

#define THREADS (32 * WARPS)
#define GROUPS (ROWS / 8)
#define MATRIX (ROWS * ROWS)
#define PAD 4                           // columns between rows, which avoids bank conflicts
#define TILES (ROWS == 8 ? 2 : ROWS == 16 ? 6 : 20)  // 16 x 8 pieces of the Gram matrices
#define TEAMS (ROWS == 32 ? 2 : 1)      // teams divide the tiles, too many for the registers of one warp
#define TEAM (WARPS / TEAMS)            // warps that sum the same tiles
#define BUFFERS (ROWS == 8 ? WARPS : ROWS == 16 ? WARPS / 2 : 2)  // buffers in which warps of a team sum at once
#define SHARE (TILES / TEAMS)           // tiles per warp
#define MIDDLE (ROWS == 8 ? 32 : MATRIX / 4)  // threads for the k x k matrices, four entries each
static_assert(MIDDLE <= THREADS && TEAM % BUFFERS == 0 && WARPS % GROUPS == 0, "more warps are needed");
#define ROWS_AT_ONCE (ROWS == 8 ? (8 + WARPS - 1) / WARPS : 1)  // rows that a warp loads at once
#define LARGEST_TURN 64.0f  // 2**MAX_DOUBLINGS of the reference
#define SMALL_TURN 0.02f    // largest squared angle for which a polynomial of degree 2 has an error of 1e-8. `usual`
                            // compares it with the norm of t^2 A, `middle` with its trace, which is no smaller

enum Flags { HAS_MOMENTUM = 1, PARALLEL = 2, CAPPED = 4, MAXIMIZE = 8, LR_ON_DEVICE = 16, MOMENTUM_ON_DEVICE = 32,
             VECTORS = 64, CAN_SKIP = 128, CAREFUL_ONLY = 256 };

enum Verdict { SKIP, AGAIN, MOVE, STAY, UNUSUAL };

#if GRAD_BF16
typedef unsigned short Grad;
#else
typedef float Grad;
#endif
#if MOMENTUM_BF16
typedef unsigned short Momentum;
#else
typedef float Momentum;
#endif

// The heads of a launch, passed by value. All have the same k and n.
struct Heads {
    float* weight[HEADS];
    const Grad* grad[HEADS];
    Momentum* momentum[HEADS];
    unsigned long long* counts[HEADS];  // skipped and capped classes
    int classes[HEADS];
    int end[HEADS];                     // last cluster of this head, plus 1
};

// The head that cluster `number` works on, and its first class.
struct Taken { int head, first; };
__device__ Taken taken_by(const Heads& heads, int number) {
    int head = 0;
    while (HEADS > 1 && number >= heads.end[head]) head++;
    return {head, (number - (head ? heads.end[head - 1] : 0)) * (1 + PAIRS)};
}
