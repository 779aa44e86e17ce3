/* A linear layer's weight into the panels that linear.c reads, in every format; and rows out of them.
 *
 * The meaning is PackedWeight.pack of baton_kernels/packed.py, to the bit. Rows are read where they
 * lie (in a mapped file, say), a strip of a panel at a time, and each is written once.
 * Refuses to know: files, layers.
 */
#include "vectors.h"

#define STRIP 128 /* inputs of a panel that are converted together: they stay in L2 */
#define GROUP8 128 /* inputs that share the scale of 8-bit codes */
#define GROUP4 32  /* and of 4-bit codes */
#define STEP 8     /* inputs by which codes are filled up */

typedef struct {
    int64_t in_type, w_type, num_threads;
    int64_t first_row, num_rows; /* of the weight, that are written now */
    int64_t depth, in_stride;
    const void *in; /* [num_rows][in_stride] */
    void *panels;
    float *scales;          /* [out_features], of numbers of 8 bits, else NULL */
    uint16_t *group_scales; /* [panels][groups][PANEL] bfloat16, of codes, else NULL */
} pack_call;

/* What is written of one panel: its rows [begin, end). */
typedef struct {
    int64_t panel, begin, end;
} panel_rows;

typedef struct {
    float x[PANEL][STRIP];
    uint16_t halves[PANEL][STRIP];
    int8_t numbers[PANEL][STRIP];
    float scales[PANEL];
} strip;

/* To the nearest, ties to even: what 1.5 * 2^23 is added to loses its fraction. */
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

/* The largest weight of each output becomes 127. */
static void scale_rows(const pack_call *c, panel_rows rows, float *scales) {
    float x[STRIP];
    for (int64_t i = rows.begin; i < rows.end; i++) {
        float limit = 1e-30f;
        for (int64_t k = 0; k < c->depth; k += STRIP) {
            int64_t size = min64(STRIP, c->depth - k);
            read_row(c->in_type, at(c->in_type, row_of(c, rows, i), k), x, size);
            float largest = largest_of(x, size);
            limit = largest > limit ? largest : limit;
        }
        c->scales[rows.panel * PANEL + i] = scales[i] = limit / 127.0f;
    }
}

INLINE void round_row(const float *x, float scale, int8_t *numbers) {
#pragma omp simd
    for (int64_t k = 0; k < STRIP; k++) numbers[k] = (int8_t)nearest(x[k] / scale);
}

/* The largest weight of a group becomes 127 without its sign (8 bits), or -8 with it (4 bits);
 * returns the group's scale, by which, rounded as it is, the weights are divided. */
INLINE uint16_t round_group(int type, const float *x, int8_t *numbers) {
    int64_t size = type == CODES4 ? GROUP4 : GROUP8;
    float scale, least = -127, most = 127;
    if (type == CODES4) {
        float above = 0, below = 0;
#pragma omp simd reduction(max : above, below)
        for (int64_t k = 0; k < size; k++) {
            above = x[k] > above ? x[k] : above;
            below = -x[k] > below ? -x[k] : below;
        }
        float largest = above > below ? above : -below;
        for (int64_t k = size - 1; above == below && k >= 0; k--) /* the first of them */
            if (x[k] == above || x[k] == -above) largest = x[k];
        scale = largest / -8.0f, least = -8, most = 7;
    } else {
        scale = largest_of(x, size) / 127.0f;
    }
    uint16_t rounded = to_bf16(scale);
    float exact = from_bf16(rounded);
#pragma omp simd
    for (int64_t k = 0; k < size; k++) {
        float number = exact == 0 ? 0 : x[k] / exact;
        number = number < least ? least : number > most ? most : number; /* or after rounding */
        numbers[k] = (int8_t)nearest(number);
    }
    return rounded;
}

INLINE void round_strip(const pack_call *c, int type, panel_rows rows, int64_t k, strip *s) {
    int64_t size = type == CODES4 ? GROUP4 : GROUP8, num_groups = ceil_div(c->depth, size);
    for (int64_t i = rows.begin; i < rows.end; i++) {
        if (type == BFLOAT16 || type == FLOAT16) write_row(type, s->x[i], s->halves[i], STRIP);
        if (type == INT8) round_row(s->x[i], s->scales[i], s->numbers[i]);
        if (type != CODES8 && type != CODES4) continue;
        for (int64_t g = 0; g < STRIP && k + g < c->depth; g += size) {
            int64_t group = rows.panel * num_groups + (k + g) / size;
            c->group_scales[group * PANEL + i] = round_group(type, s->x[i] + g, s->numbers[i] + g);
        }
    }
}

INLINE void write_strip(const pack_call *c, int type, panel_rows rows, int64_t k, int64_t size,
                        const strip *s) {
    int64_t first = (rows.panel * c->depth + k) * PANEL;
    for (int64_t j = 0; j < size; j++)
        for (int64_t i = rows.begin; i < rows.end; i++) {
            int64_t to = first + j * PANEL + i;
            if (type == FLOAT32) ((float *)c->panels)[to] = s->x[i][j];
            if (type == BFLOAT16 || type == FLOAT16) ((uint16_t *)c->panels)[to] = s->halves[i][j];
            if (type == INT8) ((int8_t *)c->panels)[to] = s->numbers[i][j];
        }
}

/* [step][PANEL][4 bytes]: see PackedWeight. */
INLINE void write_codes(const pack_call *c, int type, panel_rows rows, int64_t k, int64_t size,
                        const strip *s) {
    int64_t bits = type == CODES4 ? 4 : 8, padded = ceil_div(c->depth, STEP) * STEP;
    uint8_t *panel = (uint8_t *)c->panels + (rows.panel * padded + k) * PANEL * bits / 8;
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
    if (type == INT8) scale_rows(c, rows, s.scales);
    for (int64_t k = 0; k < c->depth; k += STRIP) {
        int64_t size = min64(STRIP, c->depth - k);
        for (int64_t i = rows.begin; i < rows.end; i++) {
            if (size < STRIP) memset(s.x[i], 0, sizeof s.x[i]);
            read_row(c->in_type, at(c->in_type, row_of(c, rows, i), k), s.x[i], size);
        }
        round_strip(c, type, rows, k, &s);
        if (type == CODES8 || type == CODES4)
            write_codes(c, type, rows, k, ceil_div(size, STEP) * STEP, &s);
        else
            write_strip(c, type, rows, k, size, &s);
    }
}

/* Panels that a thread takes at once: two in one huge page would both wait for it to be cleared. */
static int64_t panels_together(const pack_call *c, int64_t num_panels) {
    int64_t bytes = c->depth * PANEL * size_of(c->w_type);
    return max64(min64((2 << 20) / max64(bytes, 1), num_panels / (2 * c->num_threads)), 1);
}

/* Parts of a weight may come one after the other; what fills up the last panel is there. */
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
        case CODES8: pack_panel(c, CODES8, rows); break;
        case CODES4: pack_panel(c, CODES4, rows); break;
        }
    }
    return 0;
}

typedef struct {
    int64_t type, num_threads, num_rows, depth;
    const void *panels;
    const int64_t *ids; /* [num_rows] */
    void *out;          /* [num_rows][depth], of the panels' type */
} unpack_call;

/* Rows by their numbers, of panels of floating-point numbers. */
int baton_unpack_rows(const unpack_call *c) {
    int team = c->num_rows > 1 ? c->num_threads : 1;
#pragma omp parallel for num_threads(team) if (team > 1)
    for (int64_t row = 0; row < c->num_rows; row++) {
        int64_t id = c->ids[row], from = id / PANEL * c->depth * PANEL + id % PANEL;
        const void *panel = at(c->type, c->panels, from);
        void *to = (void *)at(c->type, c->out, row * c->depth);
        for (int64_t k = 0; k < c->depth; k++) {
            if (size_of(c->type) == 2)
                ((uint16_t *)to)[k] = ((const uint16_t *)panel)[k * PANEL];
            else
                ((float *)to)[k] = ((const float *)panel)[k * PANEL];
        }
    }
    return 0;
}
