/* Vectors of floats, as wide as the machine's registers: load, convert, round, store, activate.
 *
 * With GCC's vector extensions, the same source becomes AVX-512, AVX2, NEON or scalar code.
 * Refuses to know: matrices, attention, models.
 */
#ifndef BATON_VECTORS_H
#define BATON_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#endif

/* Element types of tensors; the Python side uses the same numbers. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, FLOAT8 = 3 /* e4m3 */, FLOAT16 = 4 };
/* Weights stored as codes, for integer products; see codes.h. */
enum { CODES8 = 5, CODES4 = 6, CODES_E2M1 = 7, CODES6 = 8 };

#if defined(__AVX512F__)
#define LANES 16
#define MAX_ROWS 12 /* rows x 2 accumulators + 2 weights + 1 input fill 32 registers */
#elif defined(__AVX__)
#define LANES 8
#define MAX_ROWS 6 /* as above, with 16 registers */
#else
#define LANES 4
#if defined(__aarch64__)
#define MAX_ROWS 12
#else
#define MAX_ROWS 4
#endif
#endif
#define PANEL (2 * LANES) /* columns that a micro kernel computes together */

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef uint32_t vec_u32 __attribute__((vector_size(LANES * 4)));
typedef int32_t vec_i32 __attribute__((vector_size(LANES * 4)));
/* A vector type for unaligned memory of any type. */
typedef float vec_any __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef uint16_t vec_u16_any __attribute__((vector_size(LANES * 2), aligned(1), may_alias));
typedef uint32_t vec_u32_any __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef int8_t vec_i8_any __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint8_t vec_u8_any __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE float from_fp16(uint16_t x) {
    /* Move the exponent by 112; a product corrects subnormals, infinity and NaN. */
    union { uint32_t bits; float value; } u = {(uint32_t)(x & 0x7fff) << 13};
    u.value *= 0x1p112f;
    if ((x & 0x7c00) == 0x7c00) u.bits |= 0x7f800000;
    u.bits |= (uint32_t)(x & 0x8000) << 16;
    return u.value;
}

/* Zero-extend LANES 16-bit numbers to 32 bits. GCC 12 makes four instructions of the generic form instead of
 * one. */
INLINE vec_u32 widened(const void *p) {
#if defined(__AVX512F__)
    return (vec_u32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p));
#elif defined(__AVX2__)
    return (vec_u32)_mm256_cvtepu16_epi32(_mm_loadu_si128(p));
#else
    return __builtin_convertvector(*(const vec_u16_any *)p, vec_u32);
#endif
}

/* Convert e4m3 (Micikevicius et al., arXiv:2209.05433): exponent bias 7, no infinity, NaN is 0x7f. Avoids
 * subnormal floats, which would be slow, or flushed to zero. */
INLINE float from_e4m3(uint8_t x) {
    uint32_t rest = x & 0x7f;
    union { uint32_t bits; float value; } normal = {(rest << 20) + (120u << 23)}, result;
    result.value = rest < 8 ? (float)(int32_t)rest * 0x1p-9f : normal.value;
    if (rest == 0x7f) result.bits = 0x7fc00000;
    result.bits |= (uint32_t)(x & 0x80) << 24;
    return result.value;
}

/* Convert e4m3 codes in the lanes' lowest bytes; the other bytes are 0. */
INLINE vec from_e4m3s(vec_u32 codes) {
    vec_u32 rest = codes & 0x7f, sign = (codes & 0x80) << 24, normal = (rest << 20) + (120u << 23);
#if defined(__AVX512F__)
    /* The 15 smallest magnitudes and NaN come from a table. */
    const __m512 rare = _mm512_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f, 0x8p-9f, 0x9p-9f,
                                       0xap-9f, 0xbp-9f, 0xcp-9f, 0xdp-9f, 0xep-9f, __builtin_nanf(""));
    __mmask16 is_rare = _mm512_testn_epi32_mask((__m512i)(rest + 1), _mm512_set1_epi32(0x70));
    normal = (vec_u32)_mm512_mask_permutexvar_ps((__m512)normal, is_rare, (__m512i)rest, rare);
#else
    vec_u32 is_small = (vec_u32)((vec_i32)rest < 8), is_nan = (vec_u32)(rest == 0x7f);
#if defined(__AVX2__)
    const __m256 numbers = _mm256_setr_ps(0, 0x1p-9f, 0x2p-9f, 0x3p-9f, 0x4p-9f, 0x5p-9f, 0x6p-9f, 0x7p-9f);
    vec_u32 small = (vec_u32)_mm256_permutevar8x32_ps(numbers, (__m256i)rest);
#else
    vec_u32 small = (vec_u32)(__builtin_convertvector((vec_i32)rest, vec) * 0x1p-9f);
#endif
    normal = (is_small & small) | (~(is_small | is_nan) & normal) | (is_nan & 0x7fc00000u);
#endif
    return (vec)(normal | sign);
}

/* Load LANES numbers; `type` is a constant in every call, so that no branch is left. */
INLINE vec load(int type, const void *p, int64_t index) {
    if (type == BFLOAT16) return (vec)(widened((const uint16_t *)p + index) << 16);
    if (type == FLOAT16) {
        const uint16_t *half = (const uint16_t *)p + index;
#if defined(__AVX512F__)
        return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)half));
#elif defined(__F16C__)
        return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const void *)half));
#else
        vec wide;
        for (int i = 0; i < LANES; i++) wide[i] = from_fp16(half[i]);
        return wide;
#endif
    }
    if (type == INT8) {
        /* GCC 12 makes a dozen instructions of the generic form instead of one. */
#if defined(__AVX512F__)
        __m128i bytes = _mm_loadu_si128((const void *)((const int8_t *)p + index));
        return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__)
        __m128i bytes = _mm_loadl_epi64((const void *)((const int8_t *)p + index));
        return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
        vec_i8_any quarter = *(const vec_i8_any *)((const int8_t *)p + index);
        return __builtin_convertvector(__builtin_convertvector(quarter, vec_i32), vec);
#endif
    }
    if (type == FLOAT8) {
        const uint8_t *codes = (const uint8_t *)p + index;
#if defined(__AVX512F__)
        return from_e4m3s((vec_u32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes)));
#elif defined(__AVX2__)
        return from_e4m3s((vec_u32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)codes)));
#else
        return from_e4m3s(__builtin_convertvector(*(const vec_u8_any *)codes, vec_u32));
#endif
    }
    return *(const vec_any *)((const float *)p + index);
}

/* Return x * y + sum, rounded once if the machine can. By itself, a compiler fuses in some loops and not in
 * others, so loops that must give the same bits would differ. */
INLINE vec multiply_add(vec x, vec y, vec sum) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#else
    return x * y + sum;
#endif
}

INLINE void store(float *p, vec x) { *(vec_any *)p = x; }

INLINE float sum_lanes(vec x) {
    typedef float half __attribute__((vector_size(LANES * 2)));
    half parts[2];
    memcpy(parts, &x, sizeof x);
    half sum = parts[0] + parts[1];
    float total = 0;
#if LANES == 16
    typedef float quarter __attribute__((vector_size(16)));
    quarter quarters[2];
    memcpy(quarters, &sum, sizeof sum);
    quarter last = quarters[0] + quarters[1];
    total = (last[0] + last[1]) + (last[2] + last[3]);
#else
    for (int i = 0; i < LANES / 2; i++) total += sum[i];
#endif
    return total;
}

INLINE int32_t sum_integers(vec_i32 x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
#endif
}

INLINE float largest_lane(vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
/* Transpose 8 rows of 8 numbers: halves[i] has the first four numbers of rows i and i + 4, halves[4 + i] the last
 * four. */
INLINE void columns_of(const __m256 *halves, vec *columns) {
    __m256 pairs[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(halves[i], halves[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(halves[i], halves[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        columns[i] = (vec)_mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        columns[i + 1] = (vec)_mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        columns[i + 2] = (vec)_mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        columns[i + 3] = (vec)_mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
}
#endif

/* Transpose LANES rows of LANES numbers. */
INLINE void transpose(vec *rows) {
#if defined(__AVX512F__)
    /* Two by two and four by four within 128 bits, then 128-bit parts. Instructions that choose freely from two
     * vectors are avoided: they overwrite one, and take twice as long. */
    __m512 pairs[LANES], fours[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m512d first = (__m512d)pairs[i + half], second = (__m512d)pairs[i + half + 2];
            fours[i + 2 * half] = (__m512)_mm512_unpacklo_pd(first, second);
            fours[i + 2 * half + 1] = (__m512)_mm512_unpackhi_pd(first, second);
        }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512 even = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0x88);
        __m512 odd = _mm512_shuffle_f32x4(fours[i], fours[4 + i], 0xdd);
        __m512 later_even = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0x88);
        __m512 later_odd = _mm512_shuffle_f32x4(fours[8 + i], fours[12 + i], 0xdd);
        rows[i] = (vec)_mm512_shuffle_f32x4(even, later_even, 0x88);
        rows[4 + i] = (vec)_mm512_shuffle_f32x4(odd, later_odd, 0x88);
        rows[8 + i] = (vec)_mm512_shuffle_f32x4(even, later_even, 0xdd);
        rows[12 + i] = (vec)_mm512_shuffle_f32x4(odd, later_odd, 0xdd);
    }
#elif defined(__AVX2__)
    __m256 halves[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        halves[i] = _mm256_permute2f128_ps((__m256)rows[i], (__m256)rows[i + 4], 0x20);
        halves[4 + i] = _mm256_permute2f128_ps((__m256)rows[i], (__m256)rows[i + 4], 0x31);
    }
    columns_of(halves, rows);
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < i; j++) {
            float other = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = other;
        }
#endif
}

/* Add each vector's halves: those of rows[i] and rows[i + half], interleaved, become rows[i]; i < half, a
 * constant. */
INLINE void add_halves(vec *rows, int half) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
        __m512 first = (__m512)rows[i], second = (__m512)rows[i + half];
        rows[i] = (vec)_mm512_permutex2var_ps(first, low, second) +
                  (vec)_mm512_permutex2var_ps(first, high, second);
    }
#endif
}

/* Return the sum of each of LANES vectors, one per lane. */
INLINE vec sums_of_lanes(vec *rows) {
#if defined(__AVX512F__)
    add_halves(rows, 8);
    add_halves(rows, 4);
    add_halves(rows, 2);
    add_halves(rows, 1);
    return rows[0];
#else
    transpose(rows);
    vec sum = rows[0];
    for (int i = 1; i < LANES; i++) sum += rows[i];
    return sum;
#endif
}

/* Load LANES 32-bit values at `offset` bytes of LANES rows, as columns. */
INLINE void load_columns(const void *const *rows, int64_t offset, vec *columns) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    /* Halves of rows four apart share a vector from the start. */
    __m256 halves[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const float *low = (const void *)((const char *)rows[i] + offset);
            const float *high = (const void *)((const char *)rows[i + 4] + offset);
            __m256 first = _mm256_castps128_ps256(_mm_loadu_ps(low + 4 * half));
            halves[4 * half + i] = _mm256_insertf128_ps(first, _mm_loadu_ps(high + 4 * half), 1);
        }
    columns_of(halves, columns);
#else
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        columns[i] = *(const vec_any *)((const char *)rows[i] + offset);
    transpose(columns);
#endif
}

INLINE int64_t size_of(int type) {
    return type == FLOAT32 ? 4 : type == BFLOAT16 || type == FLOAT16 ? 2 : 1;
}

/* Return whether a type's weights are stored in pairs of inputs, the first input in the lower half. */
INLINE int is_paired(int w_type) { return w_type == BFLOAT16 || w_type == FLOAT8; }
INLINE vec_u32 load_pairs(int type, const void *p, int64_t index) {
    if (type == FLOAT8) return widened((const uint16_t *)p + index);
    return *(const vec_u32_any *)((const uint32_t *)p + index);
}
INLINE vec first_of(int type, vec_u32 pairs) {
    return type == FLOAT8 ? from_e4m3s(pairs & 0xff) : (vec)(pairs << 16);
}
INLINE vec second_of(int type, vec_u32 pairs) {
    return type == FLOAT8 ? from_e4m3s(pairs >> 8) : (vec)(pairs & 0xffff0000u);
}

/* Return a layer's number of inputs, padded as in the packed weight. */
INLINE int64_t filled_to(int w_type, int64_t depth) {
    int64_t step = is_paired(w_type) ? 2 : w_type == CODES6 ? 16 : w_type >= CODES8 ? 8 : 1;
    return ceil_div(depth, step) * step;
}

INLINE const void *at(int type, const void *p, int64_t index) {
    return (const char *)p + index * size_of(type);
}

INLINE float from_bf16(uint16_t x) {
    union { uint32_t bits; float value; } u = {(uint32_t)x << 16};
    return u.value;
}

/* Round to the nearest, ties to even, like torch. */
INLINE uint16_t to_bf16(float x) {
    union { float value; uint32_t bits; } u = {x};
    uint32_t rounded = (u.bits + 0x7fff + ((u.bits >> 16) & 1)) >> 16;
    return x != x ? 0x7fc0 : (uint16_t)rounded;
}

/* Round to the nearest, ties to even; larger numbers become infinity. */
INLINE uint16_t to_fp16(float x) {
    union { float value; uint32_t bits; } u = {x}, low;
    uint32_t sign = u.bits >> 16 & 0x8000, is_nan = x != x;
    u.bits &= 0x7fffffff;
    low.value = u.value + 0.5f; /* floats at 0.5 are 2^-24 apart, the smallest float16 */
    uint32_t high = ((u.bits + 0xfff + (u.bits >> 13 & 1)) >> 13) - (112u << 10);
    uint32_t rounded = u.value < 0x1p-14f ? low.bits & 0x7ff : u.value >= 65520.0f ? 0x7c00 : high;
    return (uint16_t)(is_nan ? 0x7e00 : sign | rounded);
}

/* Round to the nearest, ties to even; larger numbers become 448, the largest. */
INLINE uint8_t to_e4m3(float x) {
    union { float value; uint32_t bits; } u = {x}, low;
    uint32_t sign = u.bits >> 24 & 0x80, is_nan = x != x;
    u.bits &= 0x7fffffff;
    low.value = u.value + 16384.0f; /* floats at 16384 are 2^-9 apart, the smallest e4m3 */
    uint32_t high = ((u.bits + 0x7ffff + (u.bits >> 20 & 1)) >> 20) - (120u << 3);
    uint32_t rounded = u.value < 0x1p-6f ? low.bits & 0xf : u.value >= 448.0f ? 0x7e : high;
    return (uint8_t)(is_nan ? 0x7f : sign | rounded);
}

/* Read a row of a tensor as floats; write_row writes it back. */
INLINE void read_row(int type, const void *from, float *to, int64_t size) {
    if (type == BFLOAT16) {
        const uint16_t *p = from;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from_bf16(p[i]);
    } else if (type == FLOAT16) {
        const uint16_t *p = from;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) to[i] = from_fp16(p[i]);
    } else if (type == FLOAT8) {
        const uint8_t *p = from;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store(to + i, load(FLOAT8, p, i));
        for (; i < size; i++) to[i] = from_e4m3(p[i]);
    } else {
        memcpy(to, from, size * sizeof(float));
    }
}

INLINE float round_to(int type, float x) {
    return type == BFLOAT16  ? from_bf16(to_bf16(x))
           : type == FLOAT16 ? from_fp16(to_fp16(x))
                             : x;
}

/* x where `mask` is set, else 0. */
INLINE vec keep(vec_i32 mask, vec x) { return (vec)(mask & (vec_i32)x); }
INLINE vec choose(vec_i32 mask, vec x, vec other) {
    return (vec)((mask & (vec_i32)x) | (~mask & (vec_i32)other));
}
/* Return the larger of two numbers; the second if one is NaN. */
INLINE vec larger(vec first, vec second) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)first, (__m512)second);
#else
    return choose(first > second, first, second);
#endif
}

/* Round like to_bf16; the lower half of each lane is 0. */
INLINE vec_u32 rounded_bits(vec x) {
    vec_u32 bits = (vec_u32)x;
    bits += 0x7fff + ((bits >> 16) & 1);
#if defined(__AVX512F__)
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    bits = (vec_u32)_mm512_mask_mov_epi32((__m512i)bits, nan, _mm512_set1_epi32(0x7fc00000));
#else
    vec_u32 nan = (vec_u32)(x != x);
    bits = (bits & ~nan) | (nan & 0x7fc00000u);
#endif
    return bits & 0xffff0000u;
}

INLINE void store_rounded(uint16_t *p, vec x) {
    *(vec_u16_any *)p = __builtin_convertvector(rounded_bits(x) >> 16, vec_u16_any);
}

INLINE void write_row(int type, const float *from, void *to, int64_t size) {
    if (type == BFLOAT16) {
        uint16_t *p = to;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) store_rounded(p + i, load(FLOAT32, from, i));
        for (; i < size; i++) p[i] = to_bf16(from[i]);
    } else if (type == FLOAT16) {
        uint16_t *p = to;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) p[i] = to_fp16(from[i]);
    } else if (type == FLOAT8) {
        uint8_t *p = to;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) p[i] = to_e4m3(from[i]);
    } else {
        memcpy(to, from, size * sizeof(float));
    }
}

/* Store to a row of `type`, rounded like to_bf16 and to_fp16. */
INLINE void store_as(int type, void *p, int64_t index, vec x) {
    if (type == BFLOAT16) {
        store_rounded((uint16_t *)p + index, x);
    } else if (type == FLOAT16) {
        float row[LANES];
        store(row, x);
        write_row(FLOAT16, row, (uint16_t *)p + index, LANES);
    } else {
        store((float *)p + index, x);
    }
}

INLINE vec round_all(int type, vec x) {
    if (type == FLOAT32) return x;
    if (type == BFLOAT16) return (vec)rounded_bits(x);
    uint16_t rounded[LANES];
    store_as(type, rounded, 0, x);
    return load(type, rounded, 0);
}

#define LOG2_E 1.44269504f
#define ROUNDS 12582912.0f /* 1.5 * 2^23: adding and subtracting it rounds to a whole number */

/* e^x within 2 units in the last place: 2^n * p(r), r in [-ln 2 / 2, ln 2 / 2], p of degree 6 (the Taylor
 * polynomial, with an error of at most 2e-7 of the value). x lies in [-87.3, 88.3]. Uses vectors, because GCC
 * compiles a loop over floats into two branches, and the branch whose result it discards divides by 2^128. */
INLINE vec exp_within(vec x) {
    vec shifted = x * LOG2_E + ROUNDS, n = shifted - ROUNDS;
    vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = r * (1.0f / 720) + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)(((vec_i32)shifted + 127) << 23);
}

INLINE vec exp_fast(vec x) {
    x = choose(x < splat(-87.3f), splat(-87.3f), x);
    return exp_within(choose(x > splat(88.3f), splat(88.3f), x));
}

/* 2^x for x <= 0, within 2 units in the last place; 0 below the smallest normal float. */
INLINE vec power_of_two(vec x) {
#if defined(__AVX512F__)
    vec whole = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    vec shifted = x + ROUNDS, whole = shifted - ROUNDS;
#endif
    vec rest = x - whole; /* the polynomial's relative error is at most 1.6e-7 */
    vec p = multiply_add(rest, splat(1.32647925e-3f), splat(9.67151392e-3f));
    p = multiply_add(p, rest, splat(5.55073358e-2f));
    p = multiply_add(p, rest, splat(0.240222424f));
    p = multiply_add(p, rest, splat(0.693147004f));
    p = multiply_add(p, rest, splat(1.0f));
#if defined(__AVX512F__)
    __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)whole);
#else
    return keep(~(x < splat(-126.0f)), p * (vec)(((vec_i32)shifted + 127) << 23));
#endif
}

/* Return 0 below -88, where exp_fast no longer grows. */
INLINE vec silu(vec x) { return keep(~(x < -88.0f), x / (exp_fast(-x) + 1.0f)); }

/* Activations of a gated unit's first half; 0 means no gate. */
enum { SILU = 1, GELU_TANH = 2, GELU = 3, CLAMPED_SWIGLU = 4, PLAIN_SIGMOID = 5, RELU = 6 };
#define SWIGLU_LIMIT 7.0f
#define SWIGLU_ALPHA 1.702f

/* Hendrycks and Gimpel, arXiv:1606.08415. The approximation with tanh is x * sigmoid(2 * u). */
INLINE vec gelu_tanh(vec x) {
    vec u = 0.797884561f * (x + 0.044715f * x * x * x);
    return keep(~(u < -44.0f), x / (exp_fast(-2.0f * u) + 1.0f));
}

INLINE vec gelu(vec x) {
    vec grown;
    for (int i = 0; i < LANES; i++) grown[i] = 1.0f + erff(x[i] * 0.707106781f);
    return 0.5f * x * grown;
}

/* x * sigmoid(alpha * x), with x clamped to the limit (gpt-oss, arXiv:2508.10925). */
INLINE vec clamped_swish(vec x) {
    x = choose(x > SWIGLU_LIMIT, splat(SWIGLU_LIMIT), x);
    return keep(~(x < -88.0f / SWIGLU_ALPHA), x / (exp_fast(-SWIGLU_ALPHA * x) + 1.0f));
}

INLINE vec sigmoid(vec x) { return 1.0f / (exp_fast(-x) + 1.0f); }

INLINE vec activate(int64_t kind, vec x) {
    if (kind == CLAMPED_SWIGLU) return clamped_swish(x);
    if (kind == PLAIN_SIGMOID) return sigmoid(x);
    if (kind == RELU) return choose(x > 0.0f, x, splat(0.0f));
    return kind == SILU ? silu(x) : kind == GELU_TANH ? gelu_tanh(x) : gelu(x);
}

/* Return a gate's factor, computed from `x`, the gated unit's second half. */
INLINE vec gated_half(int64_t kind, vec x) {
    if (kind != CLAMPED_SWIGLU) return x;
    x = choose(x > SWIGLU_LIMIT, splat(SWIGLU_LIMIT), x);
    return choose(x < -SWIGLU_LIMIT, splat(-SWIGLU_LIMIT), x) + 1.0f;
}

/* cap * tanh(x / cap); small x use tanh's series, where 1 - 2 / (e^2t + 1) would lose digits. */
INLINE vec soften(vec x, float cap) {
    vec t = x / cap, square = t * t;
    vec series = square * (62.0f / 2835) - 17.0f / 315;
    series = series * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = series * square * t + t;
    vec far = 1.0f - 2.0f / (exp_fast(2.0f * t) + 1.0f);
    return cap * choose(square < splat(0.12f), series, far);
}

/* Return memory that this thread keeps between calls, one piece per `slot`; NULL: out of memory. */
void *baton_scratch(int slot, int64_t bytes);

/* Prefetch a column's lines, `step` bytes apart, so that their latencies overlap. */
INLINE void fetch_lines(const char *from, int64_t step, int64_t num) {
    for (int64_t i = 0; i < num; i++) __builtin_prefetch(from + i * step, 0, 3);
}

#endif
