/* tile[rows, PANEL] += x[rows, BLOCK] @ w[BLOCK, PANEL] in integers: w is stored as codes of 8, 6 or 4 bits, x
 * is rounded to 8 bits, and the CPU sums products of bytes.
 *
 * A weight is (code - 2^(bits - 1)) * scale; the scale belongs to an output, or to a group of the output's inputs.
 * In a group with a minimum, a weight is code * scale + minimum, and the minimum is multiplied by the sum of the
 * group's inputs. Codes of e2m1 are indexes into a table of values. A row of x is cut into blocks of BLOCK inputs.
 * The inputs of one group of weights, at most BLOCK, share a scale that makes the largest of them 127 (symmetric),
 * whatever other rows have. The sum within a group is exact; groups and blocks are added in order, in float. With
 * `fine`, a row of x becomes two rows: the rounded numbers, and the remainders, rounded in the same way.
 * Refuses to know: the origin of x and w, threads.
 */
#ifndef BATON_CODES_H
#define BATON_CODES_H

#include "micro.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

/* 1: an instruction sums four products of bytes. 0: AVX2 sums pairs of 16-bit products. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || !defined(__AVX2__)
#define ADDS_FOUR 1
#elif !defined(__AVX512F__) || defined(__AVX512BW__)
#define ADDS_FOUR 0
#else
#define ADDS_FOUR 1
#endif

/* Maximum number of inputs that share a scale. Smaller groups of weights cost no more: each group's sum is multiplied
 * by a scale anyway. */
#define BLOCK 64
#define SUMMED 16 /* smallest group of inputs with its own sum */
#if ADDS_FOUR
#define SPAN BLOCK
#define SPAN_E2M1 BLOCK
#else
#define SPAN 32      /* at most this many 4-bit codes in a 16-bit sum: 2 * 8 * 15 * 127 < 2^15 */
#define SPAN_E2M1 16 /* 2 * 4 * 24 * 127 < 2^15 */
#endif

/* Maximum number of rows at a time: two sums per row, and the operands, fill the registers. */
#if ADDS_FOUR
#define CODE_ROWS MAX_ROWS
#else
#define CODE_ROWS (LANES == 16 ? 10 : 4)
#endif
/* 1: registers hold the tile's rows beside a group's sums. Then half as many rows are computed at a time, and
 * codes are read twice as often. For 4-bit codes this is 0, because they would be unpacked twice as often, which costs
 * too much. Codes of 6 bits are unpacked to 8 bits for more rows, see WIDENS. */
#define KEEPS_TILE(bits) (ADDS_FOUR && LANES == 16 && (bits) != 4)
/* 1: for more than two blocks of rows, a slice of codes of 6 bits is unpacked once to 8 bits. 0: sums of pairs need
 * inputs of 8 bits beside codes of 6, and of 16 bits beside codes of 8. */
#define WIDENS(type) (ADDS_FOUR && (type) == CODES6)
#define SIX_ROWS 4 /* codes of 6 bits: unpacking needs registers, too */
#define FEW_ROWS (LANES == 16 ? 4 : 0) /* for up to this many rows, registers always hold the tile */

typedef uint8_t codes __attribute__((vector_size(LANES * 4), aligned(1), may_alias));
typedef uint16_t pairs __attribute__((vector_size(LANES * 4), aligned(1), may_alias));

/* Header of one block of a row of x. All rows' headers come after all their numbers in memory, so that numbers
 * start on a cache line. */
typedef struct {
    /* One scale for the inputs of each group of weights. */
    float scales[BLOCK / SUMMED];
    /* If groups have minima: the sum of the group's rounded inputs, as a float. Otherwise: the start value of the
     * group's sum, which cancels the codes' offset. */
    int32_t groups[BLOCK / SUMMED];
} block_header;

INLINE vec to_float(vec_i32 x) { return __builtin_convertvector(x, vec); }

/* Return the bytes of a rounded input: 1, or 2 for products of 16-bit pairs. */
INLINE int64_t number_size(int bits) { return ADDS_FOUR || bits != 8 ? 1 : 2; }
INLINE int64_t numbers_bytes(int bits) { return BLOCK * number_size(bits); }
INLINE int64_t block_bytes(int bits) { return numbers_bytes(bits) + sizeof(block_header); }

/* The first block of some adjacent rows. */
typedef struct {
    const char *numbers;
    const block_header *headers;
} code_rows;

/* Return the blocks of the rows from `row` on; `room`: number of rows in `blocks`. */
INLINE code_rows rows_from(int bits, const char *blocks, int64_t room, int64_t row) {
    const char *headers = blocks + room * numbers_bytes(bits);
    return (code_rows){blocks + row * numbers_bytes(bits), (const block_header *)headers + row};
}

/* The weights' groups: inputs per group, at most BLOCK, and the offset to subtract from codes; 0 if groups have
 * minima. */
typedef struct {
    int64_t size;
    int32_t offset;
} code_groups;

/* Round a block's values. With `keep_rest`, `values` becomes the remainders. For 16 bits, inputs 1 and 2 of each
 * four are swapped, as even and odd bytes of codes are the easiest to separate. */
INLINE void round_values(int bits, float *values, code_groups groups, int keep_rest, code_rows to) {
    int32_t numbers[BLOCK] __attribute__((aligned(64)));
    block_header *header = (block_header *)to.headers;
    vec lost = {0};
    /* NaN must stay NaN. */
    for (int64_t i = 0; i < BLOCK; i += LANES) lost += load(FLOAT32, values, i) * 0.0f;
    float zero = sum_lanes(lost);
    for (int64_t g = 0; g < BLOCK; g += groups.size) {
        vec largest = {0};
        vec_i32 total = {0};
        for (int64_t i = g; i < g + groups.size; i += LANES) {
            vec x = load(FLOAT32, values, i);
            largest = larger(choose(x < 0.0f, -x, x), largest);
        }
        float limit = largest_lane(largest), inverse = limit > 1e-30f ? 127.0f / limit : 0.0f;
        float scale = limit * (1.0f / 127) + zero;
        for (int64_t i = g; i < g + groups.size; i += LANES) {
            /* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even. */
            vec x = load(FLOAT32, values, i), shifted = multiply_add(x, splat(inverse), splat(12582912.0f));
            vec_i32 rounded = (vec_i32)shifted - 0x4b400000;
            memcpy(numbers + i, &rounded, sizeof rounded);
            total += rounded;
            if (keep_rest) store(values + i, multiply_add(to_float(rounded), splat(-scale), x));
        }
        int32_t sum = sum_integers(total), start = -sum * groups.offset;
        float as_float = (float)sum;
        header->scales[g / groups.size] = scale;
        memcpy(&header->groups[g / groups.size], groups.offset ? (void *)&start : (void *)&as_float, 4);
    }
    if (number_size(bits) == 1) {
        int8_t *x = (int8_t *)to.numbers;
        for (int i = 0; i < BLOCK; i++) x[i] = (int8_t)numbers[i];
    } else {
        int16_t *x = (int16_t *)to.numbers;
        for (int i = 0; i < BLOCK; i += 4) {
            x[i] = (int16_t)numbers[i], x[i + 1] = (int16_t)numbers[i + 2];
            x[i + 2] = (int16_t)numbers[i + 1], x[i + 3] = (int16_t)numbers[i + 3];
        }
    }
}

/* Round a block of a row; with `fine`, also round the remainders, into the row after `to`. */
INLINE void round_block(int bits, int type, const void *from, int64_t size, code_groups groups, int fine,
                        code_rows to) {
    float values[BLOCK] __attribute__((aligned(64))) = {0};
    read_row(type, from, values, size);
    round_values(bits, values, groups, fine, to);
    if (!fine) return;
    to.numbers += numbers_bytes(bits), to.headers++;
    round_values(bits, values, groups, 0, to);
}

/* Values of e2m1 codes, times 2, plus OFFSET_E2M1 so that none is negative. */
#define OFFSET_E2M1 12
#define TABLE_E2M1 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0

INLINE int bits_of(int type) { return type == CODES8 ? 8 : type == CODES6 ? 6 : 4; }
/* Return the vectors of codes that are read together, and an output's codes in them. */
INLINE int vectors_of(int type) { return type == CODES6 ? 3 : 1; }
INLINE int64_t step_codes(int type) { return vectors_of(type) * 32 / bits_of(type); }
INLINE int64_t span_of(int type) {
    return bits_of(type) != 4 ? BLOCK : type == CODES_E2M1 ? SPAN_E2M1 : SPAN;
}
INLINE int32_t offset_of(int type) {
    return type == CODES_E2M1 ? OFFSET_E2M1 : 1 << (bits_of(type) - 1);
}

/* Return the numbers of 4-bit codes: the codes, or for e2m1 looked up. */
INLINE codes number_of(int type, codes w) {
    if (type != CODES_E2M1) return w;
#if defined(__AVX512BW__)
    const codes table = {TABLE_E2M1, TABLE_E2M1, TABLE_E2M1, TABLE_E2M1};
    return (codes)_mm512_shuffle_epi8((__m512i)table, (__m512i)w);
#elif defined(__AVX2__) && LANES == 8
    const codes table = {TABLE_E2M1, TABLE_E2M1};
    return (codes)_mm256_shuffle_epi8((__m256i)table, (__m256i)w);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    const uint8x16_t table = {TABLE_E2M1};
    return (codes)vqtbl1q_u8(table, (uint8x16_t)w);
#else
    static const uint8_t table[16] = {TABLE_E2M1};
    for (int i = 0; i < LANES * 4; i++) w[i] = table[w[i]];
    return w;
#endif
}

INLINE codes load_codes(const uint8_t *w) { return *(const codes *)w; }
INLINE codes low_half(codes w) { return w & 15; }
INLINE codes high_half(codes w) { return (codes)((pairs)w >> 4) & 15; }

/* Unpack 16 codes of 6 bits of each of LANES outputs: codes 4 i to 4 i + 3 become to[i]. Two vectors have the low
 * halves, as codes of 4 bits; the third has bits 4 and 5 of codes i, i + 4, i + 8, i + 12 in byte i. */
INLINE void unpack_six(const uint8_t *w, codes to[4]) {
    codes first = load_codes(w), second = load_codes(w + PANEL * 4), high = load_codes(w + 2 * PANEL * 4);
    to[0] = low_half(first) | ((codes)((pairs)high << 4) & 48);
    to[1] = high_half(first) | ((codes)((pairs)high << 2) & 48);
    to[2] = low_half(second) | (high & 48);
    to[3] = high_half(second) | ((codes)((pairs)high >> 2) & 48);
}

/* Unpack a panel's codes of `num_inputs` inputs to bytes minus `offset`: [input / 4][PANEL][4]. */
INLINE void unpack_codes(int type, int32_t offset, const uint8_t *w, int64_t num_inputs, const char *fetched,
                         uint8_t *to) {
    for (int64_t k = 0; k < num_inputs; k += step_codes(type)) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const uint8_t *from = w + half * LANES * 4;
            uint8_t *here = to + k * PANEL + half * LANES * 4;
            for (int v = 0; fetched && v < vectors_of(type); v++)
                __builtin_prefetch(fetched + (2 * v + half) * LANES * 4, 0, 2);
            if (type == CODES6) {
                codes quads[4];
                unpack_six(from, quads);
                for (int i = 0; i < 4; i++) *(codes *)(here + i * PANEL * 4) = quads[i] - (uint8_t)offset;
                continue;
            }
            codes read = load_codes(from);
            if (type == CODES8) {
                *(codes *)here = read - (uint8_t)offset;
            } else {
                *(codes *)here = number_of(type, low_half(read)) - (uint8_t)offset;
                *(codes *)(here + PANEL * 4) = number_of(type, high_half(read)) - (uint8_t)offset;
            }
        }
        w += vectors_of(type) * PANEL * 4;
        if (fetched) fetched += vectors_of(type) * PANEL * 4;
    }
}

/* Prefetch what a step of add_span for codes of 6 bits is to prefetch. */
INLINE void fetch_six(int level, fetch f, int64_t step) {
#pragma GCC unroll 3
    for (int v = 0; v < 3; v++) {
        fetch_into(level, f.from + (3 * step + v) * f.step);
        if (f.step > 64) fetch_into(level, f.from + (3 * step + v) * f.step + 64);
    }
}

#if ADDS_FOUR

/* sum[i] += products of lane i's 4 codes with the 4 numbers at x. */
INLINE vec_i32 dot4(vec_i32 sum, codes w, const char *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (vec_i32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif defined(__AVXVNNI__)
    return (vec_i32)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(four));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (vec_i32)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)vdupq_n_s32(four));
#elif defined(__ARM_FEATURE_DOTPROD)
    /* The instruction needs signed bytes: subtract 128 from each code, and add 128 * sum(x) at the end. */
    int8x16_t numbers = (int8x16_t)vdupq_n_s32(four);
    int32x4_t shift = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(64), numbers);
    int32x4_t products = vdotq_s32((int32x4_t)sum, (int8x16_t)(w ^ 128), numbers);
    return (vec_i32)vaddq_s32(products, vshlq_n_s32(shift, 1));
#else
    for (int j = 0; j < 4; j++) {
        vec_i32 code = (vec_i32)((vec_u32)w >> (8 * j)) & 255;
        sum += code * (int32_t)(int8_t)(four >> (8 * j));
    }
    return sum;
#endif
}

/* Add a span like add_span, of codes of 6 bits. */
INLINE void add_span_six(int rows, const uint8_t *w, const char *x, int64_t steps, vec_i32 sum[][2], fetch f) {
    for (int64_t s = 0; s < steps; s++) {
        fetch_six(0, f, s);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            codes quads[4];
            unpack_six(w + s * 3 * PANEL * 4 + half * LANES * 4, quads);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++)
                    sum[r][half] = dot4(sum[r][half], quads[i], x + r * numbers_bytes(6) + s * 16 + i * 4);
        }
    }
}

/* sum[rows] += a span of codes times the matching inputs of x; `steps`: numbers of vectors_of(type) in a half
 * panel. */
INLINE void add_span(int rows, int type, const uint8_t *w, const char *x, int64_t steps,
                     vec_i32 sum[][2], fetch f) {
    const int bits = bits_of(type);
    if (rows == 1) as_one_loop(&steps);
    if (bits == 6) {
        add_span_six(rows, w, x, steps, sum, f);
        return;
    }
    for (int64_t s = 0; s < steps; s++) {
        const uint8_t *here = w + s * PANEL * 4;
        codes first = load_codes(here), second = load_codes(here + LANES * 4);
        codes high0 = number_of(type, high_half(first)), high1 = number_of(type, high_half(second));
        codes low0 = number_of(type, low_half(first)), low1 = number_of(type, low_half(second));
        fetch_into(0, f.from + s * f.step);
        if (f.step > 64) fetch_into(0, f.from + s * f.step + 64);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            const char *numbers = x + r * numbers_bytes(bits) + s * (32 / bits);
            if (bits == 8) {
                sum[r][0] = dot4(sum[r][0], first, numbers);
                sum[r][1] = dot4(sum[r][1], second, numbers);
            } else {
                sum[r][0] = dot4(sum[r][0], low0, numbers);
                sum[r][1] = dot4(sum[r][1], low1, numbers);
                sum[r][0] = dot4(sum[r][0], high0, numbers + 4);
                sum[r][1] = dot4(sum[r][1], high1, numbers + 4);
            }
        }
    }
}

#else

#if LANES == 16
#define madd_pairs(w, x) ((vec_i32)_mm512_madd_epi16((__m512i)(w), (__m512i)(x)))
#define madd_bytes(w, x) ((pairs)_mm512_maddubs_epi16((__m512i)(w), (__m512i)(x)))
#else
#define madd_pairs(w, x) ((vec_i32)_mm256_madd_epi16((__m256i)(w), (__m256i)(x)))
#define madd_bytes(w, x) ((pairs)_mm256_maddubs_epi16((__m256i)(w), (__m256i)(x)))
#endif

/* Return a vector that has the 4 bytes at x in every lane. */
INLINE vec_i32 spread(const char *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return four - (vec_i32){0};
}

/* Add a span like add_span, of codes of 6 bits. A 16-bit sum has room for 4 products: 4 * 63 * 127 < 2^15. */
INLINE void add_span_six(int rows, const uint8_t *w, const char *x, int64_t steps, vec_i32 sum[][2], fetch f) {
    const pairs ones = (pairs){0} + 1;
    for (int64_t s = 0; s < steps; s++) {
        fetch_six(2, f, s);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            codes quads[4];
            unpack_six(w + s * 3 * PANEL * 4 + half * LANES * 4, quads);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const char *numbers = x + r * numbers_bytes(6) + s * 16;
                pairs first = madd_bytes(quads[0], spread(numbers)) + madd_bytes(quads[1], spread(numbers + 4));
                pairs second = madd_bytes(quads[2], spread(numbers + 8)) + madd_bytes(quads[3], spread(numbers + 12));
                sum[r][half] += madd_pairs(first, ones);
                sum[r][half] += madd_pairs(second, ones);
            }
        }
    }
}

/* sum[rows] += a span of codes times the matching inputs of x; `steps`: numbers of vectors_of(type) in a half
 * panel. */
INLINE void add_span(int rows, int type, const uint8_t *w, const char *x, int64_t steps,
                     vec_i32 sum[][2], fetch f) {
    const int bits = bits_of(type);
    if (bits == 6) {
        add_span_six(rows, w, x, steps, sum, f);
        return;
    }
    pairs small[CODE_ROWS][2];
    if (bits == 4)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) small[r][0] = small[r][1] = (pairs){0};
    for (int64_t s = 0; s < steps; s++) {
        const uint8_t *here = w + s * PANEL * 4;
        codes first = load_codes(here), second = load_codes(here + LANES * 4);
        fetch_into(2, f.from + s * f.step);
        if (f.step > 64) fetch_into(2, f.from + s * f.step + 64);
        if (bits == 8) {
            pairs even0 = (pairs)first & 255, odd0 = (pairs)first >> 8;
            pairs even1 = (pairs)second & 255, odd1 = (pairs)second >> 8;
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const char *numbers = x + r * numbers_bytes(8) + s * 8;
                vec_i32 even = spread(numbers), odd = spread(numbers + 4);
                sum[r][0] += madd_pairs(even0, even);
                sum[r][1] += madd_pairs(even1, even);
                sum[r][0] += madd_pairs(odd0, odd);
                sum[r][1] += madd_pairs(odd1, odd);
            }
        } else {
            codes low0 = number_of(type, low_half(first)), high0 = number_of(type, high_half(first));
            codes low1 = number_of(type, low_half(second)), high1 = number_of(type, high_half(second));
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) {
                const char *numbers = x + r * numbers_bytes(4) + s * 8;
                vec_i32 low = spread(numbers), high = spread(numbers + 4);
                small[r][0] += madd_bytes(low0, low);
                small[r][1] += madd_bytes(low1, low);
                small[r][0] += madd_bytes(high0, high);
                small[r][1] += madd_bytes(high1, high);
            }
        }
    }
    if (bits == 4) {
        pairs ones = (pairs){0} + 1;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            sum[r][0] += madd_pairs(small[r][0], ones);
            sum[r][1] += madd_pairs(small[r][1], ones);
        }
    }
}

#endif

/* Some blocks of a panel's codes, the same for all rows. */
typedef struct {
    int64_t num_blocks;
    int64_t x_step; /* bytes from one block of x to the next */
    code_groups groups;
    const float *scales; /* [block][group][PANEL]; NULL: one scale per output, applied later */
    const float *minima; /* [block][group][PANEL], or NULL */
} code_slice;

/* Set each row's sum of a group to its start value. */
INLINE void start_sums(int rows, const block_header *headers, int64_t group, vec_i32 sum[][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = headers[r].groups[group] - (vec_i32){0};
}

/* Scale the rows' sums of a group, and add them to `kept`, the tile's rows in registers, or if NULL to `tile`. */
INLINE void add_group(int rows, const block_header *headers, int64_t group, const float *scales,
                      const float *minima, vec_i32 sum[][2], float *tile, vec kept[][2]) {
    vec scale0 = splat(1), scale1 = splat(1);
    if (scales) scale0 = load(FLOAT32, scales, 0), scale1 = load(FLOAT32, scales, LANES);
    vec minimum0 = {0}, minimum1 = {0};
    if (minima) minimum0 = load(FLOAT32, minima, 0), minimum1 = load(FLOAT32, minima, LANES);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        vec first = to_float(sum[r][0]), second = to_float(sum[r][1]);
        if (scales) first *= scale0, second *= scale1;
        if (minima) {
            float inputs;
            memcpy(&inputs, &headers[r].groups[group], 4);
            first = multiply_add(splat(inputs), minimum0, first);
            second = multiply_add(splat(inputs), minimum1, second);
        }
        vec scale = splat(headers[r].scales[group]);
        if (kept) {
            kept[r][0] = multiply_add(first, scale, kept[r][0]);
            kept[r][1] = multiply_add(second, scale, kept[r][1]);
            continue;
        }
        vec low = load(FLOAT32, tile, r * PANEL), high = load(FLOAT32, tile, r * PANEL + LANES);
        store(tile + r * PANEL, multiply_add(first, scale, low));
        store(tile + r * PANEL + LANES, multiply_add(second, scale, high));
    }
}

/* x: the rows' first blocks; w: the codes. */
INLINE void codes_rows(int rows, int type, const uint8_t *w, code_rows x, code_slice c,
                       float *tile, fetch f) {
    const int bits = bits_of(type);
    const int64_t span = min64(span_of(type), c.groups.size), steps = span / step_codes(type);
    const int64_t vectors = steps * vectors_of(type);
    const float *scales = c.scales, *minima = c.minima;
    vec rows_of_tile[CODE_ROWS][2], (*kept)[2] = NULL;
    if (KEEPS_TILE(bits) || rows <= FEW_ROWS) kept = rows_of_tile;
    if (kept)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
            kept[r][0] = load(FLOAT32, tile, r * PANEL), kept[r][1] = load(FLOAT32, tile, r * PANEL + LANES);
    for (int64_t i = 0; i < c.num_blocks; i++) {
        const char *numbers = x.numbers + i * c.x_step;
        const block_header *headers = (const void *)((const char *)x.headers + i * c.x_step);
        for (int64_t g = 0; g * c.groups.size < BLOCK; g++) {
            vec_i32 sum[CODE_ROWS][2];
            if (c.groups.offset)
                start_sums(rows, headers, g, sum);
            else
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = (vec_i32){0};
            for (int64_t k = 0; k < c.groups.size; k += span) {
                add_span(rows, type, w, numbers, steps, sum, f);
                w += vectors * PANEL * 4, f.from += vectors * f.step;
                numbers += span * number_size(bits);
            }
            if (c.groups.offset && !scales)
                add_group(rows, headers, g, NULL, NULL, sum, tile, kept);
            else if (c.groups.offset)
                add_group(rows, headers, g, scales, NULL, sum, tile, kept);
            else
                add_group(rows, headers, g, scales, minima, sum, tile, kept);
            if (scales) scales += PANEL;
            if (minima) minima += PANEL;
        }
    }
    if (kept)
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            store(tile + r * PANEL, kept[r][0]);
            store(tile + r * PANEL + LANES, kept[r][1]);
        }
}

/* Return the most rows at a time for codes of `bits` bits. */
INLINE int code_rows_of(int bits) {
    if (!KEEPS_TILE(bits)) return CODE_ROWS;
    return bits == 6 ? SIX_ROWS : CODE_ROWS / 2;
}

#define CODES_CASE(n) \
    case n: \
        if (n <= code_rows_of(bits_of(type))) codes_rows(n, type, w, x, c, tile, f); \
        break;

INLINE void micro_codes(int rows, int type, const uint8_t *w, code_rows x, code_slice c,
                        float *tile, fetch f) {
    switch (rows) {
        CODES_CASE(1)
        CODES_CASE(2)
        CODES_CASE(3)
        CODES_CASE(4)
        CODES_CASE(5)
        CODES_CASE(6)
        CODES_CASE(7)
        CODES_CASE(8)
        CODES_CASE(9)
        CODES_CASE(10)
        CODES_CASE(11)
        CODES_CASE(12)
    }
}

#endif
