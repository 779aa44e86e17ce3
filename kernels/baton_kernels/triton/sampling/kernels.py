"""The three kernels of `sample_tokens`; a program works on one row of logits or a part of it.

Floats are compared as `ordered` keys (unsigned integers in the same order), so that the limit of a
filter, such as top-k, can be found exactly, bit by bit. The order of sums depends only on the
vocabulary's size, so a row's token does not depend on other rows. The noise equals that of Baton's
Gumbel-max sampler in torch, which uses the same hash of key and token id. Refuses to know: models.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Constants of the hash `lowbias32` (https://github.com/skeeto/hash-prospector), into which `mixed`
# also mixes a key.
SPREAD = tl.constexpr(0x9E3779B9)
FIRST_MULTIPLIER = tl.constexpr(0x7FEB352D)
SECOND_MULTIPLIER = tl.constexpr(0x846CA68B)
ALL_BITS = tl.constexpr(0xFFFFFFFF)
SHARE = tl.constexpr(2.0**-32)
EXPONENT_BIAS = tl.constexpr(127)
LOG_2 = tl.constexpr(0.6931471805599453)
# How many leading bits of a bound on logits are searched; the bound found is then at most 2**-11
# (relative) too low.
BITS_OF_BOUND = tl.constexpr(20)
NO_TOKEN = tl.constexpr(2**31 - 1)
NO_NUMBERS = tl.constexpr(-1)  # result in place of a token if a logit is NaN or plus infinity


@triton.jit
def ordered(x):
    """Convert float32 to uint32 keys that have the same order; 0 and -0 get one key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -(2**31))).to(tl.uint32, bitcast=True)


@triton.jit
def first_best_at_once(x, token_ids):
    """Return the best logit, and the lowest token id with this logit, by one reduction.

    If any logit is NaN, the best logit is NaN.
    """
    keys = tl.where(x == x, ordered(x), ALL_BITS)
    # The complement of the id makes the lowest of equal logits the largest number.
    ranked = (keys.to(tl.uint64) << 32) | (token_ids.to(tl.uint32) ^ ALL_BITS).to(tl.uint64)
    first = tl.max(ranked, axis=0)
    key = (first >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    bits = tl.where(key < 0, key ^ -(2**31), key ^ -1)  # undoes `ordered`
    token = (first.to(tl.uint32) ^ ALL_BITS).to(tl.int32, bitcast=True)
    return bits.to(tl.float32, bitcast=True), token


@triton.jit
def mixed(key0, key1, token_ids):
    """Hash each token id with a key of two random words."""
    hashes = token_ids.to(tl.uint32) * SPREAD + key0
    hashes = (hashes ^ (hashes >> 16)) * FIRST_MULTIPLIER ^ key1
    hashes = (hashes ^ (hashes >> 15)) * SECOND_MULTIPLIER
    return hashes ^ (hashes >> 16)


@triton.jit
def gumbel(hashes):
    """Return Gumbel noise ``-log(-log(1 - share))``; a token's hash gives the share in (0, 1)."""
    share = (hashes.to(tl.float32) + 0.5) * SHARE
    # The complement gives 1 - share exactly. Near 1, its logarithm is inexact, so a series is used.
    rest = ((hashes ^ ALL_BITS).to(tl.float32) + 0.5) * SHARE
    series = 1 / 3 + share * (1 / 4 + share * (1 / 5 + share * (1 / 6)))
    series = share * (1 + share * (1 / 2 + share * series))
    return -tl.log(tl.where(share < 1 / 16, series, -tl.log(rest)))


@triton.jit
def gumbel_bound(hashes):
    """Return an upper bound of `gumbel`, without computing logarithms.

    The bound is at most 0.09 too high for hashes from 100 to 2**27. The noise is at most
    ``-log(share)``. A float's bits, read as an integer, are its binary logarithm or up to 0.09 less
    (Mitchell, "Computer Multiplication and Division Using Binary Logarithms").
    """
    bits = hashes.to(tl.float32).to(tl.int32, bitcast=True)
    return (bits.to(tl.float32) * -(2.0**-23) + (EXPONENT_BIAS + 32)) * LOG_2


@triton.jit
def weigh(x, best, temperature):
    """Return each token's probability relative to that of the best logit, which may be infinite."""
    inverse = 1 / temperature
    return tl.where(x == best, 1.0, tl.exp((x - best) * inverse))


@triton.jit
def key_of_min_p(min_p, best, temperature):
    """Return the key of the lowest logit that min-p keeps; 0 if min-p is off."""
    least = best + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
    return tl.where(min_p > 0, ordered(least), 0)


@triton.jit
def first_best(scores, token_ids):
    """Return the best score, and the lowest token id with this score."""
    best = tl.max(scores, axis=0)
    return best, tl.min(tl.where(scores == best, token_ids, NO_TOKEN), axis=0)


@triton.jit
def largest_key(keys, weights, target, NUM_BITS: tl.constexpr):
    """Return the largest key such that its weight and those of larger keys reach ``target``.

    Returns 0 if all weights together are less than ``target``. Only the first
    ``NUM_BITS`` bits of the key are searched; the others are 0.
    """
    found = tl.full((), 0, tl.uint32)
    bit = tl.full((), 2**31, tl.uint32)
    for _ in range(NUM_BITS):
        reached = tl.sum(tl.where(keys >= (found | bit), weights, 0.0), axis=0)
        found = tl.where(reached >= target, found | bit, found)
        bit = bit >> 1
    return found


# ------------------------------------------------------------------ first kernel: every token


@triton.jit
def partials_kernel(
    logits_ptr, temperatures_ptr, keys_ptr, maxima_ptr, bests_ptr, totals_ptr, scores_ptr,
    tokens_ptr, logits_stride, vocab_size, num_parts, num_groups,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Find the best logit, total weight and best score of a part, and each group's best logit.

    | group | group | ... | group |   one part: BLOCK tokens; a group: GROUP tokens

    A greedy row needs only the best logit and its token. Its total weight is 1, or NaN if any logit
    is NaN.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token_ids = part * BLOCK + tl.arange(0, BLOCK)
    exists = token_ids < vocab_size
    x = tl.load(logits_ptr + row * logits_stride + token_ids, mask=exists, other=-float("inf")).to(
        tl.float32
    )
    temperature = tl.load(temperatures_ptr + row)
    out = row * num_parts + part
    if temperature > 0:
        best = tl.max(x, axis=0)
        weights = weigh(x, best, temperature)
        key0 = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        score, token = best_score(x, token_ids, temperature, key0, key1)
        tl.store(bests_ptr + out, best)
        tl.store(totals_ptr + out, tl.sum(tl.where(exists, weights, 0.0), axis=0))
        tl.store(scores_ptr + out, score)
        tl.store(tokens_ptr + out, token)
        group_maxima = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
        groups = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(maxima_ptr + row * num_groups + groups, group_maxima, mask=groups < num_groups)
    else:
        best, token = first_best_at_once(x, token_ids)
        tl.store(bests_ptr + out, best)
        tl.store(totals_ptr + out, tl.where(best == best, 1.0, best))
        tl.store(scores_ptr + out, best)
        tl.store(tokens_ptr + out, token)


@triton.jit
def best_score(x, token_ids, temperature, key0, key1):
    """Return the best score (logit plus noise) and its token.

    The noise of all tokens is computed only if upper bounds of the noise do not decide.
    """
    hashes = mixed(key0, key1, token_ids)
    bounds = x + temperature * gumbel_bound(hashes)
    _, token = first_best(bounds, token_ids)
    likely = token_ids == token
    score = tl.max(tl.where(likely, x, -float("inf")), axis=0)
    score += temperature * gumbel(mixed(key0, key1, token))
    others = tl.max(tl.where(likely, -float("inf"), bounds), axis=0)
    if others + 1e-4 * temperature + 1e-6 * tl.abs(others) >= score:
        score, token = first_best(x + temperature * gumbel(hashes), token_ids)
    return score, token


# ------------------------------------------------------------------ second kernel: the few best
# tokens


@triton.jit
def choose_kernel(
    logits_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, maxima_ptr, bests_ptr,
    totals_ptr, scores_ptr, tokens_ptr, groups_ptr, candidates_ptr, rows_ptr, undecided_ptr,
    out_ptr, logits_stride, vocab_size, num_parts, num_groups,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr,
    MOST: tl.constexpr, DEFAULT_K: tl.constexpr,
):  # fmt: skip
    """Choose a row's token if no filter applies, or if filters keep at most the MOST best tokens.

    The k-th largest of the groups' best logits is a lower bound of the k-th largest logit, so only
    groups that reach it are read. Without top-k, k is DEFAULT_K, and filters may keep more tokens
    than were read; the row is then left to `search_kernel`.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    part = tl.arange(0, PARTS)
    exists = part < num_parts
    at = row * num_parts + part
    bests = tl.load(bests_ptr + at, mask=exists, other=-float("inf"))
    totals = tl.load(totals_ptr + at, mask=exists, other=0.0)
    scores = tl.load(scores_ptr + at, mask=exists, other=-float("inf"))
    tokens = tl.load(tokens_ptr + at, mask=exists, other=NO_TOKEN)
    best = tl.max(bests, axis=0)
    total = tl.sum(totals * weigh(bests, best, tl.where(temperature > 0, temperature, 1.0)), axis=0)
    _, token = first_best(scores, tokens)
    # The total weight is NaN if any logit is NaN.
    is_number = (total == total) & (best < float("inf"))
    token = tl.where(token < vocab_size, token, 0)
    token = tl.where(is_number, token, NO_NUMBERS)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    filtered = is_number & (temperature > 0) & (has_top_k | (top_p < 1) | (min_p > 0))
    decided = 1
    if filtered:
        logits_ptr += row * logits_stride
        candidates_ptr += row * MOST
        bound, count = gather_candidates(
            logits_ptr, maxima_ptr + row * num_groups, groups_ptr + row * num_groups,
            candidates_ptr, tl.where(has_top_k, top_k, DEFAULT_K), vocab_size, num_groups,
            GROUPS, GROUP, TILE, MOST,
        )  # fmt: skip
        decided = 0
        if count <= MOST:
            least = key_of_min_p(min_p, best, temperature)
            drawn, enough = draw_candidate(
                logits_ptr, candidates_ptr, count, keys_ptr + row * 2, best, total, temperature,
                tl.where(has_top_k, top_k, 0), top_p, least, bound, MOST,
            )  # fmt: skip
            decided = enough.to(tl.int32)
            token = tl.where(enough, drawn, token)
    tl.store(rows_ptr + row * 2, best)
    tl.store(rows_ptr + row * 2 + 1, total)
    tl.store(undecided_ptr + row, 1 - decided)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def gather_candidates(
    logits_ptr, maxima_ptr, groups_ptr, candidates_ptr, wanted, vocab_size, num_groups,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Collect, in order of ids, all tokens whose logits reach a bound.

    The bound is chosen so that at least ``wanted`` groups have a logit that reaches it. Returns the
    bound's key, and the number of tokens; a number above MOST means that there are too many.
    """
    group = tl.arange(0, GROUPS)
    exists = group < num_groups
    maxima = tl.load(maxima_ptr + group, mask=exists, other=-float("inf"))
    keys = ordered(maxima)
    bound = largest_key(keys, tl.where(exists, 1.0, 0.0), wanted, BITS_OF_BOUND)
    reached = exists & (keys >= bound)
    num_reached = tl.sum(reached.to(tl.int32), axis=0)
    tl.store(groups_ptr + tl.cumsum(reached.to(tl.int32), axis=0) - 1, group, mask=reached)
    tl.debug_barrier()  # other threads of this program will read the groups
    count = tl.where(num_reached > MOST, MOST + 1, 0)
    for start in range(0, tl.where(num_reached > MOST, 0, num_reached), TILE):
        place = start + tl.arange(0, TILE)
        taken = tl.load(groups_ptr + place, mask=place < num_reached, other=num_groups)
        token_ids = tl.reshape(
            taken[:, None] * GROUP + tl.arange(0, GROUP)[None, :], (TILE * GROUP,)
        )
        inside = token_ids < vocab_size
        x = tl.load(logits_ptr + token_ids, mask=inside, other=-float("inf")).to(tl.float32)
        kept = (inside & (ordered(x) >= bound)).to(tl.int32)
        slots = count + tl.cumsum(kept, axis=0) - 1
        tl.store(candidates_ptr + slots, token_ids, mask=(kept > 0) & (slots < MOST))
        count += tl.sum(kept, axis=0)
    tl.debug_barrier()
    return bound, count


@triton.jit
def draw_candidate(
    logits_ptr, candidates_ptr, count, keys_ptr, best, total, temperature, top_k, top_p,
    least_by_min_p, bound, MOST: tl.constexpr,
):  # fmt: skip
    """Draw a token among the candidates that the filters keep.

    Top-p keeps a token if the more probable tokens weigh less than top-p times the weight that
    top-k keeps. Equally probable tokens are kept or dropped together, but only top-k tokens count
    in the sum of weights. Returns the token, and whether the candidates include all tokens that the
    filters keep.
    """
    slot = tl.arange(0, MOST)
    exists = slot < count
    token_ids = tl.load(candidates_ptr + slot, mask=exists, other=0)
    x = tl.load(logits_ptr + token_ids, mask=exists, other=-float("inf")).to(tl.float32)
    keys = ordered(x)
    weights = tl.where(exists, weigh(x, best, temperature), 0.0)
    least = least_by_min_p
    if top_k > 0:
        by_top_k = largest_key(keys, tl.where(exists, 1.0, 0.0), top_k.to(tl.float32), 32)
        above = exists & (keys > by_top_k)
        equal = top_k - tl.sum(above.to(tl.int32), axis=0)
        weight = tl.max(tl.where(exists & (keys == by_top_k), weights, 0.0), axis=0)
        total = tl.sum(tl.where(above, weights, 0.0), axis=0) + equal * weight
        least = tl.maximum(least, by_top_k)
    if top_p < 1:
        least = tl.maximum(least, largest_key(keys, weights, top_p * total, 32))
    key0 = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    scores = x + temperature * gumbel(mixed(key0, key1, token_ids))
    _, token = first_best(tl.where(exists & (keys >= least), scores, -float("inf")), token_ids)
    return token, least >= bound


# ------------------------------------------------------------------ third kernel: any number of
# tokens


@triton.jit
def search_kernel(
    logits_ptr, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, rows_ptr,
    undecided_ptr, out_ptr, logits_stride, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the token of a row that `choose_kernel` left open, in several passes over its logits.

    The set of tokens that top-p keeps is never computed. Instead, the token with the best score
    wins if the more probable tokens weigh less than top-p. Otherwise, this token and all less
    probable tokens are dropped, and the search repeats. The first try succeeds with probability
    top-p.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(undecided_ptr + row) != 0:
        logits_ptr += row * logits_stride
        temperature = tl.load(temperatures_ptr + row)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        best, total = tl.load(rows_ptr + row * 2), tl.load(rows_ptr + row * 2 + 1)
        least = key_of_min_p(tl.load(min_p_ptr + row), best, temperature)
        if (top_k > 0) & (top_k < vocab_size):
            by_top_k = tl.full((), 0, tl.uint32)
            bit = tl.full((), 2**31, tl.uint32)
            for _ in range(32):
                trial = by_top_k | bit
                reach, _ = measure(logits_ptr, vocab_size, trial, best, temperature, BLOCK)
                by_top_k = tl.where(reach >= top_k, trial, by_top_k)
                bit = bit >> 1
            above, total = measure(logits_ptr, vocab_size, by_top_k + 1, best, temperature, BLOCK)
            reach, mass = measure(logits_ptr, vocab_size, by_top_k, best, temperature, BLOCK)
            total += (mass - total) * ((top_k - above) / (reach - above).to(tl.float32))
            least = tl.maximum(least, by_top_k)
        key0 = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        token = tl.load(out_ptr + row).to(tl.int32)  # the token with the best score of all
        key = ordered(tl.load(logits_ptr + token).to(tl.float32))
        if key < least:
            token = draw_above(logits_ptr, vocab_size, least, temperature, key0, key1, BLOCK)
            key = ordered(tl.load(logits_ptr + token).to(tl.float32))
        target = tl.where(top_p < 1, top_p * total, float("inf"))
        _, mass = measure(logits_ptr, vocab_size, key + 1, best, temperature, BLOCK)
        while mass >= target:
            token = draw_above(logits_ptr, vocab_size, key + 1, temperature, key0, key1, BLOCK)
            key = ordered(tl.load(logits_ptr + token).to(tl.float32))
            _, mass = measure(logits_ptr, vocab_size, key + 1, best, temperature, BLOCK)
        tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def measure(logits_ptr, vocab_size, least, best, temperature, BLOCK: tl.constexpr):
    """Return the number and the total weight of the tokens whose key is at least ``least``."""
    counts = tl.zeros((BLOCK,), tl.int32)
    weights = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        exists = token_ids < vocab_size
        x = tl.load(logits_ptr + token_ids, mask=exists, other=-float("inf")).to(tl.float32)
        kept = exists & (ordered(x) >= least)
        counts += kept.to(tl.int32)
        weights += tl.where(kept, weigh(x, best, temperature), 0.0)
    return tl.sum(counts, axis=0), tl.sum(weights, axis=0)


@triton.jit
def draw_above(
    logits_ptr, vocab_size, least, temperature, key0, key1, BLOCK: tl.constexpr
):  # fmt: skip
    """Draw a token among those whose key is at least ``least``, of which there must be one."""
    best_scores = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_tokens = tl.full((BLOCK,), NO_TOKEN, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        exists = token_ids < vocab_size
        x = tl.load(logits_ptr + token_ids, mask=exists, other=-float("inf")).to(tl.float32)
        scores = x + temperature * gumbel(mixed(key0, key1, token_ids))
        better = exists & (ordered(x) >= least) & (scores > best_scores)
        best_scores = tl.where(better, scores, best_scores)
        best_tokens = tl.where(better, token_ids, best_tokens)
    _, token = first_best(best_scores, best_tokens)
    return token
