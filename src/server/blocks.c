/* server/blocks.c: see blocks.h.
 *
 * A *map* is the state of every block of group 0 at one moment between two steps, and the table of every
 * request that runs. It has a number that grows whenever a look finds something changed. A stream of events
 * begins with a whole map and goes on with what is different in the next one, at most LOOKS_PER_S times a
 * second; so whoever follows it has, at every number, what /paged/blocks says there.
 *
 * Looks at the engine and its cache inside paged__server_look only.
 */
#include "server/blocks.h"

#include <stdlib.h>

#include "base/base.h"

enum { LOOKS_PER_S = 10, BLOCK_SIZE_MAX = 1024 /* tokens, as of mem.h */ };

/* States, a letter each: . free, its memory not taken from the system, f free, c cached, u used by one,
 * s shared, t divided into tiles of packed tails; a capital U or S: the last, partly filled block of a
 * request. */
typedef struct cell {
    char state;
    int32_t refs;
    uint64_t owner; /* a request that has it in its table, the oldest; 0: none */
} cell;

typedef struct look {
    paged__buffer cells;    /* cell [n] */
    paged__buffer requests; /* JSON, a list without its brackets */
    int32_t n_blocks, block_size, n_running, n_waiting;
    bool ok;
} look;

struct paged__map {
    look now;
    uint64_t number;
    struct event *timer;
    paged__conn *watchers[64];
    bool starts[64]; /* has not had a whole map yet */
    int32_t n_watchers;
};

static cell *cells_of(const look *l) {
    return (cell *)(void *)l->cells.data;
}

/* ---- looking ---- */

static cell cell_of(const paged_block_view *view) {
    switch (view->state) {
    case PAGED_BLOCK_CACHED:
        return (cell){'c', 0, 0};
    case PAGED_BLOCK_TAILS:
        return (cell){'t', view->refs, 0};
    case PAGED_BLOCK_USED:
        return (cell){view->refs > 1 ? 's' : 'u', view->refs, 0};
    case PAGED_BLOCK_FREE:
        return (cell){view->backed ? 'f' : '.', 0, 0};
    case PAGED_BLOCK_ABSENT:
        break;
    }
    return (cell){'.', 0, 0};
}

/* Those that run, oldest rank first; the caller frees. NULL: no memory. */
static paged_request_view *running_of(const paged_engine *e, int32_t *n_running) {
    paged_engine_stats stats;
    paged_engine_get_stats(e, &stats);
    *n_running = stats.n_running;
    paged_request_view *views = paged__alloc((size_t)PAGED_MAX(*n_running, 1), sizeof *views);
    if (views) paged_engine_requests(e, views, *n_running);
    return views;
}

/* The table of a request in group 0 and how many entries it has. */
static const int32_t *table_of(const paged_cache *cache, const paged_request_view *r, int32_t block_size,
                               int32_t *n) {
    paged_tables tables = {0};
    const int32_t row = paged_seq_row(cache, r->seq);
    *n = 0;
    if (row < 0 || paged_cache_tables(cache, 0, &tables) != PAGED_OK) return NULL;
    *n = (paged_seq_len(cache, r->seq) + paged_seq_reserved(cache, r->seq) + block_size - 1) / block_size;
    return tables.blocks + (int64_t)row * tables.seq_stride;
}

static void look_at_request(const paged_cache *cache, const paged_request_view *r, look *l) {
    const int32_t len = paged_seq_len(cache, r->seq);
    int32_t n;
    const int32_t *table = table_of(cache, r, l->block_size, &n);
    l->ok = l->ok &&
            paged__buffer_printf(&l->requests,
                                 "%s{\"id\":%llu,\"tokens\":%d,\"prompt_tokens\":%d,\"cached_tokens\":%d,"
                                 "\"wait\":\"%s\",\"preemptions\":%d,\"blocks\":[",
                                 l->requests.len ? "," : "", (unsigned long long)r->id, len, r->n_prompt,
                                 r->n_reused, paged_wait_name(r->wait), r->n_preemptions);
    for (int32_t i = 0; i < n; i++) {
        l->ok = l->ok && paged__buffer_printf(&l->requests, "%s%d", i ? "," : "", table[i]);
        if (table[i] < 0) continue;
        cell *c = &cells_of(l)[table[i]];
        if (!c->owner) c->owner = r->id;
        if (i == n - 1 && len % l->block_size != 0 && c->state != 't') c->state = (char)(c->state & ~0x20);
    }
    l->ok = l->ok && paged__buffer_printf(&l->requests, "]}");
}

static void take_look(paged_engine *e, void *user) {
    enum { AT_ONCE = 256 };
    look *l = user;
    const paged_cache *cache = paged_engine_cache(e);
    paged_engine_stats stats;
    paged_cache_stats facts;
    paged_block_view views[AT_ONCE];
    paged_engine_get_stats(e, &stats);
    paged_cache_get_stats(cache, &facts);
    paged_request_view *running = running_of(e, &l->n_running);
    l->n_waiting = stats.n_waiting;
    l->block_size = facts.block_size;
    l->cells.len = l->requests.len = 0;
    l->n_blocks = 0;
    l->ok = running != NULL;
    for (int32_t n = AT_ONCE; l->ok && n == AT_ONCE; l->n_blocks += n) {
        n = paged_cache_blocks(cache, 0, l->n_blocks, AT_ONCE, views);
        for (int32_t i = 0; l->ok && i < n; i++) {
            const cell c = cell_of(&views[i]);
            l->ok = paged__buffer_append(&l->cells, &c, sizeof c);
        }
    }
    for (int32_t i = 0; l->ok && i < l->n_running; i++) look_at_request(cache, &running[i], l);
    paged__free(running);
}

static void free_look(look *l) {
    paged__buffer_free(&l->cells);
    paged__buffer_free(&l->requests);
}

/* ---- the map of the server ---- */

static bool same_look(const look *a, const look *b) {
    return a->n_waiting == b->n_waiting && a->cells.len == b->cells.len &&
           a->requests.len == b->requests.len &&
           (a->requests.len == 0 || memcmp(a->requests.data, b->requests.data, a->requests.len) == 0) &&
           (a->cells.len == 0 || memcmp(a->cells.data, b->cells.data, a->cells.len) == 0);
}

static bool put_tail(const look *l, uint64_t number, paged__buffer *out) {
    return paged__buffer_printf(out, "],\"running\":%d,\"waiting\":%d,\"requests\":[", l->n_running,
                                l->n_waiting) &&
           paged__buffer_append(out, l->requests.data, l->requests.len) &&
           paged__buffer_printf(out, "],\"event\":%llu}", (unsigned long long)number);
}

static bool put_map(const paged__server *s, const struct paged__map *m, paged__buffer *out) {
    const look *l = &m->now;
    bool ok = paged__buffer_printf(out, "{\"block_size\":%d,\"n_blocks\":%d,\"states\":\"",
                                   s->info.block_size, l->n_blocks);
    for (int32_t b = 0; ok && b < l->n_blocks; b++) ok = paged__buffer_append(out, &cells_of(l)[b].state, 1);
    ok = ok && paged__buffer_printf(out, "\",\"refs\":[");
    for (int32_t b = 0; ok && b < l->n_blocks; b++)
        ok = paged__buffer_printf(out, "%s%d", b ? "," : "", cells_of(l)[b].refs);
    ok = ok && paged__buffer_printf(out, "],\"owners\":[");
    for (int32_t b = 0; ok && b < l->n_blocks; b++)
        ok = paged__buffer_printf(out, "%s%llu", b ? "," : "", (unsigned long long)cells_of(l)[b].owner);
    return ok && put_tail(l, m->number, out);
}

/* What is different: [block, state, refs, owner] of each that changed. */
static bool put_changes(const struct paged__map *m, const look *before, paged__buffer *out) {
    const look *l = &m->now;
    bool ok = paged__buffer_printf(out, "{\"changes\":["), first = true;
    for (int32_t b = 0; ok && b < l->n_blocks; b++) {
        const cell *c = &cells_of(l)[b], *old = &cells_of(before)[b];
        if (c->state == old->state && c->refs == old->refs && c->owner == old->owner) continue;
        ok = paged__buffer_printf(out, "%s[%d,\"%c\",%d,%llu]", first ? "" : ",", b, c->state, c->refs,
                                  (unsigned long long)c->owner);
        first = false;
    }
    return ok && put_tail(l, m->number, out);
}

static void send_event(paged__conn *c, const char *name, const paged__buffer *json) {
    paged__buffer event = {0};
    if (paged__buffer_printf(&event, "event: %s\ndata: ", name) &&
        paged__buffer_append(&event, json->data, json->len) && paged__buffer_append(&event, "\n\n", 2))
        paged__stream_write(c, event.data, event.len);
    paged__buffer_free(&event);
}

/* Looks again, and tells those who watch what has changed. False: no memory, or the engine is in a long
 * step. */
static bool refresh(paged__server *s) {
    struct paged__map *m = s->map;
    look next = {0};
    paged__buffer changes = {0};
    if (!paged__server_look(s, take_look, &next)) return false;
    if (!next.ok || (m->number && same_look(&m->now, &next))) {
        const bool ok = next.ok;
        free_look(&next);
        return ok;
    }
    look before = m->now;
    m->now = next;
    const bool told = m->number++ > 0 && before.n_blocks == next.n_blocks && m->n_watchers > 0 &&
                      put_changes(m, &before, &changes);
    for (int32_t i = 0; i < m->n_watchers; i++) {
        if (m->starts[i]) continue;
        /* One that does not keep up gets the whole map once it does. */
        if (!told || paged__stream_is_full(m->watchers[i]))
            m->starts[i] = true;
        else
            send_event(m->watchers[i], "changes", &changes);
    }
    paged__buffer_free(&changes);
    free_look(&before);
    return true;
}

static void on_look(evutil_socket_t fd, short what, void *user) {
    paged__server *s = user;
    struct paged__map *m = s->map;
    paged__buffer whole = {0};
    (void)fd, (void)what;
    if (m->n_watchers == 0) return;
    const bool has_looked = refresh(s);
    for (int32_t i = 0; has_looked && i < m->n_watchers; i++) {
        if (!m->starts[i] || paged__stream_is_full(m->watchers[i])) continue;
        if (whole.len == 0 && !put_map(s, m, &whole)) break;
        send_event(m->watchers[i], "map", &whole);
        m->starts[i] = false;
    }
    paged__buffer_free(&whole);
    const struct timeval pause = {0, 1000000 / LOOKS_PER_S};
    event_add(m->timer, &pause);
}

static bool make_map(paged__server *s) {
    if (s->map) return true;
    struct paged__map *m = paged__calloc(1, sizeof *m);
    if (!m) return false;
    m->timer = evtimer_new(s->base, on_look, s);
    if (!m->timer) {
        paged__free(m);
        return false;
    }
    s->map = m;
    return true;
}

void paged__map_free(paged__server *s) {
    if (!s->map) return;
    event_free(s->map->timer);
    free_look(&s->map->now);
    paged__free(s->map);
    s->map = NULL;
}

/* ---- one block ---- */

typedef struct block_facts {
    int32_t block, n_tokens,
        position; /* position: of its first token in a request that has it; -1: unknown */
    int32_t tokens[BLOCK_SIZE_MAX];
    cell cell;
    paged__buffer owners; /* JSON, a list without its brackets */
    bool exists;
} block_facts;

static void look_at_block(paged_engine *e, void *user) {
    block_facts *f = user;
    const paged_cache *cache = paged_engine_cache(e);
    paged_cache_stats facts;
    paged_block_view view;
    int32_t n_running;
    f->exists = f->block >= 0 && paged_cache_blocks(cache, 0, f->block, 1, &view) == 1;
    paged_request_view *running = f->exists ? running_of(e, &n_running) : NULL;
    if (!running) return;
    paged_cache_get_stats(cache, &facts);
    f->cell = cell_of(&view);
    f->n_tokens = PAGED_MAX(paged_block_tokens(cache, 0, f->block, f->tokens, &f->position), 0);
    if (f->n_tokens == 0) f->position = -1;
    for (int32_t i = 0; i < n_running; i++) {
        int32_t n, at = 0;
        const int32_t *table = table_of(cache, &running[i], facts.block_size, &n);
        while (at < n && table[at] != f->block) at++;
        if (at == n) continue;
        paged__buffer_printf(&f->owners, "%s%llu", f->owners.len ? "," : "",
                             (unsigned long long)running[i].id);
    }
    paged__free(running);
}

static void answer_block(paged__conn *c, const char *name) {
    char *end;
    const long block = strtol(name, &end, 10);
    block_facts *f = paged__calloc(1, sizeof *f);
    if (!f) {
        paged__reply_error(c, 503, NULL, NULL, "no memory");
        return;
    }
    f->block = !*name || *end || block < 0 || block > INT32_MAX ? -1 : (int32_t)block;
    if (!paged__server_look(c->server, look_at_block, f)) {
        paged__free(f);
        paged__reply_busy(c);
        return;
    }
    if (!f->exists) {
        paged__free(f);
        paged__reply_error(c, 404, NULL, "not_found", "there is no block '%.20s'", name);
        return;
    }
    const paged_tokenizer *tok = paged_model_tokenizer(c->server->world.model);
    json_t *tokens = json_array(), *pieces = json_array();
    for (int32_t i = 0; i < f->n_tokens; i++) {
        char bytes[PAGED_DETOK_MAX];
        const int32_t n = paged_token_bytes(tok, f->tokens[i], true, bytes, sizeof bytes);
        json_array_append_new(tokens, json_integer(f->tokens[i]));
        json_array_append_new(pieces, paged__json_text(bytes, (size_t)PAGED_MAX(n, 0)));
    }
    paged__buffer owners = {0};
    const bool ok = paged__buffer_printf(&owners, "[") &&
                    paged__buffer_append(&owners, f->owners.data, f->owners.len) &&
                    paged__buffer_append(&owners, "]", 1);
    json_t *list = ok ? json_loadb(owners.data, owners.len, 0, NULL) : NULL;
    json_t *value = json_pack("{s:i, s:s#, s:i, s:i, s:o, s:o, s:o}", "block", f->block, "state",
                              &f->cell.state, 1, "refs", f->cell.refs, "position", f->position, "requests",
                              list, "tokens", tokens, "pieces", pieces);
    paged__buffer_free(&owners);
    paged__buffer_free(&f->owners);
    paged__free(f);
    paged__reply_json(c, 200, value);
}

/* ---- routes ---- */

void paged__blocks_route(paged__conn *c, const char *block) {
    if (block[0]) {
        answer_block(c, block);
        return;
    }
    paged__buffer text = {0};
    if (make_map(c->server) && refresh(c->server) && put_map(c->server, c->server->map, &text))
        paged__reply(c, 200, "application/json", NULL, text.data, text.len);
    else
        paged__reply_error(c, 503, NULL, NULL, "no map: no memory for it, or the engine is in a long step");
    paged__buffer_free(&text);
}

static void on_watcher_gone(paged__conn *c) {
    struct paged__map *m = c->server->map;
    int32_t i = 0;
    while (m->watchers[i] != c) i++;
    m->n_watchers--;
    m->watchers[i] = m->watchers[m->n_watchers];
    m->starts[i] = m->starts[m->n_watchers];
}

static void on_watcher_tick(paged__conn *c) {
    if (!paged__stream_is_full(c)) paged__stream_write(c, ": ping\n\n", 8);
}

void paged__events_route(paged__conn *c) {
    enum { WATCHERS_MAX = sizeof c->server->map->watchers / sizeof c->server->map->watchers[0] };
    if (!make_map(c->server)) {
        paged__reply_error(c, 503, NULL, NULL, "no memory for the map");
        return;
    }
    struct paged__map *m = c->server->map;
    if (m->n_watchers == WATCHERS_MAX) {
        paged__reply_error(c, 429, NULL, NULL, "%d clients watch already", WATCHERS_MAX);
        return;
    }
    paged__stream_begin(c, "text/event-stream; charset=utf-8");
    if (c->head_only) {
        paged__stream_end(c);
        return;
    }
    m->watchers[m->n_watchers] = c;
    m->starts[m->n_watchers++] = true;
    c->work = m;
    c->is_endless = true;
    c->on_gone = on_watcher_gone;
    c->on_tick = on_watcher_tick;
    const struct timeval now = {0, 0};
    event_add(m->timer, &now);
}

/* ---- /slots ---- */

/* llama.cpp's view: a slot is a place among those that run at once. */
static void list_slots(paged_engine *e, void *user) {
    json_t *list = user;
    paged_engine_info info;
    int32_t n_running;
    paged_request_view *running = running_of(e, &n_running);
    paged_engine_get_info(e, &info);
    for (int32_t i = 0; running && i < info.max_running; i++) {
        const paged_request_view *r = i < n_running ? &running[i] : NULL;
        json_t *slot = json_pack("{s:i, s:i, s:b, s:b}", "id", (int)i, "n_ctx", (int)info.n_ctx,
                                 "speculative", 0, "is_processing", r != NULL);
        if (r) {
            json_object_set_new(slot, "id_task", json_integer((json_int_t)r->id));
            json_object_set_new(slot, "n_prompt_tokens", json_integer(r->n_prompt));
            json_object_set_new(slot, "n_prompt_tokens_cache", json_integer(r->n_reused));
            json_object_set_new(slot, "n_decoded", json_integer(r->n_tokens - r->n_prompt));
        } else {
            json_object_set_new(slot, "id_task", json_integer(-1));
        }
        json_array_append_new(list, slot);
    }
    paged__free(running);
}

void paged__slots_route(paged__conn *c) {
    json_t *list = json_array();
    if (paged__server_look(c->server, list_slots, list)) {
        paged__reply_json(c, 200, list);
    } else {
        json_decref(list);
        paged__reply_busy(c);
    }
}
