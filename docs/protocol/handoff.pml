/* The hand-off as a model: router, two prefill nodes, two decode nodes. See README.md beside it.
 *
 * One process per (node, attempt); each step is what one round of a real loop does with one message.
 * The wire is a set of flags per attempt: what is in it may arrive in any order, late, twice or never.
 * A stopped process needs no state: any process here may be slow for as long as it likes. What a stop
 * adds is that others believe it dead, and that is the fault SUSPECT.
 * Refuses to know: tokens' values, layers, bytes, clocks.
 */

#ifndef REQUESTS
#define REQUESTS 1
#endif
#ifndef TRIES
#define TRIES 2         /* attempts per request: the retry budget */
#endif
#ifndef TOKENS
#define TOKENS 3        /* output tokens per request */
#endif
#ifndef BLOCKS
#define BLOCKS 3        /* KV blocks of each decode node; a prompt takes two */
#endif
#ifndef LOSSES
#define LOSSES 1        /* messages between P and D that are lost */
#endif
#ifndef DUPLICATES
#define DUPLICATES 0    /* messages between P and D that arrive twice */
#endif
#ifndef CRASHES
#define CRASHES 1       /* kill -9 of a P or a D */
#endif
#ifndef SUSPECTS
#define SUSPECTS 0      /* SIGSTOP or a broken link: taken for dead, alive, comes back */
#endif
#ifndef CANCELS
#define CANCELS 0       /* clients that leave */
#endif
#ifndef ROUTER_CRASHES
#define ROUTER_CRASHES 0
#endif

#define ATTEMPTS (REQUESTS * TRIES)
#define REQUEST(a) ((a) / TRIES)

/* What is in the wire between the P and the D of an attempt. */
#define START     1
#define GRANT     2
#define WATERMARK 4
#define COMMIT    8
#define CANCEL    16
#define QUIET     32
#define TO_P      (GRANT | CANCEL)
#define TO_D      (START | WATERMARK | COMMIT | QUIET)
byte wire[ATTEMPTS];
#define IN_WIRE(a, m) ((wire[a] & (m)) != 0)
#define SEND(a, m)    wire[a] = wire[a] | (m)
#define TAKE(a, m)    wire[a] = wire[a] & (63 - (m))

/* What is on the router's links: ordered, complete, until the link breaks. */
#define LEG_D    2      /* DecodeCommand */
#define END_P    4      /* CancelCommand to P, or its peer is gone, or AbortAll */
#define END_D    8      /* CancelCommand to D, or AbortAll */
#define LOST_P   16     /* to D: this P is gone */
#define TOKEN_1  32     /* from P */
#define FAILED   64     /* from D, or from the router's own loss of a node */
byte link[ATTEMPTS];
#define ON_LINK(a, m) ((link[a] & (m)) != 0)
#define TELL(a, m)    link[a] = link[a] | (m)
#define HEAR(a, m)    link[a] = link[a] & (127 - (m))
/* What the router does not listen to any more is dropped there. */
#define ANSWER(a, m)  link[a] = link[a] | (open[a] -> (m) : 0)

/* Nodes: P are 0 and 1, D are 2 and 3. */
bool dead[4];
bool gone[4];           /* as the router sees it */
bool router_dead;
byte p_of[ATTEMPTS];
byte d_of[ATTEMPTS];

/* Router. */
byte given[REQUESTS];   /* output indices the client has */
byte ended[REQUESTS];   /* terminal events the client has */
byte tries[REQUESTS];   /* attempts begun */
bool open[ATTEMPTS];    /* the attempt the router listens to */
bool has_token_1[ATTEMPTS];
byte base[ATTEMPTS];    /* output tokens of earlier attempts */
byte decoded[ATTEMPTS]; /* tokens of D not yet taken by the router */

/* P: one transfer. */
mtype = { NONE, STARTED, DRAINING, OVER, PARKED, GRANTED, RUNNING, QUARANTINED, GONE };
mtype p_state[ATTEMPTS] = NONE;
bool granted[ATTEMPTS];
byte computed[ATTEMPTS];  /* prompt blocks with KV, 0..2 */
byte posted[ATTEMPTS];    /* bit i: the write of block i was posted */
byte flying[ATTEMPTS];    /* bit i: it may still land */

/* D: one reservation. */
mtype d_state[ATTEMPTS] = NONE;
bool started[ATTEMPTS];   /* its START has come (perhaps before the command) */
bool kept[ATTEMPTS];      /* block 0 was a local prefix hit: first_block = 1 */
bool covered[ATTEMPTS];   /* the watermark covers block 0 */
byte block_0[ATTEMPTS];
byte block_1[ATTEMPTS];
byte remaining[ATTEMPTS]; /* tokens D will still make */

/* Blocks of both D. `holder`: attempt + 1. `name`: prompt whose block 0 it is in the prefix cache,
 * request + 1. `content`: whose KV is there: 1 + request for a prompt's block 0, which is the same
 * in every attempt; 10 + attempt for block 1; 0 for anything else. */
#define ALL_BLOCKS (2 * BLOCKS)
#define PLACE(d, b) ((d) - 2) * BLOCKS + (b)
#define NO_BLOCK 15
byte holder[ALL_BLOCKS];
byte name[ALL_BLOCKS];
byte content[ALL_BLOCKS];

/* Faults left. */
#if DUPLICATES > 0
bool was_granted[ATTEMPTS];
bool committed[ATTEMPTS];
#endif
byte losses = LOSSES;
byte duplicates = DUPLICATES;
byte crashes = CRASHES;
byte suspects = SUSPECTS;
byte cancels = CANCELS;
byte router_crashes = ROUTER_CRASHES;

byte i, n;              /* scratch, always 0 between steps */
byte found_0, found_1;

/* ------------------------------------------------------------------ blocks of D */

/* What ended is forgotten, so that two histories that differ in nothing else are one state. With
 * ABSORB, messages about an attempt that is over on both sides are dropped, too: the tombstones of
 * both would do that (shown without ABSORB). */
inline forget(a) {
    if
    :: p_state[a] == OVER -> granted[a] = false; computed[a] = 0; posted[a] = 0; HEAR(a, END_P)
    :: else
    fi;
    if
    :: d_state[a] == GONE -> covered[a] = false; started[a] = false; HEAR(a, END_D | LOST_P)
    :: else
    fi;
    if
    :: p_state[a] == OVER && d_state[a] == GONE && flying[a] == 0 ->
        kept[a] = false; block_0[a] = 0; block_1[a] = 0; remaining[a] = 0;
        if :: open[a] -> skip :: else -> base[a] = 0 fi;
#ifdef ABSORB
        wire[a] = 0
#else
        skip
#endif
    :: else
    fi
}

inline release(b) {
    holder[b] = 0;
    if :: name[b] == 0 -> content[b] = 0 :: else fi
}

/* The lowest free block: the one freed last is given out first, which is the worst case. */
inline find_free(d, b) {
    b = NO_BLOCK;
    for (i : 0 .. BLOCKS - 1) {
        if
        :: b == NO_BLOCK && holder[PLACE(d, i)] == 0 && name[PLACE(d, i)] == 0 -> b = PLACE(d, i)
        :: else
        fi
    }
    for (i : 0 .. BLOCKS - 1) {  /* else evict */
        if
        :: b == NO_BLOCK && holder[PLACE(d, i)] == 0 -> b = PLACE(d, i)
        :: else
        fi
    }
    i = 0
}

inline give_out(b, a) {
    assert(holder[b] == 0);
    /* (a) Nobody may still write what is given out. */
    for (i : 0 .. ATTEMPTS - 1) {
        assert(!((flying[i] & 1) && block_0[i] == b) && !((flying[i] & 2) && block_1[i] == b))
    }
    i = 0;
    holder[b] = a + 1;
    name[b] = 0;
    content[b] = 0
}

inline find_named(d, r, b) {
    b = NO_BLOCK;
    for (i : 0 .. BLOCKS - 1) {
        if
        :: name[PLACE(d, i)] == r + 1 && holder[PLACE(d, i)] == 0 -> b = PLACE(d, i)
        :: else
        fi
    }
    i = 0
}

/* Block 0 is complete: name it, if no other block has that name. */
inline name_block(b, a) {
    for (i : 0 .. BLOCKS - 1) {
        if :: name[PLACE(d_of[a], i)] == REQUEST(a) + 1 -> n = 1 :: else fi
    }
    if :: n == 0 -> name[b] = REQUEST(a) + 1 :: else fi;
    n = 0;
    i = 0
}

inline free_quarantined(a) {
    if :: holder[block_0[a]] == a + 1 -> release(block_0[a]) :: else fi;
    if :: holder[block_1[a]] == a + 1 -> release(block_1[a]) :: else fi;
    d_state[a] = GONE;
    forget(a)
}

/* `Reservations._end`: quiet is true when P cannot write any more. */
inline end_reservation(a, quiet) {
    if
    :: d_state[a] == PARKED ->
        d_state[a] = GONE;
        if :: started[a] && !quiet -> SEND(a, CANCEL) :: else fi
    :: d_state[a] == GRANTED ->
#ifdef KEEP_UNCOVERED
        name_block(block_0[a], a);
        release(block_0[a]);
#else
        if
        :: kept[a] -> release(block_0[a])
        :: !kept[a] && covered[a] -> name_block(block_0[a], a); release(block_0[a])
        :: else
        fi;
#endif
        if
#ifdef NO_QUARANTINE
        :: true ->
#else
        :: quiet ->
#endif
            free_quarantined(a);
            if :: !quiet -> SEND(a, CANCEL) :: else fi
        :: else -> d_state[a] = QUARANTINED; SEND(a, CANCEL)
        fi
    :: d_state[a] == RUNNING -> release(block_0[a]); release(block_1[a]); d_state[a] = GONE
    :: else
    fi;
    forget(a)
}

/* ------------------------------------------------------------------ P: one transfer */

proctype Prefill(byte a) {
end:
    do
    /* The last chunk, and with it token 1. */
    :: d_step { p_state[a] == STARTED && computed[a] == 1 ->
        computed[a] = 2; ANSWER(a, TOKEN_1);
        if :: remaining[a] == 0 -> p_state[a] = OVER; forget(a) :: else fi }
    /* [5] */
    :: d_step { IN_WIRE(a, GRANT) && !dead[p_of[a]] ->
        TAKE(a, GRANT);
        if
        :: p_state[a] == STARTED -> granted[a] = true;
            if :: kept[a] -> posted[a] = posted[a] | 1 :: else fi
        :: p_state[a] == OVER || p_state[a] == NONE -> SEND(a, QUIET)
        :: else
        fi }
    /* [6] Post what is computed and granted. It may land any time from now on. */
    :: d_step { p_state[a] == STARTED && granted[a] && !(posted[a] & 1) ->
        posted[a] = posted[a] | 1; flying[a] = flying[a] | 1 }
    :: d_step { p_state[a] == STARTED && granted[a] && computed[a] == 2 && !(posted[a] & 2) ->
        posted[a] = posted[a] | 2; flying[a] = flying[a] | 2 }
    /* [8] All has landed: the commit record; the transfer is over here. */
#ifdef EARLY_COMMIT
    :: d_step { p_state[a] == STARTED && posted[a] == 3 ->
#else
    :: d_step { p_state[a] == STARTED && posted[a] == 3 && flying[a] == 0 ->
#endif
#if DUPLICATES > 0
        committed[a] = true;
#endif
        SEND(a, COMMIT); p_state[a] = OVER;
        forget(a) }
    /* [9] */
    :: d_step { IN_WIRE(a, CANCEL) && !dead[p_of[a]] ->
        TAKE(a, CANCEL);
        if
        :: p_state[a] == STARTED -> p_state[a] = DRAINING
        :: p_state[a] == OVER || p_state[a] == NONE -> SEND(a, QUIET)
        :: else
        fi }
    :: d_step { ON_LINK(a, END_P) && !dead[p_of[a]] ->
        HEAR(a, END_P);
        if :: p_state[a] == STARTED -> p_state[a] = DRAINING :: else fi }
    /* [10] Nothing is posted any more and nothing will be. */
#ifdef EARLY_QUIET
    :: d_step { p_state[a] == DRAINING ->
#else
    :: d_step { p_state[a] == DRAINING && flying[a] == 0 ->
#endif
        p_state[a] = OVER;
        if :: dead[d_of[a]] || remaining[a] == 0 :: else -> SEND(a, QUIET) fi;
        forget(a) }
    od
}

/* ------------------------------------------------------------------ D: one reservation */

#define LIVES(a) (!dead[d_of[a]])

/* Blocks to be had: two, or one beside a named block 0. */
#define UNHELD(d, b) (holder[PLACE(d, b)] == 0 -> 1 : 0)
#if BLOCKS == 3
#define NUM_UNHELD(d) (UNHELD(d, 0) + UNHELD(d, 1) + UNHELD(d, 2))
#else
#define NUM_UNHELD(d) (UNHELD(d, 0) + UNHELD(d, 1))
#endif
#define ENOUGH(a) (NUM_UNHELD(d_of[a]) >= 2)

proctype Decode(byte a) {
    byte other;
end:
    do
    /* [2] The command. An older attempt of the same request ends here. */
    :: d_step { ON_LINK(a, LEG_D) && LIVES(a) ->
        HEAR(a, LEG_D); d_state[a] = PARKED;
        for (other : REQUEST(a) * TRIES .. a) {
            if
            :: other != a && d_of[other] == d_of[a] -> end_reservation(other, false)
            :: else
            fi
        }
        other = 0 }
    /* [4] START: wanted, too early, or of something that has ended. */
    :: d_step { IN_WIRE(a, START) && LIVES(a) ->
        TAKE(a, START);
        if
        :: d_state[a] == GONE -> SEND(a, CANCEL)
        :: d_state[a] == PARKED || d_state[a] == NONE -> started[a] = true
        :: else
        fi }
    /* [5] A grant, as soon as there are blocks: a named block 0 is a local hit. */
    :: d_step { d_state[a] == PARKED && started[a] && LIVES(a) && ENOUGH(a) ->
        find_named(d_of[a], REQUEST(a), found_0);
        if
        :: found_0 != NO_BLOCK -> kept[a] = true; holder[found_0] = a + 1
        :: else -> find_free(d_of[a], found_0); give_out(found_0, a)
        fi;
        find_free(d_of[a], found_1);
        give_out(found_1, a);
        block_0[a] = found_0; block_1[a] = found_1; found_0 = 0; found_1 = 0;
#if DUPLICATES > 0
        was_granted[a] = true;
#endif
        d_state[a] = GRANTED; SEND(a, GRANT) }
    /* [7] */
    :: d_step { IN_WIRE(a, WATERMARK) && LIVES(a) ->
        TAKE(a, WATERMARK);
        if :: d_state[a] == GRANTED -> covered[a] = true :: else fi }
    /* [8] The commit: (b) what the request will read is what this attempt wrote or D had kept. */
    :: d_step { IN_WIRE(a, COMMIT) && LIVES(a) ->
        TAKE(a, COMMIT);
#ifdef NO_EPOCH
        for (other : REQUEST(a) * TRIES .. REQUEST(a) * TRIES + TRIES - 1) {
            if
            :: d_state[other] == GRANTED && d_of[other] == d_of[a] -> n = other + 1
            :: else
            fi
        }
        if :: n != 0 -> other = n - 1; n = 0 :: else -> other = a fi;
#else
        other = a;
#endif
        if
        :: d_state[other] == GRANTED ->
            assert(content[block_0[other]] == 1 + REQUEST(other));
            assert(content[block_1[other]] == 10 + other);
            assert(holder[block_0[other]] == other + 1 && holder[block_1[other]] == other + 1);
            if :: kept[other] :: else -> name_block(block_0[other], other) fi;
            d_state[other] = RUNNING
        :: d_state[other] == QUARANTINED -> free_quarantined(other)
        :: else
        fi;
        other = 0 }
    /* [11] Tokens; with the last one the blocks are free. */
    :: d_step { d_state[a] == RUNNING && LIVES(a) ->
        assert(content[block_0[a]] == 1 + REQUEST(a) && content[block_1[a]] == 10 + a);
        remaining[a]--;
        if :: open[a] -> decoded[a]++ :: else fi;
        if :: remaining[a] == 0 -> end_reservation(a, true) :: else fi }
    /* [10] */
    :: d_step { IN_WIRE(a, QUIET) && LIVES(a) ->
        TAKE(a, QUIET);
        if
        :: d_state[a] == PARKED || d_state[a] == GRANTED ->
            end_reservation(a, true); ANSWER(a, FAILED)
        :: d_state[a] == QUARANTINED -> free_quarantined(a)
        :: else
        fi }
    /* [9] The router wants it no more, or its P is gone. */
    :: d_step { ON_LINK(a, END_D) && !ON_LINK(a, LEG_D) && LIVES(a) ->
        HEAR(a, END_D); end_reservation(a, false);
        if :: d_state[a] == NONE -> d_state[a] = GONE :: else fi;
        forget(a) }
    :: d_step { ON_LINK(a, LOST_P) && !ON_LINK(a, LEG_D) && LIVES(a) ->
        HEAR(a, LOST_P);
        if
        :: d_state[a] == PARKED || d_state[a] == GRANTED ->
            end_reservation(a, false); ANSWER(a, FAILED)
        :: else
        fi }
    /* A dead process writes nothing. */
    :: d_step { d_state[a] == QUARANTINED && dead[p_of[a]] && LIVES(a) -> free_quarantined(a) }
#ifdef LEASE_FREES
    :: d_step { d_state[a] == QUARANTINED && gone[p_of[a]] && LIVES(a) -> free_quarantined(a) }
#endif
#ifndef NO_RECANCEL
    /* Asked and not answered: ask again. (Asking more often changes nothing: it is a flag.) */
    :: d_step { d_state[a] == QUARANTINED && LIVES(a) && !dead[p_of[a]] &&
                !IN_WIRE(a, CANCEL | QUIET | COMMIT) && p_state[a] != DRAINING ->
        SEND(a, CANCEL) }
#endif
    od
}

/* ------------------------------------------------------------------ the wire */

inline land(a, bit_, b, tag) {
    flying[a] = flying[a] & (3 - bit_);
    if
    :: LIVES(a) ->
        /* (a) A write meets a block that its own attempt holds, in use or in quarantine. */
        assert(holder[b] == a + 1 && d_state[a] != RUNNING);
        content[b] = tag
    :: else
    fi
}

proctype Wire(byte a) {
end:
    do
    /* A write lands. With block 0 a watermark may leave (or be lost, or P was told to stop). */
    :: d_step { (flying[a] & 1) -> land(a, 1, block_0[a], 1 + REQUEST(a)) }
    :: d_step { (flying[a] & 1) && p_state[a] == STARTED ->
        land(a, 1, block_0[a], 1 + REQUEST(a)); SEND(a, WATERMARK) }
    :: d_step { (flying[a] & 2) -> land(a, 2, block_1[a], 10 + a) }
    /* A lost watermark needs no fault: it may always be left unsent. */
    :: d_step { losses > 0 && IN_WIRE(a, START) -> TAKE(a, START); losses-- }
    :: d_step { losses > 0 && IN_WIRE(a, GRANT) -> TAKE(a, GRANT); losses-- }
    :: d_step { losses > 0 && IN_WIRE(a, COMMIT) -> TAKE(a, COMMIT); losses-- }
    :: d_step { losses > 0 && IN_WIRE(a, CANCEL) -> TAKE(a, CANCEL); losses-- }
    :: d_step { losses > 0 && IN_WIRE(a, QUIET) -> TAKE(a, QUIET); losses-- }
#if DUPLICATES > 0
    /* The copy of a message that was taken already. */
    :: d_step { duplicates > 0 && d_state[a] != NONE -> SEND(a, START); duplicates-- }
    :: d_step { duplicates > 0 && d_state[a] != NONE && d_state[a] != PARKED && was_granted[a] ->
        SEND(a, GRANT); duplicates-- }
    :: d_step { duplicates > 0 && p_state[a] == OVER && committed[a] ->
        SEND(a, COMMIT); duplicates-- }
#endif
    od
}

/* ------------------------------------------------------------------ the router */

#define LATEST(r) ((r) * TRIES + tries[r] - 1)
#define BEGUN(a)  ((a) - REQUEST(a) * TRIES < tries[REQUEST(a)])
#define LISTENS(r) (tries[r] > 0 && open[LATEST(r)] && !router_dead)
#define WANTS_PAIR(r) (!ended[r] && !router_dead && (tries[r] == 0 || !open[LATEST(r)]))
#define HAS_PAIR ((!gone[0] || !gone[1]) && (!gone[2] || !gone[3]))

/* [1]-[3] Both legs at once; without a token for D to make, only P's. P's command is taken at once
 * and START leaves: that either comes late is the same as START or P being slow. */
#define DISPATCH(r, p, d) \
    :: d_step { WANTS_PAIR(r) && tries[r] < TRIES && !gone[p] && !gone[d] && \
                 FIRST(r, p, d) && AGAIN(r, p, d) -> \
        tries[r]++; \
        p_of[LATEST(r)] = p; d_of[LATEST(r)] = d; open[LATEST(r)] = true; \
        base[LATEST(r)] = given[r]; remaining[LATEST(r)] = TOKENS - given[r] - 1; \
        p_state[LATEST(r)] = (dead[p] -> OVER : STARTED); computed[LATEST(r)] = 1; \
        if \
        :: remaining[LATEST(r)] > 0 -> \
            TELL(LATEST(r), LEG_D); \
            if :: !dead[p] -> SEND(LATEST(r), START) :: else fi \
        :: else \
        fi }

/* Symmetry: the nodes of a role are alike, so the first attempt goes to the first of each. Requests
 * are alike, so request 0 is first. */
#define FIRST(r, p, d) (tries[0] > 0 && IN_PART(r, p, d) || (r == 0 && p == 0 && d == 2))

/* With PICK_LOWEST a retry goes to the first living pair instead of to any. */
#ifdef PICK_LOWEST
#define AGAIN(r, p, d) (tries[r] == 0 || (p == (gone[0] -> 1 : 0) && d == (gone[2] -> 3 : 2)))
#else
#define AGAIN(r, p, d) true
#endif

/* A search too large for one go is done in parts that cover it: where request 1 goes first (unless
 * that pair is lost by then), and which node may be killed. */
#ifdef PART_P
#define IN_PART(r, p, d) (r == 0 || tries[1] > 0 || (p == PART_P && d == PART_D) || \
                          gone[PART_P] || gone[PART_D])
#else
#define IN_PART(r, p, d) true
#endif

inline close_attempt(a) {
    open[a] = false;
    has_token_1[a] = false;
    decoded[a] = 0;
    HEAR(a, TOKEN_1 | FAILED);
    if :: !dead[p_of[a]] && !gone[p_of[a]] && p_state[a] != OVER -> TELL(a, END_P) :: else fi;
    if
    :: !dead[d_of[a]] && !gone[d_of[a]] && d_state[a] != GONE &&
       (ON_LINK(a, LEG_D) || d_state[a] != NONE) -> TELL(a, END_D)
    :: else
    fi
}

/* (c) Exactly one terminal event. */
inline end_request(r) {
    assert(ended[r] == 0);
    ended[r]++
}

proctype Router(byte r) {
    byte a;
end:
    do
    DISPATCH(r, 0, 2)
    DISPATCH(r, 0, 3)
    DISPATCH(r, 1, 2)
    DISPATCH(r, 1, 3)
    /* The retry budget is used up, or there is no one to ask: a typed error. */
    :: d_step { WANTS_PAIR(r) && tries[0] > 0 && (tries[r] == TRIES || !HAS_PAIR) ->
        end_request(r) }
    /* [4'] Token 1 of this attempt goes on where earlier attempts ended. */
    :: d_step { LISTENS(r) && ON_LINK(LATEST(r), TOKEN_1) ->
        a = LATEST(r);
        HEAR(a, TOKEN_1); has_token_1[a] = true;
        assert(given[r] == base[a]);
        given[r]++;
        if :: given[r] == TOKENS -> end_request(r); close_attempt(a) :: else fi;
        a = 0 }
    /* [12] Tokens of D; those that overtake token 1 wait. */
    :: d_step { LISTENS(r) && decoded[LATEST(r)] > 0 && has_token_1[LATEST(r)] ->
        a = LATEST(r);
        decoded[a]--; given[r]++;
        assert(given[r] <= TOKENS);
        if
        :: given[r] == TOKENS ->
            assert(remaining[a] == 0 && decoded[a] == 0);
            end_request(r); open[a] = false; has_token_1[a] = false; HEAR(a, FAILED)
        :: else
        fi;
        a = 0 }
    /* An attempt failed: close it; the next one has a new epoch. */
    :: d_step { LISTENS(r) && ON_LINK(LATEST(r), FAILED) ->
        a = LATEST(r);
        close_attempt(a);
        a = 0 }
    /* The client leaves. */
    :: d_step { cancels > 0 && LISTENS(r) ->
        cancels--;
        a = LATEST(r);
        end_request(r); close_attempt(a);
        a = 0 }
    od
}

/* ------------------------------------------------------------------ faults and clock */

/* The router takes a node for dead: its links break, its peers hear of it, it ends all it has. */
inline lose_node(x) {
    gone[x] = true;
    for (n : 0 .. ATTEMPTS - 1) {
        if
        :: BEGUN(n) && p_of[n] == x ->
            HEAR(n, TOKEN_1);
            if :: !has_token_1[n] -> ANSWER(n, FAILED) :: else fi;
            if
            :: !dead[x] && (p_state[n] == STARTED) -> TELL(n, END_P)
            :: else -> HEAR(n, END_P)
            fi;
            if
            :: LIVES(n) && !gone[d_of[n]] &&
               (ON_LINK(n, LEG_D) || d_state[n] == PARKED || d_state[n] == GRANTED) ->
                TELL(n, LOST_P)
            :: else
            fi
        :: BEGUN(n) && d_of[n] == x ->
            decoded[n] = 0;
            ANSWER(n, FAILED);
            if
            :: !dead[x] && d_state[n] != NONE && d_state[n] != GONE -> TELL(n, END_D)
            :: else -> HEAR(n, END_D)
            fi;
            HEAR(n, LEG_D | LOST_P);
            if
            :: !dead[p_of[n]] && !gone[p_of[n]] && p_state[n] != OVER -> TELL(n, END_P)
            :: else
            fi
        :: else
        fi
    }
    n = 0
}

inline kill(x) {
    dead[x] = true;
    for (n : 0 .. ATTEMPTS - 1) {
        if
        :: BEGUN(n) && p_of[n] == x ->
            p_state[n] = OVER;
#ifndef SOCKET_TAIL
            flying[n] = 0;  /* what was posted ends with the process */
#endif
            TAKE(n, TO_P); forget(n)
        :: BEGUN(n) && d_of[n] == x ->
            d_state[n] = GONE; flying[n] = 0;
            TAKE(n, TO_D); HEAR(n, LEG_D);
#ifdef ABSORB
            /* P's transfer to a dead D changes nothing but P, until P hears of it. */
            wire[n] = 0; granted[n] = false; posted[n] = 0;
            if :: computed[n] == 2 -> p_state[n] = OVER :: else fi;
#endif
            forget(n)
        :: else
        fi
    }
    if
    :: x >= 2 ->
        for (n : 0 .. BLOCKS - 1) {
            holder[PLACE(x, n)] = 0; name[PLACE(x, n)] = 0; content[PLACE(x, n)] = 0
        }
    :: else
    fi;
    n = 0
}

#define BEGAN (tries[0] > 0)
#define KILL(x)    :: d_step { crashes > 0 && BEGAN && !dead[x] -> crashes--; kill(x) }
#define NOTICE(x)  :: d_step { dead[x] && !gone[x] -> lose_node(x) }
#define SUSPECT(x) :: d_step { suspects > 0 && BEGAN && !dead[x] && !gone[x] && !router_dead -> \
                        suspects--; lose_node(x) }

/* A node that lives dials again, and is taken in once it has ended all it had. */
#define P_ENDS(x, a) (p_of[a] == x && ON_LINK(a, END_P))
#define D_ENDS(x, a) (d_of[a] == x && ON_LINK(a, END_D))
#define ENDS(x, a)   ((P_ENDS(x, a) || D_ENDS(x, a)) && BEGUN(a))
#if ATTEMPTS == 2
#define ANY_ENDS(x)  (ENDS(x, 0) || ENDS(x, 1))
#elif ATTEMPTS == 3
#define ANY_ENDS(x)  (ENDS(x, 0) || ENDS(x, 1) || ENDS(x, 2))
#else
#define ANY_ENDS(x)  (ENDS(x, 0) || ENDS(x, 1) || ENDS(x, 2) || ENDS(x, 3))
#endif
#define REJOIN(x)  :: d_step { gone[x] && !dead[x] && !ANY_ENDS(x) -> gone[x] = false }

#if REQUESTS == 1
#define OPEN_REQUEST (ended[0] == 0)
#else
#define OPEN_REQUEST (ended[0] == 0 || ended[1] == 0)
#endif

proctype Faults() {
end:
    do
#ifdef PART_KILLED
    KILL(PART_KILLED)
#else
    KILL(0)
    KILL(1)
    KILL(2)
    KILL(3)
#endif
    NOTICE(0)
    NOTICE(1)
    NOTICE(2)
    NOTICE(3)
    SUSPECT(0)
    SUSPECT(1)
    SUSPECT(2)
    SUSPECT(3)
    REJOIN(0)
    REJOIN(1)
    REJOIN(2)
    REJOIN(3)
    /* kill -9 of the router: its clients hear of it at once, its nodes end all they have. */
    :: d_step { router_crashes > 0 && BEGAN ->
        router_crashes--; router_dead = true;
        for (n : 0 .. REQUESTS - 1) {
            if :: ended[n] == 0 -> ended[n] = 1 :: else fi
        }
        for (n : 0 .. ATTEMPTS - 1) {
            if
            :: BEGUN(n) ->
                if
                :: open[n] -> close_attempt(n)
                :: else
                fi
            :: else
            fi
        }
        n = 0 }
    /* No more faults come: else nothing could be said about the end. */
    :: d_step { crashes + suspects + cancels + router_crashes > 0 ->
        crashes = 0; suspects = 0; cancels = 0; router_crashes = 0 }
    od
}

/* When nothing else can happen: deadlines; and when they are done, (d) the end. */
proctype Clock() {
    byte k;
    do
    :: atomic { timeout && OPEN_REQUEST ->
        assert(losses < LOSSES);  /* only a lost message needs the deadline */
        for (k : 0 .. REQUESTS - 1) {
            if
            :: ended[k] == 0 -> end_request(k); n = LATEST(k); close_attempt(n); n = 0
            :: else
            fi
        }
        k = 0 }
    :: atomic { timeout && !OPEN_REQUEST ->
        for (k : 0 .. REQUESTS - 1) { assert(ended[k] == 1) }
        for (k : 0 .. ALL_BLOCKS - 1) { assert(holder[k] == 0) }
        for (k : 0 .. ATTEMPTS - 1) {
            assert(flying[k] == 0);
            assert(p_state[k] == NONE || p_state[k] == OVER);
            assert(d_state[k] == NONE || d_state[k] == GONE)
        }
        for (k : 0 .. 3) { assert(gone[k] == dead[k]) } } -> break
    od
}

init {
    atomic {
        for (i : 0 .. ATTEMPTS - 1) { run Prefill(i); run Decode(i); run Wire(i) }
        for (i : 0 .. REQUESTS - 1) { run Router(i) }
        i = 0;
        run Faults();
        run Clock()
    }
}
