/* Attention of many heads that share keys: the calls that take this path, and its two ways to sum.
 *
 * With few heads per key, reading memory takes the time; with many (with latents, all), products do. Here, keys
 * are multiplied in place, without packing: by matrices (bfloat16, AMX) or along head_dim (float32). Prompts and
 * decodes take the same path, so they have the same bits.
 * Refuses to know: pieces, threads.
 */
#ifndef BATON_ATTENTION_SHARED_H
#define BATON_ATTENTION_SHARED_H

#include "attention.h"

#define SHARED_GROUP 8 /* fewest heads per key for which this path pays */
#define WIDE_HEAD 256  /* smallest head_dim for which adding a vector's lanes costs little */

INLINE int64_t group_of(const attention_call *c) { return c->num_heads / c->num_kv_heads; }

/* Return whether a call takes this path with bfloat16 matrices (AMX). */
INLINE int is_shared_in_tiles(const attention_call *c) {
    return in_tiles(c) && group_of(c) >= SHARED_GROUP;
}

/* Return whether a call takes this path with float32 vectors along head_dim. */
INLINE int is_shared_in_lanes(const attention_call *c) {
    return LANES >= 8 && group_of(c) >= SHARED_GROUP && c->type == FLOAT32 && c->cache_type == FLOAT32 &&
           c->head_dim >= WIDE_HEAD && c->head_dim % LANES == 0 && c->value_dim % PANEL == 0;
}

INLINE int is_shared(const attention_call *c) { return is_shared_in_tiles(c) || is_shared_in_lanes(c); }

/* Return whether a call's decodes take this path: with matrices (AMX) always, however few heads share a key. */
INLINE int decodes_shared(const attention_call *c) { return in_tiles(c) || is_shared_in_lanes(c); }

int64_t shared_scratch_bytes(const attention_call *c);
/* Compute a piece like baton_attend_prompt, for calls that take this path. */
void baton_attend_shared(const attention_call *c, const piece *p, float *scratch, float *partial);

#endif
