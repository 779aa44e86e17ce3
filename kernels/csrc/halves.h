/* tile[rows, PANEL] (+)= x[rows, size] @ w[size, PANEL] in bfloat16, by instructions that multiply bfloat16 and
 * add in float: on matrices of 16 x 32 (AMX), or on pairs (AVX512-BF16).
 *
 * Each output's sum over `size` runs in order, in steps of HALVES inputs from the first on. So a row's result does
 * not depend on the other rows.
 * Refuses to know: the origin of x and w, threads.
 */
#ifndef BATON_HALVES_H
#define BATON_HALVES_H

#include "micro.h"

/* Inputs per step. x is [step][row][HALVES]. */
#define HALVES 32
#define ROW_BYTES (HALVES * 2)
#define STEP_BYTES (HALVES * PANEL * 2) /* a step of w: [step][pair][PANEL][2] */

#if defined(__AVX512BF16__)
#define DOTS_HALVES 1
#else
#define DOTS_HALVES 0
#endif

#if defined(__AMX_BF16__) && DOTS_HALVES
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#define TILE_ROWS 16
#define TILED_ROWS (2 * TILE_ROWS) /* two matrices share each part of w */

/* Return whether Linux lets this process use AMX; threads then have 8 KiB more state to save. */
int baton_has_tiles(void);

#if HAS_TILES

typedef struct {
    uint8_t palette, start_row, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Configure the tile registers: 0 to 3 are sums, 4 and 5 first factors with `bytes` (at most 64) per row, 6 and 7
 * second factors with bytes / 4 rows. All others have 16 rows of 64 bytes; unused rows only cost time. */
INLINE void tiles_begin(int64_t bytes) {
    uint16_t size = (uint16_t)bytes;
    uint8_t rows = (uint8_t)(bytes / 4);
    tile_config config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, size, size, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, rows, rows},
    };
    /* Not _tile_loadconfig: GCC 12.2 assumes that it reads only 8 bytes, and may drop stores to other bytes. */
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}
INLINE void tiles_end(void) { _tile_release(); }

/* Vector work to do while matrices are multiplied, one piece per step; NULL: none. */
typedef struct {
    void (*piece)(void *of, int64_t size);
    void *of;
    int64_t size;
} meanwhile;

/* x: the rows' part of a step, with steps x_step bytes apart. tile: rows of `stride` floats, with memory for whole
 * matrices. `level`: the cache to prefetch into, 1 or 2; a constant. */
INLINE void tiles_product(int matrices, int level, const char *w, const char *x, int64_t x_step,
                          int64_t num_steps, float *tile, int64_t stride, int accumulate, fetch f,
                          meanwhile other) {
    const int64_t pitch = stride * sizeof(float);
    float *second = tile + TILE_ROWS * stride;
    if (accumulate) {
        _tile_loadd(0, tile, pitch);
        _tile_loadd(1, tile + LANES, pitch);
        if (matrices > 1) {
            _tile_loadd(2, second, pitch);
            _tile_loadd(3, second + LANES, pitch);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (matrices > 1) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    for (int64_t s = 0; s < num_steps; s++) {
        _tile_loadd(4, x, ROW_BYTES);
        _tile_loadd(6, w, PANEL * 4);
        _tile_loadd(7, w + LANES * 4, PANEL * 4);
        for (int64_t byte = 0; byte < f.step; byte += 64) fetch_into(level, f.from + byte);
        f.from += f.step;
        if (other.piece) other.piece(other.of, other.size);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (matrices > 1) {
            _tile_loadd(5, x + TILE_ROWS * ROW_BYTES, ROW_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        x += x_step, w += STEP_BYTES;
    }
    _tile_stored(0, tile, pitch);
    _tile_stored(1, tile + LANES, pitch);
    if (matrices > 1) {
        _tile_stored(2, second, pitch);
        _tile_stored(3, second + LANES, pitch);
    }
}

#endif

/* Store softmax weights as bfloat16, rounded like store_rounded. The instruction flushes subnormal numbers to
 * zero, but power_of_two returns none. */
INLINE void store_weights(void *to, vec x) {
#if DOTS_HALVES
    __m256bh rounded = _mm512_cvtneps_pbh((__m512)x);
    memcpy(to, &rounded, sizeof rounded);
#else
    store_rounded(to, x);
#endif
}

#if DOTS_HALVES

/* Convert HALVES e4m3 codes, each in the lower byte of 16 bits, to bfloat16; see from_e4m3s. */
INLINE __m512i e4m3s_as_halves(__m512i codes) {
    const __m512i rare = (__m512i)(vec_u32){0x3b000000, 0x3bc03b80, 0x3c203c00, 0x3c603c40,
                                            0x3c903c80, 0x3cb03ca0, 0x3cd03cc0, 0x00003ce0,
                                            0, 0, 0, 0, 0, 0, 0, 0x7fc00000};
    __m512i next = _mm512_add_epi16(codes, _mm512_set1_epi16(1));
    __mmask32 is_rare = _mm512_testn_epi16_mask(next, _mm512_set1_epi16(0x70));
    __m512i halves = _mm512_and_si512(_mm512_slli_epi16(codes, 4), _mm512_set1_epi16(0x07f0));
    halves = _mm512_add_epi16(halves, _mm512_set1_epi16(120 << 7));
    halves = _mm512_mask_permutexvar_epi16(halves, is_rare, codes, rare);
    /* halves | (codes << 8 & the sign bit) */
    return _mm512_ternarylogic_epi32(halves, _mm512_slli_epi16(codes, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
}

/* Load pairs of LANES outputs as bfloat16; `index` counts pairs. */
INLINE vec_u32 load_halves_of_pairs(int type, const void *w, int64_t index) {
    if (type != FLOAT8) return load_pairs(BFLOAT16, w, index);
    const char *codes = (const char *)w + index * 2;
    return (vec_u32)e4m3s_as_halves(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)codes)));
}

/* Convert a step of w from codes to bfloat16, STEP_BYTES. */
INLINE void widen_step(const char *codes, char *step) {
    for (int64_t i = 0; i < STEP_BYTES / 4; i += LANES)
        _mm512_store_si512(step + i * 4, (__m512i)load_halves_of_pairs(FLOAT8, codes, i));
}

/* Store a line of the output, rounded like store_rounded. With `passes_by`, bypass the cache, which would first
 * fetch the line. */
INLINE void store_line(void *to, vec first, vec second, int passes_by) {
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31,
                                         29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512i low = (__m512i)rounded_bits(first), high = (__m512i)rounded_bits(second);
    __m512i line = _mm512_permutex2var_epi16(low, odd, high);
    if (passes_by)
        _mm512_stream_si512(to, line);
    else
        _mm512_storeu_si512(to, line);
}

/* sum += the pair at `two` times each lane's pair, one element after the other. */
INLINE vec dot_pair(vec sum, const void *two, vec_u32 pairs) {
    int32_t input;
    memcpy(&input, two, 4);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(input), (__m512bh)pairs);
}

/* tile: rows of `stride` floats. With `factors`, each row's old sums are first multiplied by its factor. */
INLINE void pairs_rows(int rows, int type, const char *w, const char *x, int64_t x_step, int64_t num_steps,
                       float *tile, int64_t stride, int accumulate, const float *factors, fetch f) {
    vec sum[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        sum[r][0] = accumulate ? load(FLOAT32, tile, r * stride) : (vec){0};
        sum[r][1] = accumulate ? load(FLOAT32, tile, r * stride + LANES) : (vec){0};
        if (factors) sum[r][0] *= factors[r], sum[r][1] *= factors[r];
    }
    int64_t fetched = f.step / (HALVES / 2), num_pairs = HALVES / 2;
    if (rows == 1) as_one_loop(&num_pairs);
    for (int64_t s = 0; s < num_steps; s++, x += x_step)
        for (int64_t j = 0; j < num_pairs; j++, w += PANEL * 2 * size_of(type), f.from += fetched) {
            vec_u32 first = load_halves_of_pairs(type, w, 0), second = load_halves_of_pairs(type, w, LANES);
            fetch_into(0, f.from);
            if (fetched > 64) fetch_into(0, f.from + 64);
            if (j < rows) __builtin_prefetch(x + (rows + j) * ROW_BYTES, 0, 3); /* the next rows' */
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                sum[r][0] = dot_pair(sum[r][0], x + r * ROW_BYTES + j * 4, first);
                sum[r][1] = dot_pair(sum[r][1], x + r * ROW_BYTES + j * 4, second);
            }
        }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        store(tile + r * stride, sum[r][0]);
        store(tile + r * stride + LANES, sum[r][1]);
    }
}

#define PAIRS_CASE(n) \
    case n: \
        if (n <= MAX_ROWS) pairs_rows(n, type, w, x, x_step, num_steps, tile, stride, accumulate, factors, f); \
        break;

INLINE void pairs_product(int rows, int type, const char *w, const char *x, int64_t x_step, int64_t num_steps,
                          float *tile, int64_t stride, int accumulate, const float *factors, fetch f) {
    switch (rows) {
        PAIRS_CASE(1)
        PAIRS_CASE(2)
        PAIRS_CASE(3)
        PAIRS_CASE(4)
        PAIRS_CASE(5)
        PAIRS_CASE(6)
        PAIRS_CASE(7)
        PAIRS_CASE(8)
        PAIRS_CASE(9)
        PAIRS_CASE(10)
        PAIRS_CASE(11)
        PAIRS_CASE(12)
    }
}

#endif

#endif
