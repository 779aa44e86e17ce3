/* Computes paged attention, as paged_attention in baton_kernels/reference.py defines it.
 *
 * A step is cut into pieces that threads take one by one. A decode reads each key and value once from the cache,
 * for all query heads that share it; long contexts are cut into spans of fixed length, which are then joined
 * ("flash decoding"). Spans that several decodes share are read once for all of them (attention_prefix.h). A prompt's
 * pieces are blocks of queries that go through tiles of keys, packed for the same
 * micro kernel as linear layers. Both sum in the order of attention.h. Dao et al., arXiv:2205.14135.
 * Refuses to know: layers, schedulers.
 */
#include <float.h>
#include "attention_prefix.h"
#include "attention_shared.h"

/* Fewest heads per key for which a decode packs its keys for the micro kernel, because products then take longer than
 * reading keys. Both ways give the same bits. */
#define PACKED_GROUP 16

#define PIECES_PER_THREAD 3 /* pieces of decodes that share keys, at least, so that threads end together */

enum { SCRATCH_PIECES = 1, SCRATCH_PARTIALS = 2, SCRATCH_TILES = 3, SCRATCH_PREFIXES = 4 };

/* Return the tokens per piece of a prompt; its query rows are these tokens times the heads that share a key. */
static int64_t tokens_per_piece(const attention_call *c) {
    int64_t group = c->num_heads / c->num_kv_heads;
    return max64(1, PROMPT_ROWS / group);
}

/* Return the bytes that a piece needs. */
static int64_t piece_scratch_bytes(const attention_call *c) {
    int64_t shared = is_shared(c) || decodes_shared(c) ? shared_scratch_bytes(c) : 0;
    return ceil_div(max64(shared, prompt_scratch_bytes(c)), 64) * 64;
}

/* Return the bytes for queries and results of a piece that decodes share. */
static int64_t together_bytes(const attention_call *c) {
    int64_t rows = tokens_per_piece(c) * (c->num_heads / c->num_kv_heads);
    return rows * (partial_size(c) + c->head_dim) * sizeof(float);
}

INLINE int64_t first_key(const attention_call *c, int64_t position) {
    return c->sliding_window > 0 ? max64(0, position + 1 - c->sliding_window) : 0;
}

/* What is known of a step before it is cut. */
typedef struct {
    decode_spans *decodes; /* [num_requests] */
    sharer *sharers;
    int64_t num_sharers;
} shared_prefixes;

/* Return the tokens per piece of decodes that share `spans` spans: fewer than of a prompt if threads would idle. */
static int64_t decodes_per_piece(const attention_call *c, int64_t num, int64_t spans) {
    int64_t group = c->num_heads / c->num_kv_heads, num_pieces = spans * c->num_kv_heads;
    int64_t parts = ceil_div(PIECES_PER_THREAD * c->num_threads, num_pieces);
    return min64(tokens_per_piece(c), max64(ceil_div(num, parts), ceil_div(SHARING_ROWS, group)));
}

/* Make the pieces that several decodes share, like make_pieces. */
static int64_t share_pieces(const attention_call *c, const shared_prefixes *s, piece *pieces) {
    int64_t n = 0;
    for (int64_t first = 0, end; first < s->num_sharers; first = end) {
        const sharer *leader = s->sharers + first;
        for (end = first; end < s->num_sharers && s->sharers[end].leader == leader->leader;) end++;
        int64_t spans = s->decodes[leader->request].shared, num = end - first;
        for (int64_t span = 0; span < spans; span++) {
            while (s->sharers[first + num - 1].spans <= span) num--;
            int64_t each = decodes_per_piece(c, num, spans);
            for (int64_t i = 0; i < num; i += each)
                for (int64_t head = 0; head < c->num_kv_heads; head++, n++)
                    if (pieces)
                        pieces[n] = (piece){leader->request, head, 0, min64(each, num - i), span * SPAN,
                                            (span + 1) * SPAN, 0, (span + 1) * SPAN, first + i};
        }
    }
    return n;
}

/* Return the number of a step's pieces; if `pieces` is not NULL, write them there. */
static int64_t make_pieces(const attention_call *c, const shared_prefixes *prefixes, piece *pieces) {
    int64_t n = share_pieces(c, prefixes, pieces), partials = 0, block = tokens_per_piece(c), span = SPAN;
    for (int64_t r = 0; r < c->num_requests; r++) {
        int64_t row = c->query_start_loc[r], count = c->query_start_loc[r + 1] - row;
        int64_t length = c->seq_lens[r];
        decode_spans *d = prefixes->decodes + r;
        d->partial = -1;
        if (count == 1) {
            int64_t begin = first_key(c, length - 1);
            int64_t first = begin / span, spans = ceil_div(length, span) - first;
            d->spans = spans;
            if (spans > 1) d->partial = partials, partials += spans * c->num_kv_heads;
            for (int64_t head = 0; head < c->num_kv_heads; head++)
                for (int64_t s = d->shared; s < spans; s++, n++)
                    if (pieces)
                        pieces[n] = (piece){r, head, row, 1, max64(begin, (first + s) * span),
                                            min64(length, (first + s + 1) * span),
                                            spans > 1 ? d->partial + head * spans + s : -1, length - 1, -1};
        } else {
            /* Late queries see the most keys: from the last one back, long pieces come first, and short ones fill
             * gaps. */
            for (int64_t t = count; t > 0; t -= min64(t, block))
                for (int64_t head = 0; head < c->num_kv_heads; head++, n++)
                    if (pieces) {
                        int64_t tokens = min64(t, block), position = length - count + t - tokens;
                        int64_t end = c->row_ends ? c->row_ends[row + t - 1] : position + tokens;
                        pieces[n] = (piece){r, head, row + t - tokens, tokens, first_key(c, position), end,
                                            -1, position, -1};
                    }
        }
    }
    return n;
}

/* Compute a piece that several decodes share, and store each decode's partial results. */
static void attend_together(const attention_call *c, const shared_prefixes *s, const piece *p, float *scratch,
                            float *partials) {
    int64_t group = c->num_heads / c->num_kv_heads, bytes = group * c->head_dim * size_of(c->type);
    int64_t size = group * partial_size(c);
    /* The rows' queries of this head, and their results, lie behind the scratch of the piece. */
    float *results = (float *)((char *)scratch + piece_scratch_bytes(c));
    char *queries = (char *)(results + p->num_tokens * size);
    for (int64_t i = 0; i < p->num_tokens; i++) {
        int64_t row = c->query_start_loc[s->sharers[p->sharer + i].request];
        memcpy(queries + i * bytes, (const char *)c->query + (row * c->num_kv_heads + p->kv_head) * bytes, bytes);
    }
    attention_call own = *c;
    own.query = queries;
    own.num_heads = group;
    own.num_kv_heads = 1;
    own.kv_cache = at(c->cache_type, c->kv_cache, p->kv_head * c->head_stride);
    piece of_head = *p;
    of_head.kv_head = 0;
    if (decodes_shared(c)) baton_attend_shared(&own, &of_head, scratch, results);
    else baton_attend_prompt(&own, &of_head, scratch, results);
    for (int64_t i = 0; i < p->num_tokens; i++) {
        const decode_spans *d = s->decodes + s->sharers[p->sharer + i].request;
        int64_t to = d->partial + p->kv_head * d->spans + p->begin / SPAN;
        memcpy(partials + to * size, results + i * size, size * sizeof(float));
    }
}

/* Join the spans of one head of one decode, and write the output. */
static void join(const attention_call *c, int64_t request, const decode_spans *d, int64_t kv_head, int64_t h,
                 const float *partials) {
    int64_t group = c->num_heads / c->num_kv_heads, size = partial_size(c);
    float sums[padded_sum(c)];
    softmax_state state = EMPTY_STATE;
    memset(sums, 0, sizeof sums);
    for (int64_t s = 0; s < d->spans; s++) {
        const float *part = partials + ((d->partial + kv_head * d->spans + s) * group + h) * size;
        baton_join(&state, sums, (softmax_state){part[0], part[1]}, part + 2, padded_sum(c) / LANES, LANES);
    }
    float divisor = baton_divisor(state, c->sinks, kv_head * group + h);
    for (int64_t d = 0; d < c->value_dim; d++) sums[d] /= divisor;
    int64_t to = (c->query_start_loc[request] * c->num_heads + kv_head * group + h) * c->value_dim;
    write_row(c->type, sums, (char *)c->out + to * size_of(c->type), c->value_dim);
}

/* Find what decodes share; return 1 without memory. */
static int find_prefixes(const attention_call *c, shared_prefixes *s) {
    int64_t num = c->num_requests, bytes = num * (sizeof(decode_spans) + sizeof(sharer));
    s->decodes = baton_scratch(SCRATCH_PREFIXES, bytes + baton_sharers_table(c) * sizeof(int32_t));
    if (!s->decodes) return 1;
    s->sharers = (sharer *)(s->decodes + num);
    s->num_sharers = baton_find_sharers(c, s->sharers, s->decodes, (int32_t *)(s->sharers + num));
    return 0;
}

/* Return 0, or 1 without memory for the pieces. */
int baton_attention(const attention_call *c) {
    shared_prefixes prefixes;
    if (find_prefixes(c, &prefixes)) return 1;
    int64_t num_pieces = make_pieces(c, &prefixes, NULL), num_partials = 0, group = c->num_heads / c->num_kv_heads;
    piece *pieces = baton_scratch(SCRATCH_PIECES, (num_pieces + 1) * sizeof(piece));
    if (!pieces) return 1;
    make_pieces(c, &prefixes, pieces);
    int64_t work = 0;
    for (int64_t i = 0; i < num_pieces; i++) work += pieces[i].num_tokens * (pieces[i].end - pieces[i].begin);
    for (int64_t r = 0; r < c->num_requests; r++)
        if (prefixes.decodes[r].partial >= 0)
            num_partials = prefixes.decodes[r].partial + prefixes.decodes[r].spans * c->num_kv_heads;
    float *partials =
        baton_scratch(SCRATCH_PARTIALS, (num_partials + 1) * group * partial_size(c) * sizeof(float));
    if (!partials) return 1;
    int team = work * c->head_dim * group < SERIAL_WORK ? 1 : c->num_threads, failed = 0;
    int shared = is_shared(c), decodes = decodes_shared(c);
    int64_t scratch = piece_scratch_bytes(c) + (prefixes.num_sharers ? together_bytes(c) : 0);
#pragma omp parallel num_threads(team) if (team > 1)
    {
        float *tiles = baton_scratch(SCRATCH_TILES, scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces; i++) {
            const piece *p = pieces + i;
            if (p->sharer >= 0) {
                if (!tiles) failed = 1;
                else attend_together(c, &prefixes, p, tiles, partials);
            } else if (p->num_tokens > 1 || c->query_start_loc[p->request + 1] - c->query_start_loc[p->request] > 1) {
                if (!tiles) failed = 1;
                else if (shared) baton_attend_shared(c, p, tiles, NULL);
                else baton_attend_prompt(c, p, tiles, NULL);
            } else {
                float *partial = p->partial < 0 ? NULL : partials + p->partial * group * partial_size(c);
                /* Threads take pieces in turns, so this is probably the thread's next piece. */
                const piece *next = i + team < num_pieces ? p + team : NULL;
                if (group < PACKED_GROUP && !decodes) baton_attend_decode(c, p, next, partial);
                else if (!tiles) failed = 1;
                else if (decodes) baton_attend_shared(c, p, tiles, partial);
                else baton_attend_prompt(c, p, tiles, partial);
            }
        }
        if (num_partials) {
#pragma omp for schedule(dynamic, 4)
            for (int64_t n = 0; n < c->num_requests * c->num_heads; n++) {
                const decode_spans *d = prefixes.decodes + n / c->num_heads;
                int64_t head = n % c->num_heads;
                if (d->partial >= 0) join(c, n / c->num_heads, d, head / group, head % group, partials);
            }
        }
    }
    int64_t num_rows = c->query_start_loc[c->num_requests], row = c->num_heads * c->value_dim * size_of(c->type);
    memset((char *)c->out + num_rows * row, 0, (c->num_tokens - num_rows) * row);
    return failed;
}
