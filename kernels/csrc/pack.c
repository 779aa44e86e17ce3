/* Packs a linear layer's weight into the panels that linear.c reads, in every format; unpacks rows.
 *
 * PackedWeight.pack of baton_kernels/packed.py defines the result, bit for bit. Rows are read in place (maybe from
 * a mapped file), a strip of a panel at a time, and written once.
 * Refuses to know: files, layers.
 */
#include "linear.h"
#include "vectors.h"

#define STRIP 256  /* inputs that are converted together, so that they stay in L2 */
#define GROUP8 128 /* inputs that share the scale of 8-bit codes */
#define GROUP4 32  /* inputs that share a 4-bit code's scale and minimum; a strip's groups share factors */
#define CANDIDATES 12 /* scales to try for a group of 4-bit codes */

typedef struct {
    int64_t in_type, w_type, num_threads;
    int64_t first_row, num_rows; /* rows of the weight to write in this call */
    int64_t depth, in_stride;
    const void *in; /* [num_rows][in_stride] */
    void *panels;
    float *scales;      /* [out_features], for 8-bit numbers, else NULL */
    void *group_scales; /* [panels][groups][PANEL], for codes: bfloat16 with 8 bits, int8 with 4 */
    int8_t *group_minima;                       /* [panels][groups][PANEL], for 4-bit codes */
    uint16_t *scale_factors, *minimum_factors; /* [panels][strips][PANEL] bfloat16, for 4-bit codes */
} pack_call;

/* The rows [begin, end) of one panel, to write. */
typedef struct {
    int64_t panel, begin, end;
} panel_rows;

typedef struct {
    float x[PANEL][STRIP];
    uint16_t halves[PANEL][STRIP];
    int8_t numbers[PANEL][STRIP];
    float scales[PANEL];
} strip;

/* Round to the nearest integer, ties to even, by adding 1.5 * 2^23. */
INLINE int32_t nearest(float x) {
    union { float value; int32_t bits; } u = {x + 12582912.0f};
    return u.bits - 0x4b400000;
}

INLINE const void *row_of(const pack_call *c, panel_rows rows, int64_t i) {
    return at(c->in_type, c->in, (rows.panel * PANEL + i - c->first_row) * c->in_stride);
}

INLINE float largest_of(const float *x, int64_t size) {
    float largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < size; i++) {
        float magnitude = x[i] < 0 ? -x[i] : x[i];
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Return the number that an output's largest weight becomes. */
INLINE float limit_of(int type) { return type == FLOAT8 ? 448.0f : 127.0f; }

static void scale_rows(const pack_call *c, int type, panel_rows rows, float *scales) {
    float x[STRIP];
    for (int64_t i = rows.begin; i < rows.end; i++) {
        float limit = 1e-30f;
        for (int64_t k = 0; k < c->depth; k += STRIP) {
            int64_t size = min64(STRIP, c->depth - k);
            read_row(c->in_type, at(c->in_type, row_of(c, rows, i), k), x, size);
            float largest = largest_of(x, size);
            limit = largest > limit ? largest : limit;
        }
        c->scales[rows.panel * PANEL + i] = scales[i] = limit / limit_of(type);
    }
}

INLINE void round_row(const float *x, float scale, int8_t *numbers) {
#pragma omp simd
    for (int64_t k = 0; k < STRIP; k++) numbers[k] = (int8_t)nearest(x[k] / scale);
}

/* Round x / scale to e4m3; with scale 1, float8 numbers stay unchanged. */
INLINE void round_to_e4m3(const float *x, float scale, int8_t *numbers) {
    for (int64_t k = 0; k < STRIP; k++) numbers[k] = (int8_t)to_e4m3(x[k] / scale);
}

/* Round a group so that its largest magnitude becomes 127. Return the scale; weights are divided by the scale as
 * rounded to bfloat16. */
INLINE uint16_t round_group(const float *x, int8_t *numbers) {
    uint16_t rounded = to_bf16(largest_of(x, GROUP8) / 127.0f);
    float exact = from_bf16(rounded);
#pragma omp simd
    for (int64_t k = 0; k < GROUP8; k++) {
        float number = exact == 0 ? 0 : x[k] / exact;
        number = number < -127 ? -127 : number > 127 ? 127 : number; /* a rounded scale may give a bit more */
        numbers[k] = (int8_t)nearest(number);
    }
    return rounded;
}

/* Keep a compiler from fusing this product with a sum, because torch rounds both. */
INLINE vec alone(vec product) {
#if defined(__x86_64__)
    __asm__("" : "+x"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#else
    __asm__("" : "+m"(product));
#endif
    return product;
}

INLINE vec whole(vec x) { return __builtin_convertvector((vec_i32)(x + 12582912.0f) - 0x4b400000, vec); }

/* Find scale and minimum of LANES outputs' groups, x[GROUP4][PANEL]. CANDIDATES scales are tried: the codes of
 * each give a scale and minimum by least squares, as in GGML's K-quants, and the pair of least squared error wins.
 * Lanes are outputs, and sums run in order, so that every machine finds the same pair. */
INLINE void search_scale(const float *x, float *scale, float *minimum) {
    vec low = load(FLOAT32, x, 0), high = low, sum = {0};
    for (int64_t k = 0; k < GROUP4; k++) {
        vec value = load(FLOAT32, x, k * PANEL);
        low = choose(value < low, value, low);
        high = choose(value > high, value, high);
        sum += value;
    }
    vec range = high - low, best = splat(__builtin_inff()), best_scale = {0}, best_minimum = low;
    for (int64_t i = 0; i < CANDIDATES; i++) {
        vec inverse = keep(range > 0.0f, splat(12.5f + 0.3125f * i) / range);
        vec codes = {0}, squares = {0}, products = {0};
        for (int64_t k = 0; k < GROUP4; k++) {
            vec value = load(FLOAT32, x, k * PANEL), code = alone((value - low) * inverse);
            code = whole(choose(code > 15.0f, splat(15), code));
            codes += code, squares += code * code, products += alone(code * value);
        }
        vec spread = (float)GROUP4 * squares - codes * codes; /* whole numbers, exact */
        vec slope = ((float)GROUP4 * products - alone(codes * sum)) / spread;
        slope = keep((spread > 0.0f) & (slope > 0.0f), slope);
        vec offset = (sum - alone(slope * codes)) / (float)GROUP4;
        vec error = -(alone(slope * products) + alone(offset * sum)); /* without the squares of x, a constant */
        vec_i32 better = error < best;
        best = choose(better, error, best);
        best_scale = choose(better, slope, best_scale);
        best_minimum = choose(better, offset, best_minimum);
    }
    store(scale, best_scale), store(minimum, best_minimum);
}

/* Round the numbers of a strip's groups, [groups][PANEL], to multiples of their output's factor, at most 127.
 * Return the rounded numbers in `numbers`. */
static void round_to_factors(float *numbers, int64_t num_groups, panel_rows rows, int8_t *whole_numbers,
                             uint16_t *factors) {
    for (int64_t i = rows.begin; i < rows.end; i++) {
        float largest = 0;
        for (int64_t g = 0; g < num_groups; g++) {
            float number = numbers[g * PANEL + i], magnitude = number < 0 ? -number : number;
            largest = magnitude > largest ? magnitude : largest;
        }
        factors[i] = to_bf16(largest / 127.0f);
        float factor = from_bf16(factors[i]);
        for (int64_t g = 0; g < num_groups; g++) {
            float number = factor == 0 ? 0 : numbers[g * PANEL + i] / factor;
            number = number < -127 ? -127 : number > 127 ? 127 : number;
            whole_numbers[g * PANEL + i] = (int8_t)nearest(number);
            numbers[g * PANEL + i] = whole_numbers[g * PANEL + i] * factor;
        }
    }
}

/* Round a strip to 4-bit codes, stored minus 8; a weight is code * scale + minimum. */
static void round_strip4(const pack_call *c, panel_rows rows, int64_t k, strip *s) {
    float scales[STRIP / GROUP4][PANEL], minima[STRIP / GROUP4][PANEL], x[GROUP4][PANEL];
    int64_t groups = ceil_div(c->depth, GROUP4), here = min64(STRIP / GROUP4, groups - k / GROUP4);
    int64_t group = (rows.panel * groups + k / GROUP4) * PANEL;
    int64_t factor = (rows.panel * ceil_div(c->depth, STRIP) + k / STRIP) * PANEL;
    for (int64_t g = 0; g < here; g++) {
        for (int64_t j = 0; j < GROUP4; j++)
            for (int64_t i = 0; i < PANEL; i++) x[j][i] = s->x[i][g * GROUP4 + j];
        for (int64_t i = 0; i < PANEL; i += LANES) search_scale(&x[0][i], &scales[g][i], &minima[g][i]);
    }
    round_to_factors(scales[0], here, rows, (int8_t *)c->group_scales + group, c->scale_factors + factor);
    round_to_factors(minima[0], here, rows, c->group_minima + group, c->minimum_factors + factor);
    for (int64_t i = rows.begin; i < rows.end; i++)
        for (int64_t g = 0; g < here; g++) {
            float scale = scales[g][i], minimum = minima[g][i];
#pragma omp simd
            for (int64_t j = g * GROUP4; j < (g + 1) * GROUP4; j++) {
                float code = scale == 0 ? 0 : (s->x[i][j] - minimum) / scale;
                code = code < 0 ? 0 : code > 15 ? 15 : code;
                s->numbers[i][j] = (int8_t)(nearest(code) - 8);
            }
        }
    for (int64_t i = rows.begin; i < rows.end; i++) /* pads the last step */
        for (int64_t j = c->depth - k; j < STRIP; j++) s->numbers[i][j] = 0;
}

INLINE void round_strip(const pack_call *c, int type, panel_rows rows, int64_t k, strip *s) {
    if (type == CODES4) round_strip4(c, rows, k, s);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        if (type == BFLOAT16 || type == FLOAT16) write_row(type, s->x[i], s->halves[i], STRIP);
        if (type == INT8) round_row(s->x[i], s->scales[i], s->numbers[i]);
        if (type == FLOAT8) round_to_e4m3(s->x[i], c->scales ? s->scales[i] : 1, s->numbers[i]);
        if (type != CODES8) continue;
        for (int64_t g = 0; g < STRIP && k + g < c->depth; g += GROUP8) {
            int64_t group = rows.panel * ceil_div(c->depth, GROUP8) + (k + g) / GROUP8;
            ((uint16_t *)c->group_scales)[group * PANEL + i] =
                round_group(s->x[i] + g, s->numbers[i] + g);
        }
    }
}

INLINE void write_strip(const pack_call *c, int type, panel_rows rows, int64_t k, int64_t size,
                        const strip *s) {
    int64_t first = (rows.panel * filled_to(type, c->depth) + k) * PANEL;
    if (type == BFLOAT16) {
        uint16_t *panel = (uint16_t *)c->panels + first;
        for (int64_t j = 0; j < size; j += 2)
            for (int64_t i = rows.begin; i < rows.end; i++) {
                panel[j * PANEL + 2 * i] = s->halves[i][j];
                panel[j * PANEL + 2 * i + 1] = j + 1 < size ? s->halves[i][j + 1] : 0;
            }
        return;
    }
    if (type == FLOAT8) {
        int8_t *panel = (int8_t *)c->panels + first;
        for (int64_t j = 0; j < size; j += 2)
            for (int64_t i = rows.begin; i < rows.end; i++) {
                panel[j * PANEL + 2 * i] = s->numbers[i][j];
                panel[j * PANEL + 2 * i + 1] = j + 1 < size ? s->numbers[i][j + 1] : 0;
            }
        return;
    }
    for (int64_t j = 0; j < size; j++)
        for (int64_t i = rows.begin; i < rows.end; i++) {
            int64_t to = first + j * PANEL + i;
            if (type == FLOAT32) ((float *)c->panels)[to] = s->x[i][j];
            if (type == FLOAT16) ((uint16_t *)c->panels)[to] = s->halves[i][j];
            if (type == INT8) ((int8_t *)c->panels)[to] = s->numbers[i][j];
        }
}

/* Write the codes of 6 bits of a panel's rows: [16 inputs][3][PANEL][4 bytes], see unpack_six of codes.h. */
INLINE void write_six(uint8_t *panel, panel_rows rows, int64_t size, const strip *s) {
    for (int64_t j = 0; j < size; j += 16, panel += 3 * PANEL * 4)
        for (int64_t i = rows.begin; i < rows.end; i++)
            for (int64_t byte = 0; byte < 4; byte++) {
                const int8_t *numbers = s->numbers[i] + j + byte;
                uint8_t code[4];
                for (int64_t n = 0; n < 4; n++) code[n] = (uint8_t)(numbers[4 * n] + 32);
                uint8_t *to = panel + i * 4 + byte;
                to[0] = (code[0] & 15) | (code[1] & 15) << 4;
                to[PANEL * 4] = (code[2] & 15) | (code[3] & 15) << 4;
                to[2 * PANEL * 4] = code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6;
            }
}

/* Write the codes of a panel's rows, inputs from k on: [step][PANEL][4 bytes], see PackedWeight. */
INLINE void write_codes(void *panels, int type, int64_t depth, panel_rows rows, int64_t k, int64_t size,
                        const strip *s) {
    int64_t bits = type == CODES4 ? 4 : type == CODES6 ? 6 : 8, padded = filled_to(type, depth);
    size = filled_to(type, size);
    uint8_t *panel = (uint8_t *)panels + (rows.panel * padded + k) * PANEL * bits / 8;
    if (type == CODES6) {
        write_six(panel, rows, size, s);
        return;
    }
    for (int64_t j = 0; j < size; j += 32 / bits)
        for (int64_t i = rows.begin; i < rows.end; i++) {
            const int8_t *numbers = s->numbers[i] + j;
            uint8_t *to = panel + (j * bits / 32 * PANEL + i) * 4;
            for (int64_t byte = 0; byte < 4; byte++)
                to[byte] = type == CODES4 ? (numbers[byte] + 8) | (numbers[byte + 4] + 8) << 4
                                          : numbers[byte] + 128;
        }
}

INLINE void pack_panel(const pack_call *c, int type, panel_rows rows) {
    strip s;
    if ((type == INT8 || type == FLOAT8) && c->scales) scale_rows(c, type, rows, s.scales);
    for (int64_t k = 0; k < c->depth; k += STRIP) {
        int64_t size = min64(STRIP, c->depth - k);
        for (int64_t i = rows.begin; i < rows.end; i++) {
            if (size < STRIP) memset(s.x[i], 0, sizeof s.x[i]);
            read_row(c->in_type, at(c->in_type, row_of(c, rows, i), k), s.x[i], size);
        }
        round_strip(c, type, rows, k, &s);
        if (type == CODES8 || type == CODES4)
            write_codes(c->panels, type, c->depth, rows, k, size, &s);
        else
            write_strip(c, type, rows, k, size, &s);
    }
}

/* Return the panels that a thread takes at once: two threads in one huge page would both wait until it is
 * cleared. */
static int64_t panels_together(const pack_call *c, int64_t num_panels) {
    int64_t bytes = c->depth * PANEL * size_of(c->w_type);
    return max64(min64((2 << 20) / max64(bytes, 1), num_panels / (2 * c->num_threads)), 1);
}

/* Pack some rows of a weight whose last panel's padding is already written. */
int baton_pack_rows(const pack_call *c) {
    int64_t last_row = c->first_row + c->num_rows;
    int64_t first = c->first_row / PANEL, last = ceil_div(last_row, PANEL);
    int64_t together = panels_together(c, last - first);
#pragma omp parallel for schedule(dynamic, together) num_threads(c->num_threads) if (c->num_threads > 1)
    for (int64_t panel = first; panel < last; panel++) {
        int64_t origin = panel * PANEL;
        panel_rows rows = {panel, max64(0, c->first_row - origin), min64(PANEL, last_row - origin)};
        switch (c->w_type) {
        case FLOAT32: pack_panel(c, FLOAT32, rows); break;
        case BFLOAT16: pack_panel(c, BFLOAT16, rows); break;
        case FLOAT16: pack_panel(c, FLOAT16, rows); break;
        case INT8: pack_panel(c, INT8, rows); break;
        case FLOAT8: pack_panel(c, FLOAT8, rows); break;
        case CODES8: pack_panel(c, CODES8, rows); break;
        case CODES4: pack_panel(c, CODES4, rows); break;
        }
    }
    return 0;
}

typedef struct {
    int64_t w_type, num_threads, first_row, num_rows, depth;
    int64_t least; /* smallest number, which becomes code 0 */
    const uint8_t *numbers; /* [num_rows][depth], signed or not */
    void *panels;
} integers_call;

INLINE void pack_integers(const integers_call *c, int type, panel_rows rows) {
    strip s;
    int64_t middle = type == CODES4 ? 8 : type == CODES6 ? 32 : 128;
    for (int64_t k = 0; k < c->depth; k += STRIP) {
        int64_t size = min64(STRIP, c->depth - k);
        for (int64_t i = rows.begin; i < rows.end; i++) {
            int64_t row = rows.panel * PANEL + i - c->first_row;
            const uint8_t *from = c->numbers + row * c->depth + k;
            /* Modulo 256, signed and unsigned numbers give the same byte. */
            uint8_t shift = (uint8_t)(c->least + middle);
            for (int64_t j = 0; j < size; j++) s.numbers[i][j] = (int8_t)(uint8_t)(from[j] - shift);
            memset(s.numbers[i] + size, 0, STRIP - size);
        }
        write_codes(c->panels, type, c->depth, rows, k, size, &s);
    }
}

/* Pack rows that a checkpoint stores as integers into panels of codes. */
int baton_pack_integers(const integers_call *c) {
    int64_t last_row = c->first_row + c->num_rows;
    int64_t first = c->first_row / PANEL, last = ceil_div(last_row, PANEL);
#pragma omp parallel for num_threads(c->num_threads) if (c->num_threads > 1)
    for (int64_t panel = first; panel < last; panel++) {
        int64_t origin = panel * PANEL;
        panel_rows rows = {panel, max64(0, c->first_row - origin), min64(PANEL, last_row - origin)};
        if (c->w_type == CODES4)
            pack_integers(c, CODES4, rows);
        else if (c->w_type == CODES6)
            pack_integers(c, CODES6, rows);
        else
            pack_integers(c, CODES8, rows);
    }
    return 0;
}

typedef struct {
    int64_t type, out_type, num_threads, num_rows, num_columns, depth; /* num_columns: rows of the weight */
    const void *panels;
    const int64_t *ids; /* [num_rows], indices of the weight's rows */
    void *out;          /* [num_rows][depth], of the panels' type, or of FLOAT32 */
} unpack_call;

/* Unpack rows from panels of floating-point numbers. Return 0, or NO_ROW. */
int baton_unpack_rows(const unpack_call *c) {
    for (int64_t i = 0; i < c->num_rows; i++)
        if (c->ids[i] < 0 || c->ids[i] >= c->num_columns) return NO_ROW;
    int team = c->num_rows > 1 ? c->num_threads : 1;
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t row = 0; row < c->num_rows; row++) {
        int64_t id = c->ids[row], column = id % PANEL;
        const void *panel = at(c->type, c->panels, id / PANEL * filled_to(c->type, c->depth) * PANEL);
        void *to = (void *)at(c->out_type, c->out, row * c->depth);
        int64_t beside = c->type == BFLOAT16 ? 2 : 1; /* adjacent numbers of one output */
        fetch_lines(at(c->type, panel, beside * column), beside * PANEL * size_of(c->type), c->depth / beside);
        if (c->type == FLOAT32) {
            for (int64_t k = 0; k < c->depth; k++)
                ((float *)to)[k] = ((const float *)panel)[k * PANEL + column];
            continue;
        }
        for (int64_t k = 0; k < c->depth; k++) {
            int64_t place = c->type == BFLOAT16 ? k / 2 * 2 * PANEL + 2 * column + k % 2
                                                : k * PANEL + column;
            uint16_t half = ((const uint16_t *)panel)[place];
            if (c->out_type != FLOAT32)
                ((uint16_t *)to)[k] = half;
            else
                ((float *)to)[k] = c->type == BFLOAT16 ? from_bf16(half) : from_fp16(half);
        }
    }
    return 0;
}
