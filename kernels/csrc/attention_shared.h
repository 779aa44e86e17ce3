/* Queries of many heads that read the same keys: which calls they are, and their two ways to sum.
 *
 * Few heads wait for the memory that keys come from; many (of latents, all) wait for products. These
 * are taken where the keys lie, by matrices (bfloat16, AMX) or along head_dim (float32), instead of
 * packing the keys first. A prompt's rows and a decode's go one way: they have the same bits.
 * Refuses to know: pieces, threads.
 */
#ifndef BATON_ATTENTION_SHARED_H
#define BATON_ATTENTION_SHARED_H

#include "attention.h"

#define SHARED_GROUP 8 /* heads that share a key, from which packing it costs more than reading it */
#define WIDE_HEAD 256  /* numbers of a key, from which adding up a vector's lanes costs little */

INLINE int64_t group_of(const attention_call *c) { return c->num_heads / c->num_kv_heads; }

/* bfloat16 by matrices. */
INLINE int is_shared_in_tiles(const attention_call *c) {
    return in_tiles(c) && group_of(c) >= SHARED_GROUP;
}

/* float32, lanes along head_dim. */
INLINE int is_shared_in_lanes(const attention_call *c) {
    return LANES >= 8 && group_of(c) >= SHARED_GROUP && c->type == FLOAT32 && c->cache_type == FLOAT32 &&
           c->head_dim >= WIDE_HEAD && c->head_dim % LANES == 0 && c->value_dim % PANEL == 0;
}

INLINE int is_shared(const attention_call *c) { return is_shared_in_tiles(c) || is_shared_in_lanes(c); }

/* Decodes by matrices read keys where they lie, however few heads share them. */
INLINE int decodes_shared(const attention_call *c) { return in_tiles(c) || is_shared_in_lanes(c); }

int64_t shared_scratch_bytes(const attention_call *c);
/* As baton_attend_prompt, of such a call. */
void baton_attend_shared(const attention_call *c, const piece *p, float *scratch, float *partial);

#endif
